"""The page on sides shows the example's own lines, and what it shows runs."""

from pathlib import Path
from typing import Any

import pytest
from pages import DOCS, ROOT, blocks

FILE = ROOT / "examples" / "critic_apart.py"
PAGE = DOCS["sides.md"]


def test_the_page_shows_lines_of_the_example() -> None:
    example = FILE.read_text(encoding="utf-8")
    shown = blocks(PAGE, "python")[:2]
    assert all(block.strip("\n") in example for block in shown)
    assert len(shown) == 2


@pytest.mark.slow
def test_plain_python_on_a_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(FILE.parent)
    [program] = blocks(PAGE, "python")[2:]
    names: dict[str, Any] = {"__name__": "page"}
    exec(program, names)
    assert names["run"].summary["env_steps"] == 256
    assert (names["run"].path / "plan.txt").read_text().count("worker judge") == 1


@pytest.mark.slow
def test_the_example_learns() -> None:
    import dovetail as dt
    from dovetail.loading import load_object

    algorithm: Any = load_object(f"{FILE}:CriticApart", "algorithm")(num_envs=32)
    quiet = dt.Settings(episodes=10, evaluate_every=0, video=False, display="none")
    strategy = dt.strategies.Fused()
    run = dt.train(algorithm, "CartPole-v1", strategy, total_steps=300_000, settings=quiet)
    assert run.summary["final_return"] > 150, run.summary
