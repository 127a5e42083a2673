"""The page for users of Stable-Baselines3 runs from top to bottom, and its options exist."""

import re
from typing import Any

import pytest
from pages import DOCS, blocks

import dovetail as dt
from dovetail.algorithms import ALGORITHMS
from dovetail.cli.synonyms import SYNONYMS
from dovetail.loading import load_object

PAGE = DOCS["coming-from-sb3.md"]
OPTIONS = {
    name
    for target in ALGORITHMS.values()
    for name in load_object(target, "algorithm").__dataclass_fields__
}


@pytest.mark.slow
def test_the_page_runs_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet: dict[str, Any] = {"display": "none", "video": False, "episodes": 2, "evaluate_every": 0}
    settings = dt.Settings

    def quietly(**given: Any) -> dt.Settings:
        return settings(**{**quiet, **given})

    train = dt.train

    def short(*args: Any, **given: Any) -> dt.Run:
        return train(*args, **{"settings": quietly(), **given})

    monkeypatch.setattr(dt, "Settings", quietly)
    monkeypatch.setattr(dt, "train", short)
    names: dict[str, Any] = {"__name__": "coming_from_sb3"}
    for block in blocks(PAGE, "python"):
        exec(compile(block, "coming-from-sb3.md", "exec"), names)
    assert names["action"] in (0, 1) and names["state"] is None
    assert len(names["found"].returns) == 20
    assert names["run"].config["options"]["learning_rate"] == 1e-4
    assert names["other"].summary["env_steps"] >= 5_000
    lengths = names["run"].metrics["episode_length"]
    assert lengths[lengths == lengths].max() <= 200  # the wrapper's time limit


def test_the_options_of_the_tables_exist() -> None:
    table = PAGE.partition("## Options")[2]
    ours = re.findall(r"^\|[^|]*\|([^|]*)\|", table, flags=re.MULTILINE)
    named = {name for cell in ours for name in re.findall(r"`(\w+)(?:=[^`]*)?`", cell)}
    assert named - OPTIONS <= {"display"}
    same = table.partition("\n\n`gamma`")[2].partition("have the same names")[0]
    assert set(re.findall(r"`(\w+)`", same)) <= OPTIONS


def test_their_names_are_answered_with_ours() -> None:
    for theirs, ours in (
        ("n-envs", "num-envs"),
        ("n-steps", "unroll-length"),
        ("n-epochs", "epochs"),
    ):
        assert ours in SYNONYMS[theirs]
