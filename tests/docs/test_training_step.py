"""CONTRIBUTING walks through one training step: it names the modules that a step passes."""

import re
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest
from pages import ROOT

import dovetail as dt

LENGTH, ENVS, UPDATES = 4, 2, 500
"""More updates than a run has rows of metrics: a row is not part of every update."""
PACKAGE = ROOT / "dovetail"
ELSEWHERE = {"telemetry/sinks.py"}
"""Called in another thread, which is not profiled."""


def modules_called(folder: Path, updates: int) -> Counter[str]:
    """How often each module of Dovetail was entered by the thread that trains."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(f"{PACKAGE}/"):
            found[str(Path(file).relative_to(PACKAGE))] += 1

    quiet = dt.Settings(
        folder=str(folder), episodes=1, evaluate_every=0, checkpoint_every=1e9, video=False,
        display="none",
    )  # fmt: skip
    ppo = dt.algorithms.PPO(LENGTH, num_envs=ENVS, num_minibatches=2, hidden_sizes=(4,))
    env, steps = "gymnasium:CartPole-v1?vectorization=sync", updates * LENGTH * ENVS
    sys.setprofile(note)
    try:
        dt.train(ppo, env, dt.strategies.Local(), total_steps=steps, settings=quiet)
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.slow
def test_the_walk_names_what_a_step_passes(tmp_path: Path) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    part = text.partition("## One training step")[2].partition("\n\nWith several workers")[0]
    named = set(re.findall(r"`dovetail/([\w/]+\.py)`", part))
    few = modules_called(tmp_path / "few", UPDATES)
    many = modules_called(tmp_path / "many", 2 * UPDATES)
    passed = {name for name, count in many.items() if count - few[name] >= UPDATES}
    assert "runtime/worker.py" in passed and "envs/vector.py" in passed
    assert passed <= named
    assert named - ELSEWHERE <= set(many)
    assert len(named) < 25
