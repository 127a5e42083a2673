"""The page on callbacks, metrics and intervals is true: its file is used, its commands run."""

import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from pages import DOCS, blocks, lines

from dovetail import Run, Settings, TrainingEvent
from dovetail.cli.main import main
from dovetail.training.callbacks import EventName
from dovetail.training.rows import EPISODES, ROWS

PAGE = DOCS["hooks.md"]
COMMANDS = [line for block in blocks(PAGE, "bash") for line in lines(block)]
SHORT = "--unroll-length 16 --num-envs 4 --hidden-sizes 8 --episodes 2 --no-video --display none"


def test_every_field_and_event_is_explained() -> None:
    rows = re.findall(r"^\| (.*?) \|", PAGE, flags=re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`\"?(\w+)\"?`", row)}
    assert {field.name for field in fields(TrainingEvent)} <= told
    assert set(get_args(EventName)) <= told


def test_the_numbers_are_those_of_the_code() -> None:
    assert f"about {ROWS} rows" in PAGE and f"the last {EPISODES} episodes" in PAGE
    assert all(hasattr(Settings, name) for name in ("evaluate_every", "checkpoint_every"))


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file, script = blocks(PAGE, "python")
    Path("my_callbacks.py").write_text(file.replace("< 400", "< 0"))
    for number, command in enumerate(COMMANDS):
        short = re.sub(r"--total-steps \S+", "", command).replace("000steps", "steps")
        line = f"{short} --total-steps 1280 {SHORT} --run {number}"
        assert main(shlex.split(line)[1:]) == 0
    called, informed, timed = (Run.open(str(number)) for number in range(len(COMMANDS)))
    assert called.summary["env_steps"] == 64 and called.config["callback"]
    assert "info_prob_final" in informed.metrics
    evaluated = timed.metrics["env_steps"][np.isfinite(timed.metrics["eval_return"])]
    assert evaluated.tolist() == list(range(64, 1281, 64))  # every update passes ten steps
    sys.path.insert(0, str(tmp_path))
    monkeypatch.setitem(sys.modules, "my_callbacks", None)
    del sys.modules["my_callbacks"]
    script = script.replace("callback=", f"settings=dt.Settings(folder='own', {QUIET}), callback=")
    names: dict[str, object] = {}
    exec(script.replace("PPO()", "PPO(16, num_envs=4, hidden_sizes=(8,))"), names)
    assert Run.open("own").summary["env_steps"] < 200_000
    sys.path.remove(str(tmp_path))


QUIET = "evaluate_every='100steps', episodes=2, video=False, display='none'"
