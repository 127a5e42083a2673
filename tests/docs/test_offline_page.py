"""The page on recorded data is true: its commands and its programs run, in their order."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import DOCS, blocks, lines

from dovetail.cli.main import main
from dovetail.data import Reader, info
from dovetail.estimation.estimate import FEW, METHODS
from dovetail.estimation.fitted_q import FittedQ

PAGE = DOCS["offline.md"]
COMMANDS = [line for block in blocks(PAGE, "bash") for line in lines(block)]
SHORT = "--episodes 2 --evaluate-every 0 --no-video --display none --unroll-length 32"


def shortened(command: str) -> str:
    command = re.sub(r"--steps \S+", f"--steps 1024 {SHORT}", command)
    command = command.replace("--episodes 500", "--episodes 6")
    return f"{command} --updates 40" if " estimate " in command else command


@pytest.mark.slow
def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(COMMANDS) == 8
    for command in COMMANDS:
        assert main(shlex.split(shortened(command))[1:]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    for name in METHODS:
        assert re.search(rf"^{name} +\S+  95 % ", out, flags=re.MULTILINE)
    first, both = info("data/first"), info("data/both")
    assert first.log_probabilities == 1 and first.episodes == 6
    assert both.episodes == first.episodes + info("data/second").episodes
    assert info("data/train").episodes + info("data/held-out").episodes == both.episodes
    assert info("data/tables").steps == info("data/train").steps
    names: dict[str, Any] = {}
    program, writing = (re.sub(r"episode\(17\)|0, 10", _smaller, b) for b in blocks(PAGE, "python"))
    exec(program, names)
    assert names["first"].shape == names["following"].shape == (256, 4)
    assert names["some"].reward.tolist() == [1, 1]
    exec(writing, names)
    with Reader("data/robot") as reader:
        assert reader.episode(0).actions.tolist() == [0, 2, 1, 1]
        assert np.isnan(reader.rows(0, 1).log_probability).all()
    metadata = json.loads(Path("data/robot/data/metadata.json").read_text())
    assert metadata["dovetail"]["sources"][0]["environment"] == "mine:Robot-v0"


def _smaller(found: re.Match[str]) -> str:
    return {"episode(17)": "episode(1)", "0, 10": "0, 5"}[found.group()]


def test_what_the_page_says_of_numbers() -> None:
    page = " ".join(PAGE.split())
    assert FEW == 10 and "Below ten the intervals" in page
    assert FittedQ().members == 10 and "`fqe` fits eleven networks at once, ten of them" in page
    named = re.findall(r"`(\w+)`", PAGE.partition("| method |")[2].partition("\n\n")[0])
    assert set(METHODS) <= set(named)
