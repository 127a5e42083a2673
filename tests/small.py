"""The smallest trainings that go through everything: for tests of runtimes and training."""

import contextlib
import dataclasses
import importlib
import signal
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from dovetail.algorithm import Algorithm, Task
from dovetail.algorithms.a2c import A2C
from dovetail.algorithms.ppo import PPO
from dovetail.algorithms.reinforce import REINFORCE
from dovetail.checkpoint import Checkpoints
from dovetail.envs import batched
from dovetail.envs.batched import BatchStep
from dovetail.envs.interface import HostEnv, JaxEnv
from dovetail.envs.resolve import resolve
from dovetail.graph.interpret import interpret
from dovetail.graph.trace import abstract_actor, trace
from dovetail.keys import seed_key
from dovetail.plan import make_plan
from dovetail.policies.interface import Policy, Resources
from dovetail.run import Run
from dovetail.runtime.local import Runtime
from dovetail.settings import Settings
from dovetail.training.config import rebuild_all
from dovetail.training.stopping import Stop

train_module = importlib.import_module("dovetail.training.train")  # hidden by the function

LENGTH = 4
QUIET = Settings(episodes=2, evaluate_every=0, checkpoint_every=1e9, video=False, display="none")
"""Nothing but training, one evaluation at the end."""


def ppo(**options: Any) -> PPO:
    """PPO with eight hidden units."""
    return dataclasses.replace(PPO(LENGTH, hidden=(8,), epochs=2, minibatches=2), **options)


def a2c(**options: Any) -> A2C:
    """A2C with eight hidden units."""
    return dataclasses.replace(A2C(LENGTH, hidden=(8,)), **options)


def reinforce(**options: Any) -> REINFORCE:
    """REINFORCE with eight hidden units."""
    return dataclasses.replace(REINFORCE(LENGTH, hidden=(8,)), **options)


def runtime_of(
    algorithm: Algorithm, env: JaxEnv | HostEnv, policy: Policy, steps: int = 1000, seeds: int = 1
) -> Runtime:
    """The runtime of a plan, as training makes it."""
    traced = None if isinstance(env, HostEnv) else env
    task = Task(env.spec, policy.envs, steps)
    graph = trace(algorithm, task, traced, replicas=policy.replicas)
    plan = make_plan(policy, graph, Resources(len(jax.devices()), 2))
    return Runtime(graph, plan, env, seeds)


def jax_step(env: JaxEnv) -> Callable[..., BatchStep]:
    """How the interpreter steps a batch of JAX environments."""
    return lambda state, action, keys: batched.step(env, state, action, keys)


def host_step(env: HostEnv) -> Callable[..., BatchStep]:
    """How the interpreter steps host environments, which keep their own state."""

    def step(_: Any, action: Any, keys: Any) -> BatchStep:
        after = env.step(np.asarray(action))
        return BatchStep((), *jax.tree.map(jax.numpy.array, after))

    return step


def interpreted(algorithm: Algorithm, step: Any, state: Any, actor: Any, count: int) -> Any:
    """(state, actor) after `count` interpreted iterations."""
    for _ in range(count):
        state, _, actor, _ = interpret(algorithm, step, state, actor)
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
    algorithm, policy, settings = rebuild_all(config)
    env = resolve(config["env"], traced=policy.traced_envs)
    task = Task(env.spec, policy.envs, config["steps"])
    bound = algorithm.bind(task)
    like: Any = {
        "state": jax.eval_shape(bound.init, seed_key(0)),
        "actor": abstract_actor(bound, task, env.jax),
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
