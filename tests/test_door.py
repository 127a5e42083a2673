"""One public door: what `dovetail` offers is there, for programs, type checkers and pydoc alike."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dovetail

DOOR = Path(dovetail.__file__)


def test_dir_and_all_agree() -> None:
    assert dir(dovetail) == sorted(dovetail.__all__)
    assert len(set(dovetail.__all__)) == len(dovetail.__all__)


@pytest.mark.parametrize("name", dovetail.__all__)
def test_everything_public_imports_and_says_what_it_is(name: str) -> None:
    assert getattr(dovetail, name).__doc__


def test_star_import_brings_everything() -> None:
    names: dict[str, object] = {}
    exec("from dovetail import *", names)
    assert set(dovetail.__all__) <= set(names)


def test_what_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'; there are: Algorithm, "):
        getattr(dovetail, "trian")  # noqa: B009


def test_a_type_checker_sees_the_same_names_from_the_same_modules() -> None:
    tree = ast.parse(DOOR.read_text(encoding="utf-8"))
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: f"{node.module}:{alias.name}"
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(seen) == set(dovetail.__all__)
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    modules = {target for target in seen.values() if target.startswith("dovetail:")}
    assert set(seen.values()) - modules <= strings
    assert {target.removeprefix("dovetail:") for target in modules} <= strings


def test_pydoc_shows_the_door() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pydoc", "dovetail"],
        cwd=DOOR.parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.startswith("Help on package dovetail:")
    missing = [name for name in dovetail.__all__ if name not in done.stdout]
    assert missing == []
    assert "lazy_attributes" not in done.stdout
