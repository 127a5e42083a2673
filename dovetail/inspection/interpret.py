"""`interpret`: runs an algorithm's loop as plain Python, for debugging and as a reference."""

import dataclasses
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.algorithm import Algorithm, Task
from dovetail.envs import batched
from dovetail.envs.interface import HostEnv
from dovetail.envs.resolve import resolve
from dovetail.graph import interpret as interpreter
from dovetail.graph.unroll import Step
from dovetail.replay.data import with_data
from dovetail.runtime.environments import initial_observation
from dovetail.training.dataset import MEMORY, RecordedData, check_data
from dovetail.training.replay_servers import ServedReplay, Servers, orders, served_form
from dovetail.training.start import first_state


class Interpreted(NamedTuple):
    """The states after the last interpreted iteration."""

    state: Any
    metrics: dict[str, jax.Array]
    """The metrics of the last iteration."""
    actor: Any


def interpret(
    algorithm: Algorithm,
    env: Any,
    *,
    iterations: int = 1,
    total_steps: int = 200_000,
    seed: int = 0,
    shards: int = 1,
    debug: bool = True,
    data: str | Path | None = None,
    online: bool | None = None,
    data_memory: int = MEMORY,
    replay: ServedReplay | str | None = None,
) -> Interpreted:
    """Runs `iterations` without compiling the loop; every synchronous strategy gives equal results.

    With `debug`, jit is off and `act` is called for one environment after another, so that
    breakpoints and prints work anywhere. Without it, the run is faster, but only `iteration` itself
    sees concrete values. `shards` is the number of equal parts of a replay, `data` the folder of a
    dataset to learn from. `online` says whether the algorithm acts; by default it does, unless it
    needs recorded data. `replay` names the servers that hold the replay, as for `train`.
    """
    check_data(algorithm, data is not None)
    found, acts = resolve(env), online if online is not None else not algorithm.needs_data
    with ExitStack() as stack:
        task = Task(found.spec, algorithm.num_envs, total_steps, shards=shards, online=acts)
        kept = ServedReplay.of(replay)
        if kept is not None:
            served = kept.served(cluster=False)
            if not kept.at:
                form = served_form(algorithm, found.spec, algorithm.num_envs, kept.shards)
                servers = stack.enter_context(closing(Servers(orders(form, kept, Path("replay")))))
                served = dataclasses.replace(served, addresses=servers.addresses)
            task = dataclasses.replace(task, served=served)
        feed = None
        if data is not None:
            recorded = RecordedData(data, data_memory)
            stack.callback(recorded.close)
            spec = recorded.prepare(algorithm, found.spec, seed)
            recorded.check()
            task = dataclasses.replace(task, data=spec)
            feed = recorded.feed(algorithm.bind(task))
            stack.callback(feed.close)
        bound = algorithm.bind(task)
        stepped = found.jax if found.jax is not None else _made(found.host, algorithm.num_envs)
        first = None if feed is None else feed.take(0)
        compiled = found.jax if acts else None
        state, actor = first_state(bound, compiled, algorithm.num_envs, seed, data=first)
        if isinstance(stepped, HostEnv):
            stack.callback(stepped.close)
            shown = initial_observation(stepped, actor.keys)
            actor = actor._replace(timestep=actor.timestep._replace(observation=shown))
        metrics: dict[str, jax.Array] = {}
        step = stepper(stepped)
        for number in range(iterations):
            if feed is not None and feed.due(number):
                state = with_data(state, feed.take(number))
            state, metrics, actor, _ = interpreter.interpret(bound, step, state, actor, debug)
        return Interpreted(state, metrics, actor)


def stepper(env: Any) -> Step:
    """Returns the function with which the interpreter steps a batch of JAX or host environments."""
    if not isinstance(env, HostEnv):
        return lambda state, action, keys: batched.step(env, state, action, keys)

    def on_host(state: Any, action: Any, keys: jax.Array) -> batched.BatchStep:
        after = env.step(jax.tree.map(np.asarray, action))
        return batched.BatchStep(state, *jax.tree.map(jnp.array, tuple(after)))

    return on_host


def _made(host: Any, num_envs: int) -> HostEnv:
    assert host is not None
    return host(num_envs)
