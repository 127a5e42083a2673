"""Sides that a user names: placed anywhere, they compute what the interpreter computes."""

import dataclasses
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import assert_close
from small import QUIET, STEPS, Started, interpreted, numbers, saved
from survival import GOES_ON, survives
from toys import Drift, Toy

import dovetail as dt
from dovetail.algorithm import Task
from dovetail.boundaries import RL
from dovetail.envs.resolve import resolve
from dovetail.errors import UserError
from dovetail.inspection.interpret import stepper
from dovetail.loading import load_object
from dovetail.runtime import supervision
from dovetail.strategies import (
    ActorLearner,
    CentralInference,
    DataParallel,
    Environments,
    Fused,
    Local,
    SplitDevices,
)
from dovetail.strategies.interface import Strategy
from dovetail.training.start import first_state

FILE = Path(__file__).resolve().parents[2] / "examples" / "critic_apart.py"
CriticApart: Any = load_object(f"{FILE}:CriticApart", "algorithm")
CRITIC = CriticApart(unroll_length=4, hidden=8)
JAX, HOST = "dovetail:CartPole-v1", "gymnasium:CartPole-v1?vectorization=sync"
APART: dict[str, Any] = {"sides": ("critic",)}
STRATEGIES: dict[str, Strategy] = {
    "with the learner": Local(),
    "local": Local(**APART),
    "fused": Fused(),
    "fused on 2 devices": Fused(devices=2),
    "actors": ActorLearner(actors=2, staleness=0, processes=False, **APART),
    "inference": CentralInference(workers=2, processes=False, **APART),
    "replicas": DataParallel(devices=2, **APART),
    "split devices": SplitDevices(actor_devices=2, learner_devices=2, staleness=0, **APART),
    "environments": Environments(workers=2, processes=False, **APART),
}
UPDATES = 3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_critic_of_its_own_equals_the_interpreter(strategy: str) -> None:
    chosen = STRATEGIES[strategy]
    env = resolve(JAX)
    bound = CRITIC.bind(Task(env.spec, 8, STEPS))
    start = first_state(bound, env.jax, 8, 3)
    expected, _ = interpreted(bound, stepper(env.jax), *start, UPDATES)
    with Started(CRITIC, JAX, chosen, seed=3) as running:
        running.advance(UPDATES)
        workers = {instance.worker for instance in running.plan.instances_of("critic")}
    assert_close(numbers(running.state), numbers(expected))
    assert workers == ({"critic"} if chosen.sides else workers)


def test_explain_shows_it() -> None:
    told = str(dt.explain(CRITIC, JAX, Local(**APART)))
    assert "worker critic on device 0" in told
    assert "call       learner → critic" in told and "queue" in told
    assert ">critic<" in dt.explain(CRITIC, JAX, Local()).svg()


@pytest.mark.slow
def test_a_process_of_its_own_computes_the_same(tmp_path: Path) -> None:
    trained: dict[str, Any] = {}
    for name in ("critic", "critic@process"):
        folder = dataclasses.replace(QUIET, folder=str(tmp_path / name))
        strategy = Local(sides=(name,))
        run = dt.train(CRITIC, HOST, strategy, total_steps=8 * 4 * UPDATES, settings=folder)
        trained[name] = saved(run)[0]["state"]
    assert_close(numbers(trained["critic@process"]), numbers(trained["critic"]))


def test_a_resumed_run_goes_on_with_what_the_side_held(tmp_path: Path) -> None:
    whole, half = (dataclasses.replace(QUIET, folder=str(tmp_path / n)) for n in ("whole", "half"))
    strategy, steps = Fused(), 8 * 4 * 4
    expected = saved(dt.train(CRITIC, JAX, strategy, total_steps=steps, settings=whole))[0]["state"]
    run = dt.train(CRITIC, JAX, strategy, total_steps=steps // 2, settings=half)
    dt.resume(run, total_steps=steps)
    assert_close(numbers(saved(run)[0]["state"].critic), numbers(expected.critic))


# Plain Python.


@dataclasses.dataclass(frozen=True)
class Judged(Toy):
    """A toy whose rewards a plain Python function on a side of its own scores."""

    num_envs: int = 4
    mistake: str = ""

    def score(self, reward: np.ndarray) -> Any:
        """Numpy in, numpy out."""
        assert type(reward) is np.ndarray
        if self.mistake == "raises":
            raise ValueError("no verdict")
        if self.mistake == "shape":
            return reward[0]
        return 2.0 * np.asarray(reward, np.float32)

    def iteration(self, rl: RL, state: Any) -> Any:
        """Learns nothing; the metric is what the judge said."""
        batch = rl.gather(rl.unroll(self.act, rl.broadcast(state.params), 3))
        shape = jax.ShapeDtypeStruct(batch.reward.shape, jnp.float32)
        scores = rl.call("judge", self.score, batch.reward, host=True, result=shape)
        params = jax.tree.map(lambda p: p + rl.mean(scores.mean()), state.params)
        return state._replace(params=params), {"score": scores.mean(), "mean": batch.reward.mean()}


JUDGES: dict[str, Strategy] = {
    "local": Local(),
    "own worker": Local(sides=("judge",)),
    "two copies": Local(sides=("judge:2",)),
    "actors": ActorLearner(actors=2, staleness=0, processes=False, sides=("judge",)),
    "replicas": DataParallel(devices=2, sides=("judge",)),
}


@pytest.mark.parametrize("strategy", JUDGES)
def test_plain_python_is_a_side_like_any_other(strategy: str) -> None:
    with Started(Judged(), Drift(), JUDGES[strategy]) as running:
        report = running.advance(2)
    with Started(Judged(), Drift(), Local()) as expected:
        wanted = expected.advance(2)
    assert float(report.metrics["score"]) == pytest.approx(2 * float(wanted.metrics["mean"]))
    assert_close(numbers(running.state.params), numbers(expected.state.params))


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [("raises", "no verdict"), ("shape", r"returned an array of shape \[4\], but was declared to")],
)
def test_what_plain_python_does_wrong_is_told(mistake: str, sentence: str) -> None:
    with (
        Started(Judged(mistake=mistake), Drift(), Local(sides=("judge",))) as running,
        pytest.raises(UserError, match=f"Worker judge failed: .*{sentence}"),
    ):
        running.advance(1)


def test_plain_python_is_not_compiled() -> None:
    sentence = told_of(Judged(), Fused())
    assert sentence.startswith("Fused compiles everything into one program, but judge runs plain")
    assert re.search(r"\(.*test_own_sides\.py:\d+:\d+\): use --strategy local\.$", sentence)


@dataclasses.dataclass(frozen=True)
class Fragile(Judged):
    """A judge whose second call, in its first process, ends or blocks that."""

    folder: str = ""
    blocks: bool = False

    def greedy(self, params: Any, carry: Any, timestep: Any) -> Any:
        """Any action."""
        return jnp.int32(0), carry

    def score(self, reward: np.ndarray) -> Any:
        """Twice the reward, if it comes to that."""
        called, failed = Path(self.folder, "called"), Path(self.folder, "failed")
        if called.exists() and not failed.exists():
            failed.touch()
            time.sleep(60) if self.blocks else os.kill(os.getpid(), signal.SIGKILL)
        called.touch()
        return super().score(reward)


@survives(
    "the process of a side dies or blocks",
    "any",
    "one machine",
    GOES_ON + ", with what the side held at the last checkpoint",
)
@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True])
def test_a_process_that_dies_or_hangs_is_set_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: bool
) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE", 0.01)
    lasting = dataclasses.replace(QUIET, patience=2.0)
    algorithm, strategy = Fragile(folder=str(tmp_path), blocks=blocks), Local()
    apart = dataclasses.replace(strategy, sides=("judge@process",))
    found, expected = (
        dt.train(
            *(algorithm, Drift(), chosen),
            total_steps=4 * 3 * 5,
            settings=dataclasses.replace(lasting, folder=str(tmp_path / chosen.sides[0])),
        )
        for chosen in (apart, dataclasses.replace(strategy, sides=("judge",)))
    )
    assert found.metrics["restarts"][-1] == 1 and expected.metrics["restarts"][-1] == 0
    assert found.metrics["score"][-1] == pytest.approx(expected.metrics["score"][-1])


# Wrong input.


def refused(make: Any) -> str:
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
    return str(caught.value)


def told_of(algorithm: Any, strategy: Strategy | None = None) -> str:
    return refused(lambda: dt.explain(algorithm, Drift(), strategy or Local()))


@dataclasses.dataclass(frozen=True)
class Marked(Toy):
    """A toy with a part on the side "red", and one of the page's mistakes."""

    mistake: str = ""

    def init(self, key: jax.Array) -> Any:
        """The toy's state, with a number beside it."""
        return {"toy": super().init(key), "red": dt.at("red", jnp.zeros(()))}

    def acting(self, state: Any) -> Any:
        """The toy's."""
        return super().acting(state["toy"])

    def iteration(self, rl: RL, state: Any) -> Any:
        """One of the mistakes."""
        red = state["red"]
        count = lambda held: dt.at("red", held + 1)  # noqa: E731
        if self.mistake == "mixed":
            rl.call("red", count, red)
            return state, {"sum": red.value + rl.gather(self._unrolled(rl, state)).reward.sum()}
        if self.mistake == "jit":
            return {**state, "red": jax.jit(lambda red: rl.call("red", count, red))(red)}, {}
        if self.mistake == "unused":
            return state, {}
        if self.mistake == "two sides":
            blue = rl.send(red.value, to="blue")
            return {**state, "red": rl.call("red", lambda held: dt.at("red", held), blue)}, {
                "blue": sum(rl.send((red.value, blue), to="learner"))
            }
        return {**state, "red": rl.call("red", count, red)}, {}

    def _unrolled(self, rl: RL, state: Any) -> Any:
        return rl.unroll(self.act, rl.broadcast(state["toy"].params), 2)


def test_mistakes_with_sides_are_sentences() -> None:
    assert (
        "this mixes a value on the red side with one on the learner side; bring one of them over "
        "with rl.send(…, to='learner') or rl.call('learner', …) or rl.send(…, to='red') or "
        "rl.call('red', …)."
    ) in told_of(Marked(mistake="mixed"))
    assert "rl.call stands inside jit, scan, cond or vmap" in told_of(Marked(mistake="jit"))
    assert told_of(Marked(mistake="unused")) == (
        "init marks state['red'].value as living on the side 'red', but iteration runs nothing "
        "there: call a function there with rl.call('red', …), or leave the mark out."
    )
    assert (
        "rl.send takes values from one side, but was given one on the red side and one on the "
        "blue side"
    ) in told_of(Marked(mistake="two sides"))
    for mistake in ("mixed", "jit", "two sides"):
        assert "test_own_sides.py:" in told_of(Marked(mistake=mistake))


@dataclasses.dataclass(frozen=True)
class Forgetful(Local):
    """Leaves a side out."""

    def plan(self, graph: Any, resources: Any) -> Any:
        """Without the judge."""
        plan = super().plan(graph, resources)
        kept = tuple(i for i in plan.instances if i.fragment != "judge")
        return dataclasses.replace(plan, instances=kept)


def test_a_side_that_nobody_places() -> None:
    assert told_of(Judged(), Forgetful()) == (
        "The plan of strategy 'forgetful' places nothing of the side 'judge' ('judge'); give its "
        "fragments a worker, or make the plan with Strategy.place, which puts them with the "
        "learner."
    )


def test_more_copies_than_a_batch_divides_into() -> None:
    assert "4 environments cannot be split evenly among 3 copies of judge" in told_of(
        Judged(), Local(sides=("judge:3",))
    )
    assert "--sides jury asks for workers of its own" in told_of(Judged(), Local(sides=("jury",)))
    assert "'judge:0' asks for no copy of judge" in refused(lambda: Local(sides=("judge:0",)))
    assert (
        "has 2 copies of critic on workers of their own, but CriticApart changes the state there"
    ) in refused(lambda: dt.explain(CRITIC, JAX, Local(sides=("critic:2",))))
