"""The README is true: its commands and its code run, its figures were measured."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLE = (ROOT / "examples" / "actor_critic.py").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks(README, "sh") for line in block.splitlines()]
TARGETS = [line.partition(" ")[2] for line in COMMANDS if line.startswith("make ")]
OTHERS = [line for line in COMMANDS if not line.startswith("make ")]
PROGRAMS = [block for block in blocks(README, "python") if block not in EXAMPLE]


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment in which `dovetail` is this checkout's, in a folder that has `examples/`."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "dovetail"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dovetail "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}


def test_the_commands_are_found() -> None:
    assert TARGETS == ["train", "test", "bench"]
    assert len(OTHERS) == 6
    assert len(PROGRAMS) == 1
    assert len(blocks(README, "python")) == 2


@pytest.mark.parametrize("target", TARGETS)
def test_make_has_the_target(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", OTHERS)
def test_the_command_runs_and_the_example_learns(
    command: str, shell: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(command, shell=True, env=shell, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summaries = list(tmp_path.glob("runs/*/summary.json"))
    assert len(summaries) == (" train " in command)
    for summary in summaries:
        assert json.loads(summary.read_text())["final_return"] > 200


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_runs(program: str, shell: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], env=shell, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    folder, final_return = done.stdout.split()
    assert (tmp_path / folder / "video.mp4").is_file()
    assert float(final_return) > 100


def figures() -> list[str]:
    """The numbers in the measured table; its first two columns say what was measured."""
    table = README.partition("\n## Measured\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    cells = [cell for row in rows[2:] for cell in row[2:]]
    assert len(cells) == 21
    return [figure for cell in cells for figure in re.findall(r"\d(?:[\d,.]*\d)?", cell)]


def test_every_figure_was_measured() -> None:
    assert "@@" not in README
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    measured = set(re.findall(r"\d(?:[\d,.]*\d)?", results))
    assert [figure for figure in figures() if figure not in measured] == []
    assert len(figures()) >= 21


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 130


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []
