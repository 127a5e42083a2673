"""A user's own strategy: a file of thirty lines, from Python and from the command line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import LENGTH, QUIET, Started, a2c, numbers, saved

import dovetail
from dovetail.cli.main import main
from dovetail.loading import load_object
from dovetail.run.folder import Run
from dovetail.strategies import Local

OWN = '''
"""Actors in pairs: each pair shares a thread that steps its environments."""

from dataclasses import dataclass

from dovetail.graph.ir import Graph
from dovetail.plan.ir import Plan, Resources, Worker
from dovetail.strategies.interface import (
    Strategy, environment_worker, on_actor, on_environment, on_learner, shares, staleness_of
)


@dataclass(frozen=True)
class InPairs(Strategy):
    """Two actors for every pair, environments in threads of their own."""

    pairs: int = 1
    """Pairs of actors."""

    def plan(self, graph: Graph, resources: Resources) -> Plan:
        workers, placed = [Worker("learner", (0,))], on_learner(graph, "learner")
        for i, share in enumerate(shares(0, graph.num_envs, 2 * self.pairs, "actors")):
            workers += [Worker(f"actor-{i}", (0,)), environment_worker(graph, f"env-{i}", False)]
            placed += on_actor(graph, f"actor-{i}", share)
            placed += on_environment(graph, f"env-{i}", share)
        note = f"{self.pairs} pairs of actors"
        bound = staleness_of(graph, None, 1)
        return self.place(graph, workers, placed, staleness=bound, notes=(note,))


@dataclass(frozen=True)
class Forgetful(InPairs):
    """Leaves the learner out."""

    def plan(self, graph: Graph, resources: Resources) -> Plan:
        plan = super().plan(graph, resources)
        kept = tuple(i for i in plan.instances if i.fragment != "learner")
        return self.place(graph, list(plan.workers), list(kept))


class NoDataclass:
    """Has a plan, but is no strategy."""

    def __init__(self, envs):
        self.envs = envs

    def plan(self, graph, resources):
        raise NotImplementedError
'''
TINY = f"--unroll-length {LENGTH} --hidden-sizes 8 --total-steps 96 --episodes 2 --no-video"
JAX, HOST = "dovetail:CartPole-v1", "gymnasium:CartPole-v1?vectorization=sync"


@pytest.fixture(autouse=True)
def own() -> None:
    Path("in_pairs.py").write_text(OWN)


def in_pairs(**options: Any) -> Any:
    return load_object("in_pairs.py:InPairs", "strategy")(**options)


@pytest.mark.slow
@pytest.mark.parametrize("env", [JAX, HOST])
def test_it_computes_what_everybody_computes(env: str) -> None:
    with Started(a2c(), env, Local()) as expected:
        expected.advance(3)
    with Started(a2c(), env, in_pairs(pairs=2)) as running:
        report = running.advance(3)
    assert running.plan.strategy == "in-pairs"
    assert len(running.plan.workers) == 9 and report.measures["staleness_max"] == 0
    np.testing.assert_allclose(
        numbers(running.state.params), numbers(expected.state.params), rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
def test_python_trains_resumes_and_explains_with_it() -> None:
    strategy = in_pairs(pairs=2)
    assert "note: 2 pairs of actors" in str(dovetail.explain(a2c(), JAX, strategy))
    run = dovetail.train(a2c(), JAX, strategy, total_steps=2 * LENGTH * 8, settings=QUIET)
    assert run.config["strategy"] == f"{Path('in_pairs.py').resolve()}:InPairs"
    assert run.config["strategy_options"] == {"pairs": 2, "sides": []}
    assert run.summary["env_steps"] == 2 * LENGTH * 8
    dovetail.resume(run, total_steps=3 * LENGTH * 8)
    assert int(saved(Run.open(run.path))[0]["state"].updates) == 3


def test_the_command_line_explains_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"explain ppo --env {JAX} --strategy in_pairs.py:InPairs --pairs 2 --num-envs 12 --json"
    assert main(line.split()) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["strategy"], plan["num_envs"], plan["copies"]["actor"]) == ("in-pairs", 12, 4)
    assert plan["staleness"] == 1 and plan["ordered"]  # PPO tolerates it


@pytest.mark.slow
def test_the_command_line_trains_and_resumes_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        f"train a2c --env {HOST} --strategy in_pairs.py:InPairs --pairs 2 {TINY} --run out --json"
    )
    assert main(words.split()) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["env_steps"] == 96 and summary["strategy"].endswith("in_pairs.py:InPairs")
    assert "4 actors with 2 each" in Path("out/plan.txt").read_text()
    assert main(["train", "--resume", "out", "--total-steps", "128", "--quiet"]) == 0
    assert Run.open("out").summary["env_steps"] == 128


def test_its_options_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "ppo", "--strategy", "in_pairs.py:InPairs", "--help"]) == 0
    told = capsys.readouterr().out
    assert "options of InPairs" in told and "--pairs" in told
    assert "Pairs of actors (default 1)" in " ".join(told.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--strategy in_pairs.py:InPairs --pair 2", "did you mean --pairs?"),
        (
            "--strategy in_pairs.py:InPairs --pairs 3",
            "8 environments cannot be split evenly among 6 act",
        ),
        ("--strategy in_pairs.py:InPair", "did you mean 'InPairs'?"),
        (
            "--strategy in_pairs.py:Forgetful",
            "The plan of strategy 'forgetful' places 'learner' 0 times",
        ),
        ("--strategy in_pairs.py:NoDataclass", "is it decorated with @dataclass(frozen=True)?"),
    ],
)
def test_mistakes_are_sentences(
    capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    assert main(f"train a2c --env {JAX} {words} --quiet".split()) == 2
    out, err = capsys.readouterr()
    assert sentence in err and err.count("\n") == 1 and out == ""


def test_it_is_short() -> None:
    first, second = OWN.index("from dataclasses"), OWN.index("@dataclass(frozen=True)\nclass Forg")
    assert len(OWN[first:second].strip().splitlines()) <= 35
