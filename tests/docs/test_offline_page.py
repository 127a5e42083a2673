"""The page on recorded data is true: its commands and its programs run, in their order."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import DOCS, blocks, lines

import dovetail
from dovetail.algorithm import Algorithm
from dovetail.algorithms import ALGORITHMS as KNOWN
from dovetail.algorithms import DQN
from dovetail.blocks.offline import INSIDE
from dovetail.blocks.sampling import OFFLINE_STEPS
from dovetail.cli.main import main
from dovetail.data import Reader, info
from dovetail.estimation.estimate import FEW, METHODS
from dovetail.estimation.fitted_q import FittedQ
from dovetail.estimation.target import DRAWS
from dovetail.run.folder import Run
from dovetail.training.dataset import MEMORY

PAGE = DOCS["offline.md"]
COMMANDS = [line for block in blocks(PAGE, "bash") for line in lines(block)]
QUIET = "--episodes 2 --evaluate-every 0 --no-video --display none"
SHORT = f"{QUIET} --unroll-length 32"
SMALL = f"{QUIET} --batch-size 8 --hidden-sizes 8 --learning-starts 8"


def shortened(command: str) -> str:
    if " iql " in command:
        return re.sub(r"--total-steps \S+", f"--total-steps 64 {SMALL}", command)
    command = re.sub(r" --total-steps \S+", f" --total-steps 1024 {SHORT}", command)
    command = re.sub(r"--online-steps \S+", "--online-steps 64", command)
    command = command.replace("--episodes 500", "--episodes 6")
    command += " --episodes 2" if command.endswith("eval runs/offline") else ""
    return f"{command} --updates 40" if " estimate " in command else command


@pytest.mark.slow
def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(COMMANDS) == 12
    for command in COMMANDS:
        assert main(shlex.split(shortened(command))[1:]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    for name in METHODS:
        assert re.search(rf"^{name} +\S+  95 % ", out, flags=re.MULTILINE)
    first, both = info("data/first"), info("data/both")
    offline = Run.open("runs/offline").summary
    assert offline["env_steps"] == 80 + 64 and offline["algorithm"] == "iql"
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
    assert DRAWS == 8 and "take the mean over eight actions that are drawn" in page
    named = re.findall(r"`(\w+)`", PAGE.partition("| method |")[2].partition("\n\n")[0])
    assert set(METHODS) <= set(named)
    assert OFFLINE_STEPS == 20 and DQN().gradient_steps == 32
    assert "20 unless given (DQN: 32)" in page
    assert MEMORY == 2_000 and INSIDE == 0.99999 and "clipped to ±0.99999" in page


def test_what_the_page_says_of_probabilities() -> None:
    kinds = {getattr(dovetail.algorithms, t.partition(":")[2]) for t in KNOWN.values()}
    silent = {kind.__name__ for kind in kinds if kind.log_prob is Algorithm.log_prob}
    assert silent == {"DDPG", "D4PG", "TD3", "TD3BC"}
    assert "not for DDPG, D4PG, TD3 and TD3+BC" in " ".join(PAGE.split())


def test_what_the_page_says_of_algorithms() -> None:
    table = PAGE.partition("| what you want |")[2].partition("\n\n")[0]
    kinds = {name: getattr(dovetail.algorithms, t.partition(":")[2]) for name, t in KNOWN.items()}
    named = [set(re.findall(r"`([a-z0-9-]+)`", row)) for row in table.splitlines()[2:]]
    assert named[0] & set(kinds) == {name for name, kind in kinds.items() if kind.needs_data}
    others = {name for name, kind in kinds.items() if kind.takes_data and not kind.needs_data}
    assert named[2] & set(kinds) == others
