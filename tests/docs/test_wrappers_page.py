"""The page of wrappers and networks: its files, commands and Python run."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS, blocks

import dovetail
from dovetail.cli.main import main
from dovetail.envs.wrapping import SHORT

PAGE = DOCS["wrappers-and-networks.md"]
SHORTENED = " --total-steps 64 --unroll-length 8 --episodes 2 --no-video --display none"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in blocks(PAGE, "python"):
        if named := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / named[1]).write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_every_short_name_is_on_the_page() -> None:
    assert [name for name in SHORT if f"`{name}" not in PAGE] == []


@pytest.mark.slow
@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    "command", [c for c in re.findall(r"^    (dovetail .*\.py.*)$", PAGE, re.MULTILINE)]
)
def test_the_files_of_the_page_train(command: str) -> None:
    assert main(shlex.split(command + SHORTENED)[1:]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("files")
def test_the_python_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = dovetail.Settings(episodes=2, evaluate_every=0, video=False, display="none")
    train = dovetail.train

    def shortly(*args: Any, **options: Any) -> Any:
        return train(*args, **(options | {"total_steps": 200, "settings": quick}))

    monkeypatch.setattr(dovetail, "train", shortly)
    scope: dict[str, Any] = {}
    for block in blocks(PAGE, "python"):
        if not block.startswith("# "):
            exec(block, scope)
    assert len(list(Path("runs").glob("*/summary.json"))) == 3
