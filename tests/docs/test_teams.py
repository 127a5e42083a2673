"""The example of a strategy runs, keeps the promise, and its page shows what is true of it."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from pages import DOCS, ROOT, blocks, lines
from small import LENGTH, STEPS, Started, numbers, ppo

import dovetail as dt
from dovetail.graph.ir import Graph
from dovetail.loading import load_object
from dovetail.plan.ir import Instance, LinkKind, Plan, Resources, WorkerKind

FILE = ROOT / "examples" / "teams.py"
EXAMPLE = FILE.read_text(encoding="utf-8")
PAGE = DOCS["write-your-own-strategy.md"]
HOST = "gymnasium:CartPole-v1?max_episode_steps=5"
Teams: Any = load_object(f"{FILE}:Teams", "strategy")


def test_the_page_shows_the_whole_file() -> None:
    shown = [block for block in blocks(PAGE, "python") if block.strip("\n") in EXAMPLE]
    assert lines("".join(shown)) == lines(EXAMPLE)


@pytest.mark.slow
def test_the_page_runs() -> None:
    programs = [block for block in blocks(PAGE, "python") if block.strip("\n") not in EXAMPLE]
    assert len(programs) == 1
    done = subprocess.run(
        [sys.executable, "-c", programs[0]],
        env={"PYTHONPATH": f"{ROOT}:{FILE.parent}", "JAX_PLATFORMS": "cpu", "HOME": "."},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["4.0", "0.0"]


# What it plans and computes.


def test_the_plan() -> None:
    plan = dt.explain(ppo(), "CartPole-v1", Teams(actors=2, workers=2)).plan
    steps = [(i.worker, i.envs) for i in plan.instances_of("unroll.step")]
    assert steps == [(f"environments-{i}", (2 * i, 2 * i + 2)) for i in range(4)]
    acts = [(i.worker, i.envs) for i in plan.instances_of("unroll.act")]
    assert acts == [("actor-0", (0, 4)), ("actor-1", (4, 8))]
    assert [link.kind for link in plan.links if link.boundary == "gather"] == [LinkKind.QUEUE]
    processes = [w.name for w in plan.workers if w.kind is WorkerKind.PROCESS]
    assert processes == [f"environments-{i}" for i in range(4)]


def test_a_jax_environment_steps_in_threads() -> None:
    plan = dt.explain(ppo(), "dovetail:CartPole-v1", Teams()).plan
    assert {worker.kind for worker in plan.workers} == {WorkerKind.THREAD}


@pytest.mark.parametrize("env", [HOST, "dovetail:CartPole-v1?limit=5"])
def test_it_computes_what_the_interpreter_computes(env: str) -> None:
    expected = dt.interpret(ppo(), env, iterations=3, total_steps=STEPS, seed=3, debug=False)
    with Started(ppo(), env, Teams(), seed=3) as running:
        running.advance(3)
    assert np.asarray(running.actor.step).tolist() == [3 * LENGTH] * 8
    found, wanted = numbers(running.state.params), numbers(expected.state.params)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_at_a_lag_it_repeats_exactly() -> None:
    def run() -> tuple[np.ndarray, dict[str, float]]:
        with Started(ppo(), HOST, Teams(staleness=1), seed=3) as running:
            report = running.advance(5)
        return numbers(running.state), dict(report.measures)

    (first, measures), (second, _) = run(), run()
    np.testing.assert_array_equal(first, second)
    assert measures["staleness"] == 4 / 5  # the first update has nothing older than its own weights
    assert measures["staleness_max"] == 1
    assert measures["dropped"] == 0
    assert measures["act_batch"] == 4


# The mistakes that the page shows, made for real.


@dataclass(frozen=True)
class Mistaken(Teams):
    """The example, with one of the page's mistakes in its plan."""

    mistake: str = ""

    @property
    def name(self) -> str:
        return "teams"

    def plan(self, graph: Graph, resources: Resources) -> Plan:
        plan = super().plan(graph, resources)
        workers, instances = plan.workers, tuple(self.placed(plan))
        if self.mistake == "no device":
            workers = tuple(replace(w, devices=()) if "actor" in w.name else w for w in workers)
        if self.mistake == "left out":
            kept = [i for i in instances if i.worker != "actor-1"]
            return self.place(graph, list(workers), kept)
        return replace(plan, workers=workers, instances=instances)

    def placed(self, plan: Plan) -> Iterator[Instance]:
        for instance in plan.instances:
            if self.mistake == "overlap" and instance.fragment == "unroll.step":
                first, last = instance.envs or (0, 0)
                yield replace(instance, envs=(first % 8, (last - 1) % 8 + 1))
            elif self.mistake == "misspelt" and instance.worker == "learner":
                yield replace(instance, worker="lerner")
            else:
                yield instance


@pytest.mark.parametrize("mistake", ["overlap", "no device", "left out", "misspelt", "staleness"])
def test_the_page_has_the_sentence_for(mistake: str) -> None:
    strategy = Mistaken(mistake=mistake, staleness=2 if mistake == "staleness" else 0)
    with pytest.raises(dt.UserError) as raised:
        dt.explain(dt.algorithms.PPO(num_envs=16), "CartPole-v1", strategy)
    assert str(raised.value) in PAGE
