"""The smallest trainings that go through everything: for tests of runtimes and training."""

import contextlib
import dataclasses
import importlib
import json
import signal
from typing import Any, Self
from unittest import mock

import jax
import numpy as np
import pytest

from dovetail.algorithm import Algorithm, Task
from dovetail.algorithms.a2c import A2C
from dovetail.algorithms.ppo import PPO
from dovetail.algorithms.reinforce import REINFORCE
from dovetail.envs.resolve import Env, resolve
from dovetail.graph.interpret import interpret
from dovetail.graph.shares import Graphs
from dovetail.graph.trace import abstract_actor
from dovetail.keys import seed_key
from dovetail.plan.serial import from_json
from dovetail.replay.replay import all_shards
from dovetail.replay.service.remote import Served
from dovetail.run.checkpoint import Checkpoints
from dovetail.run.folder import Run
from dovetail.run.settings import Settings
from dovetail.runtime.local import LocalRuntime
from dovetail.runtime.report import Report
from dovetail.strategies.interface import Strategy
from dovetail.training import planning
from dovetail.training.config import rebuild_all
from dovetail.training.dataset import RecordedData
from dovetail.training.signals import Stop
from dovetail.training.start import first_state

train_module = importlib.import_module("dovetail.training.train")  # hidden by the function

LENGTH = 4
STEPS = 1000
"""How long a run `Started` would be; only schedules look at it."""
QUIET = Settings(episodes=2, evaluate_every=0, checkpoint_every=1e9, video=False, display="none")
"""Nothing but training, one evaluation at the end."""


def ppo(**options: Any) -> PPO:
    """PPO with eight hidden units."""
    return dataclasses.replace(
        PPO(LENGTH, hidden_sizes=(8,), epochs=2, num_minibatches=2), **options
    )


def a2c(**options: Any) -> A2C:
    """A2C with eight hidden units."""
    return dataclasses.replace(A2C(LENGTH, hidden_sizes=(8,)), **options)


def reinforce(**options: Any) -> REINFORCE:
    """REINFORCE with eight hidden units."""
    return dataclasses.replace(REINFORCE(LENGTH, hidden_sizes=(8,)), **options)


class Started:
    """A runtime at work, with the learner's and the actors' state as its last report left them.

    Use it in a `with` statement: it may hold threads, processes and environments.
    """

    feed: Any = None
    """What gives it recorded steps, if any."""

    def __init__(
        self,
        algorithm: Algorithm,
        env: Any,
        strategy: Strategy,
        *,
        seed: int = 0,
        seeds: int = 1,
        start: tuple[Any, Any] | None = None,
        data: RecordedData | None = None,
        online: bool = True,
        served: Served | None = None,
    ) -> None:
        """`start` is the state to begin with, the seed's first unless given; `data` are recorded,
        and if not `online`, all that there is; `served` are the servers that keep the replay."""
        found = resolve(env, traced=strategy.traced_envs)
        spec = None if data is None else data.prepare(algorithm, found.spec, seed)
        with shared_traces() if isinstance(env, str) else contextlib.nullcontext():
            planned = planning.plan_for(
                algorithm, found, strategy, STEPS, data=spec, online=online, served=served
            )
        self.plan = planned.plan
        self.graph = planned.graph
        self.runtime = LocalRuntime(planned.graph, planned.plan, found, seeds)
        plan = planned.plan
        of_all = (plan.num_envs, plan.shards, spec, online, served)
        bound = algorithm.bind(Task(found.spec, plan.update_envs, STEPS, *of_all))
        self.feed = None if data is None else data.feed(bound)
        try:
            first = None if self.feed is None else self.feed.take(0)
            compiled = found.jax if online else None
            if start is None and isinstance(env, str) and first is None:
                start = begun(env, bound, compiled, plan.num_envs, seed, seeds)
            if start is None:
                start = first_state(bound, compiled, plan.num_envs, seed, seeds, first)
            self.state: Any = start[0]
            self.actor: Any = self.runtime.load(*start)
        except BaseException:
            self.runtime.close()
            raise

    def advance(self, iterations: int) -> Report:
        """That many iterations, waited for."""
        report = self.runtime.advance(iterations).wait()
        self.state, self.actor = report.state(), report.actor()
        return report

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime.close()
        if self.feed is not None:
            self.feed.close()


_graphs: dict[Any, Graphs] = {}
_graphs_of = planning.graphs_of


def shared_traces() -> contextlib.AbstractContextManager[Any]:
    """Traces an algorithm once for all strategies, where the environment is one with a name:
    tracing takes up to a second, and every plan begins with the same graph."""

    def shared(algorithm: Algorithm, env: Env, *more: Any, **rest: Any) -> Graphs:
        key = type(algorithm), repr(algorithm), env.spec.id, env.jax is None, repr((more, rest))
        if key not in _graphs:
            _graphs[key] = _graphs_of(algorithm, env, *more, **rest)
        return _graphs[key]

    return mock.patch.object(planning, "graphs_of", shared)


_begun: dict[str, Any] = {}


def begun(
    name: str, bound: Algorithm, env: Any, num_envs: int, seed: int, seeds: int
) -> tuple[Any, Any]:
    """`first_state`, computed once for those that begin alike: it takes as long as they do."""
    key = f"{name} {env is None} {type(bound)} {bound} {bound.task} {num_envs} {seed} {seeds}"
    if key not in _begun:
        _begun[key] = first_state(bound, env, num_envs, seed, seeds)
    return _copied(_begun[key])  # a runtime may use up what it gets


@jax.jit
def _copied(tree: Any) -> Any:
    return jax.tree.map(jax.numpy.copy, tree)


def interpreted(algorithm: Algorithm, step: Any, state: Any, actor: Any, count: int) -> Any:
    """(state, actor) after `count` iterations of the plain loop, compiled as the one program it is:
    operation by operation it would be hundreds, and take five times as long."""
    iteration = jax.jit(lambda state, actor: interpret(algorithm, step, state, actor)[::2])
    for _ in range(count):
        state, actor = iteration(state, actor)
    return state, actor


def numbers(tree: Any) -> np.ndarray:
    """All leaves of a tree in one vector; random keys as their data."""

    def plain(leaf: Any) -> np.ndarray:
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.ravel(np.asarray(leaf)).astype(np.float64)

    return np.concatenate([plain(leaf) for leaf in jax.tree.leaves(tree)])


def saved(run: Run, step: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tree, meta) of a run's checkpoint, the last one unless told."""
    config = run.config
    algorithm, strategy, settings = rebuild_all(config)
    env = resolve(config["env"], traced=strategy.traced_envs)
    plan, steps = from_json(json.loads((run.path / "plan.json").read_text())), config["steps"]
    task = Task(env.spec, plan.update_envs, steps, algorithm.num_envs, plan.shards)
    bound = algorithm.bind(task)
    like: Any = {
        "state": jax.eval_shape(lambda key: all_shards(bound.init(key)), seed_key(0)),
        "actor": abstract_actor(bound, Task(env.spec, algorithm.num_envs, steps), env.jax),
    }
    if settings.seeds > 1:
        like = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct((settings.seeds, *s.shape), s.dtype), like
        )
    return Checkpoints(run.path / "checkpoints").restore(like, step)


class StopAfter(Stop):
    """Asks to stop when it is looked at for the n-th time: in the middle of a training."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._looks = looks

    def __bool__(self) -> bool:
        self._looks -= 1
        if self._looks < 0 and self.signal is None:
            self.ask(signal.SIGINT)
        return super().__bool__()


def stop_after(monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    """Every training from now on is interrupted by Ctrl-C at the n-th look."""
    stop = StopAfter(looks)
    monkeypatch.setattr(train_module, "stopping", lambda: contextlib.nullcontext(stop))
