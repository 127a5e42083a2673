"""The pages are true: what they say a command prints it prints, what they draw is what is planned,
and their commands run.

After a change that is meant to alter what `explain` says or draws:
DOVETAIL_UPDATE_GOLDEN=1 pytest tests/docs/test_pages.py
"""

import contextlib
import dataclasses
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS, FILES, ROOT, blocks, lines
from small import shared_traces

import dovetail.training.planning
from dovetail.algorithms import ALGORITHMS
from dovetail.cli.experiment import understand
from dovetail.cli.main import main
from dovetail.cli.train import _parser
from dovetail.loading import load_object
from dovetail.plan.ir import Resources
from dovetail.run.settings import Settings
from dovetail.runtime import supervision
from dovetail.strategies import STRATEGIES

UPDATE = bool(os.environ.get("DOVETAIL_UPDATE_GOLDEN"))
IMAGES = ROOT / "docs" / "images" / "strategies"
MACHINE = Resources(devices=4, cores=8)
"""What the pages' plans are made for; a plan tells how many workers share how many cores."""
SHORT = "--total-steps 400 --episodes 2 --evaluate-every 0 --checkpoint-every 1e9 --no-video"


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine of the pages, in a folder that has `examples/`."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr(dovetail.training.planning, "machine", lambda: MACHINE)
    with shared_traces():
        yield


def printed(command: str, capsys: Any) -> str:
    """What a command prints, errors included; paths as they are from the checkout."""
    code = main(shlex.split(command)[1:])
    out = capsys.readouterr()
    assert code == (2 if out.err else 0), out.err
    return (out.out + out.err).replace(f"{ROOT}/", "")


# What commands print and draw.


@pytest.mark.parametrize(
    "page, block",
    [
        pytest.param(name, block, id=f"{name}-{number}")
        for name, text in DOCS.items()
        for number, block in enumerate(blocks(text, "console"))
    ],
)
@pytest.mark.usefixtures("at_home")
def test_what_a_command_prints(page: str, block: str, capsys: Any) -> None:
    """Where a block begins with "…", it shows the plan alone."""
    command, shown = block.removeprefix("$ ").split("\n", 1)
    found = printed(command, capsys)
    if shown.startswith("…"):
        found = "…\n" + found[found.index("plan  ") :]
    if UPDATE:
        text = FILES[page].read_text(encoding="utf-8")
        new = f"$ {command}\n{found.strip()}\n"
        FILES[page].write_text(text.replace(block, new), encoding="utf-8")
        return
    assert lines(found) == lines(shown)


def explained(strategy: str) -> str:
    """The command that a strategy's page explains it by."""
    commands = [b.split("\n")[0] for b in blocks(DOCS[f"strategies/{strategy}.md"], "console")]
    return commands[0].removeprefix("$ ")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.usefixtures("at_home")
def test_the_picture_is_that_of_the_plan(strategy: str) -> None:
    command = explained(strategy)
    assert f"--strategy {strategy} " in f"{command} "
    assert f"](../images/strategies/{strategy}.svg)" in DOCS[f"strategies/{strategy}.md"]
    assert main([*shlex.split(command)[1:], "--svg", "drawn.svg"]) == 0
    drawn = Path("drawn.svg").read_text(encoding="utf-8")
    file = IMAGES / f"{strategy}.svg"
    if UPDATE:
        file.write_text(drawn, encoding="utf-8")
    assert drawn == file.read_text(encoding="utf-8")


def test_every_strategy_has_its_page_its_picture_and_its_row() -> None:
    assert {n for n in DOCS if n.startswith("strategies/")} == {
        f"strategies/{n}.md" for n in STRATEGIES
    }
    assert {file.stem for file in IMAGES.glob("*")} == set(STRATEGIES)
    rows = re.findall(r"^\| \[`(.+)`\]\((.+)\) \|", DOCS["strategies.md"], flags=re.MULTILINE)
    assert rows == [(name, f"strategies/{name}.md") for name in STRATEGIES]


# Options.


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_options_of_a_strategy(strategy: str) -> None:
    table = (
        DOCS[f"strategies/{strategy}.md"].partition("| option | default |")[2].partition("\n\n")[0]
    )
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", table, flags=re.MULTILINE)
    defaults = vars(load_object(STRATEGIES[strategy], "strategy")())
    assert [name for name, _ in rows] == list(defaults)
    for name, written in rows:
        assert defaults[name] is None or written == str(defaults[name]), name


def test_the_flags_of_every_strategy_are_on_the_page_of_the_command_line() -> None:
    kinds = [load_object(target, "strategy") for target in STRATEGIES.values()]
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    page = DOCS["command-line.md"]
    missing = [name for name in names if f"`--{name.replace('_', '-')}" not in page]
    assert missing == []


# Numbers and tables.


def test_the_limits_are_those_of_the_runtime() -> None:
    page = " ".join(DOCS["strategies.md"].split())
    pauses = f"from {supervision.FIRST_PAUSE:g} s to {supervision.LONGEST_PAUSE:g} s"
    often = f"up to {supervision.RESTARTS} times for one worker"
    assert f"{often}, after pauses that grow {pauses}" in page
    assert supervision.CALM_SECONDS == 60 and "a minute without a failure" in page
    assert f"after `--patience` seconds ({Settings().patience:g})" in page


def test_what_every_algorithm_bears() -> None:
    table = DOCS["strategies.md"].partition("| algorithm | corrects with |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([A-Z].*?) \| (.*?) \| (.*?) \|$", table, flags=re.MULTILINE)
    bears = {name: borne for names, _, borne in rows for name in names.split(", ")}
    kinds = [load_object(target, "algorithm") for target in ALGORITHMS.values()]
    borne = {kind.__name__: kind.correction.staleness for kind in kinds}
    assert bears == {n: "any number" if b is None else str(b) for n, b in borne.items()}


# Commands.


def commands() -> list[str]:
    """Every `dovetail` command in a block of shell commands, without the variables before it."""
    found = [
        line for text in DOCS.values() for block in blocks(text, "sh") for line in lines(block)
    ]
    return sorted({line[line.index("dovetail ") :] for line in found if "dovetail " in line})


@pytest.mark.parametrize("command", [c for c in commands() if "dovetail train" in c])
@pytest.mark.usefixtures("at_home")
def test_the_flags_of_a_command_exist(command: str) -> None:
    ends = pytest.raises(SystemExit) if "--help" in command else contextlib.nullcontext()
    with ends:
        understand(_parser(), shlex.split(command)[2:])


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in commands() if "--help" not in c])
@pytest.mark.usefixtures("at_home")
def test_a_command_runs(command: str, tmp_path: Path) -> None:
    """Shortened: a training ends after an update or a few."""
    trains = " train " in command
    short = re.sub(r" --(until|steps|seeds) \S+", "", command)
    words = shlex.split(f"{short} {SHORT} --display none" if trains else short)
    assert main(words[1:]) == 0
    assert len(list(tmp_path.glob("runs/*/summary.json"))) == trains
