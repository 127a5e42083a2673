"""The interpreter: runs an algorithm's loop as plain Python.

Boundaries return their values immediately, `unroll` is a Python loop, and `iteration` sees only
concrete values. With `debug`, jit is off and `act` runs for one environment at a time, so
breakpoints and prints work inside loops and inside `act` too. Every synchronous strategy must
match the interpreter.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.algorithm import Algorithm, Params, Trajectory
from dovetail.batching import defines, over_batch, preferred, takes_batch
from dovetail.boundaries import BATCH_AXIS, RL, How, Reach, Side, here
from dovetail.graph.marks import Opens, declared, run_python, unmarked
from dovetail.graph.unroll import (
    ActorState,
    EpisodeSums,
    Step,
    masked_reset,
    no_episodes,
    resetting,
    unroll_scan,
)
from dovetail.replay.data import Data
from dovetail.replay.replay import DeviceReplay, Replay, insertion, of_shards
from dovetail.replay.sample import ItemKeys, Sample

# A replay operation is hundreds of small ops, so compile it; `disable_jit` still applies.
_insert, _insert_each = jax.jit(DeviceReplay.insert), jax.jit(jax.vmap(DeviceReplay.insert))
_sample, _sample_each = jax.jit(DeviceReplay.sample), jax.jit(jax.vmap(DeviceReplay.sample))
_update_priorities = jax.jit(DeviceReplay.update_priorities)
_update_each = jax.jit(jax.vmap(DeviceReplay.update_priorities))


class Interpreting(RL):
    """The `rl` of an interpreted iteration."""

    def __init__(
        self, algorithm: Algorithm, step: Step, actor: ActorState, debug: bool = False
    ) -> None:
        self.actor = actor
        self._debug = debug
        self._info = len(algorithm.task.env.info)
        self.episodes = no_episodes(actor.step.shape[0], self._info)
        self._algorithm = algorithm
        self._step = step

    def send(
        self,
        tree: Any,
        to: Side,
        how: How | str = How.COPY,
        *,
        source: Side | None = None,
        name: str = "send",
    ) -> Any:
        """The identity: every side lives in this process."""
        return tree

    def copies(self, side: Side) -> int:
        """Always 1."""
        return 1

    def call(
        self,
        side: Side,
        function: Callable[..., Any],
        *args: Any,
        how: How | str = How.JOIN,
        host: bool = False,
        result: Any = None,
    ) -> Any:
        """Calls the function."""
        if not host:
            return function(*unmarked(args))
        shapes = declared(function, result)
        made = run_python(function, unmarked(args), shapes, here())
        return jax.tree.structure(shapes).unflatten([jnp.asarray(leaf) for leaf in made])

    def python(
        self,
        name: str,
        side: Side,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        result: Any,
        reach: Reach | None = None,
    ) -> Any:
        """Calls the function; an `Opens` is opened and closed around this one call."""
        if isinstance(function, Opens):
            opened = function.open()
            # For one call only: the interpreter has no end at which to close it.
            made = run_python(opened, args, result, here())
            opened.close()
        else:
            made = run_python(function, args, result, here())
        return jax.tree.structure(result).unflatten([jnp.asarray(leaf) for leaf in made])

    def insert(
        self,
        replay: Replay,
        trajectory: Trajectory,
        rows: Any,
        final: Any = None,
        priorities: Any = None,
    ) -> Replay:
        """Actors → replay."""
        if not isinstance(replay, DeviceReplay):
            return super().insert(replay, trajectory, rows, final, priorities)
        sent = insertion(trajectory, rows, final, priorities)
        if replay.shards == 1:
            return _insert(replay, sent)
        return _insert_each(replay, _parts(sent, replay.shards))

    def sample(self, replay: Replay, draws: jax.Array) -> tuple[Replay, Sample]:
        """Replay → learner."""
        if not isinstance(replay, DeviceReplay):
            return super().sample(replay, draws)
        if replay.shards == 1:
            return _sample(replay, draws)
        replay, found = _sample_each(replay, _parts(draws, replay.shards))
        joined = jax.tree.map(lambda x: jnp.concatenate(list(x), BATCH_AXIS), found)
        return replay, of_shards(joined, replay.shards)

    def recall(self, data: Data, draws: jax.Array) -> Sample:
        """Recorded data → learner."""
        return data.sample(draws)

    def update_priorities(self, replay: Replay, keys: ItemKeys, priorities: jax.Array) -> Replay:
        """Learner → replay."""
        if not isinstance(replay, DeviceReplay):
            return super().update_priorities(replay, keys, priorities)
        if replay.shards == 1:
            return _update_priorities(replay, keys, priorities)
        return _update_each(replay, *_parts((keys, priorities), replay.shards))

    def own_keys(self, keys: jax.Array, items: int, axis: int = 0) -> jax.Array:
        """All keys: there is one learner."""
        return keys

    def mean(self, tree: Any) -> Any:
        """The identity: there is one learner."""
        return tree

    def max(self, tree: Any) -> Any:
        """The identity: there is one learner."""
        return tree

    def unroll(
        self, act: Callable[..., Any], params: Params, length: int, bootstrap: Any = None
    ) -> Trajectory:
        """Runs `unroll_scan` as a Python loop."""
        algorithm = self._algorithm
        own = defines(algorithm, "reset_carry")
        reset = algorithm.reset_carry if own else masked_reset(algorithm.initial_carry())
        whole = self._over_environments(preferred(algorithm, act))
        trajectory, self.actor, ended = unroll_scan(
            resetting(whole, reset),
            self._step,
            self._over_environments(bootstrap) if bootstrap is not None else None,
            length,
            params,
            self.actor,
            scan=_in_python,
            info=self._info,
        )
        self.episodes = jax.tree.map(jnp.add, self.episodes, ended)
        return trajectory

    def _over_environments(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Maps `function(params, …)` over environments; with `debug`, in a Python loop."""
        if self._debug and not takes_batch(function):
            return _one_by_one(function)
        return over_batch(function)


def _in_python(body: Callable[..., Any], state: Any, each: Any) -> tuple[Any, Any]:
    """`jax.lax.scan` as a Python loop with concrete values."""
    rows: list[Any] = []
    for t in range(len(jax.tree.leaves(each)[0])):
        state, row = body(state, jax.tree.map(itemgetter(t), each))
        rows.append(row)
    return state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def _parts(tree: Any, count: int) -> Any:
    """Splits every leaf into equal parts along the batch axis, stacked on a new first axis."""
    return jax.tree.map(lambda x: jnp.stack(jnp.split(x, count, BATCH_AXIS)), tree)


def _one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `function` for one environment at a time, with concrete values."""

    def looped(params: Params, *batch: Any) -> Any:
        size = jax.tree.leaves(batch)[0].shape[0]
        rows = [function(params, *jax.tree.map(itemgetter(i), batch)) for i in range(size)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)

    return looped


def interpret(
    algorithm: Algorithm, step: Step, state: Any, actor: ActorState, debug: bool = False
) -> tuple[Any, dict[str, jax.Array], ActorState, EpisodeSums]:
    """Runs one iteration of a bound algorithm; returns (state, metrics, actor, episodes).

    `step` steps the batch of environments: `dovetail.envs.batched.step` with a JAX environment
    filled in, or the step of a host environment.
    """
    with jax.disable_jit(debug):
        rl = Interpreting(algorithm, step, actor, debug)
        state, metrics = algorithm.iteration(rl, state)
    return state, metrics, rl.actor, rl.episodes
