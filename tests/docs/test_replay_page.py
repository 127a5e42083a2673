"""docs/replay.md: its programs run, one after the other, and print what the page says."""

import re
from typing import Any

import pytest
from pages import DOCS, blocks

PAGE = DOCS["replay.md"]


def test_the_programs_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for program in blocks(PAGE, "python"):
        exec(program, names)  # the later ones go on with the names of the earlier
        told = re.findall(r"print\(.*\)  # (.*)", program)
        if "print(error)" in program:
            (text,) = blocks(PAGE, "text")
            told = [text.strip()]
        printed = capsys.readouterr().out.strip().splitlines()
        assert len(printed) == len(told)
        for found, wanted in zip(printed, told, strict=True):
            assert wanted.startswith(found), (found, wanted)
