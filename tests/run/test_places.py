"""The files of a config are found again when the run or the files have moved."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from dovetail.run.folder import Run
from dovetail.run.places import FILES


def config(home: Path) -> dict[str, Any]:
    return {
        "algorithm": f"{home}/mine.py:Mine",
        "env": f"{home}/mine.py:Env?size=3&wrap=gray,{home}/mine.py:Wrap",
        "data": {"folder": f"{home}/data", "steps": 3},
        "strategy": "local",
        "options": {"hidden_sizes": (8,)},
    }


@pytest.fixture
def project(tmp_path: Path) -> Path:
    home = tmp_path / "project"
    (home / "data").mkdir(parents=True)
    (home / "mine.py").touch()
    Run.create(str(home / "runs" / "one"), "one", config(home))
    return home


def test_a_config_holds_the_way_from_the_run_to_each_file(project: Path) -> None:
    found = Run.open(project / "runs" / "one").config
    assert found[FILES] == {
        f"{project}/data": "../../data",
        f"{project}/mine.py": "../../mine.py",
    }
    assert found["options"] == {"hidden_sizes": [8]}


def test_a_project_that_moves_as_a_whole_is_found(project: Path, tmp_path: Path) -> None:
    elsewhere = Path(shutil.move(project, tmp_path / "elsewhere"))
    found = Run.open(elsewhere / "runs" / "one").config
    assert {key: found[key] for key in config(elsewhere)} == {
        **config(elsewhere),
        "options": {"hidden_sizes": [8]},
    }


def test_a_run_that_moves_alone_finds_the_files_where_they_were(
    project: Path, tmp_path: Path
) -> None:
    alone = Path(shutil.move(project / "runs" / "one", tmp_path / "alone"))
    found = Run.open(alone).config
    assert found["algorithm"] == f"{project}/mine.py:Mine"


def test_files_that_are_lost_keep_their_names(project: Path) -> None:
    (project / "mine.py").unlink()
    assert Run.open(project / "runs" / "one").config["algorithm"] == f"{project}/mine.py:Mine"
