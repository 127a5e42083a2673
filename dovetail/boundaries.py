"""The boundaries at which the loop may be cut; `iteration` receives them as `rl`.

There is one crossing, `send`: it moves values from the side where they live to another. Every
other boundary is a short function on top of it. To add a boundary, write a function that takes
`rl` and calls `rl.send`. The boundaries below use the sides learner, actor and replay; any other
name is a side too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp

from dovetail.errors import UserError
from dovetail.replay.data import Data
from dovetail.replay.replay import DeviceReplay, Replay, insertion, of_shards
from dovetail.replay.sample import ItemKeys, Sample
from dovetail.replay.service.remote import RemoteReplay
from dovetail.trajectory import Trajectory

Params = Any
Side = str
"""The role on which a value lives; any name is allowed."""

LEARNER: Side = "learner"
"""Holds metrics and all state that is not marked for another side."""
ACTOR: Side = "actor"
"""Runs `unroll`; the environments are divided among its copies."""
ENVIRONMENT: Side = "environment"
REPLAY: Side = "replay"

BATCH_AXIS = 1
"""The axis along which values are joined and divided: the environment axis of trajectories
[T, B, …] and the item axis of samples [K, n, …]."""


class How(StrEnum):
    """How a value crosses from the copies of one side to the copies of another."""

    COPY = "copy"
    """All source copies hold the same value; every target copy receives all of it."""
    JOIN = "join"
    """The source copies hold equal parts along the batch axis; each target copy receives an equal
    part of the whole."""
    DIVIDE = "divide"
    """All source copies hold the same value; each target copy receives an equal part along the
    batch axis."""
    MEAN = "mean"
    """Every target copy receives the average over the source copies."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class At:
    """A part of the state that lives on a side, or a result of `call` that stays there."""

    value: Any
    side: Side = field(metadata={"static": True})


def at(side: Side, tree: Any) -> At:
    """Marks a part of the state as living on a side: `State(params, critic=dt.at("critic", …))`."""
    return At(tree, side)


def _is_mark(part: Any) -> bool:
    return isinstance(part, At | Replay)


def state_sides(state: Any) -> tuple[Side, ...]:
    """The side of every leaf of a state: the learner, unless it is marked or part of a replay."""
    sides: list[Side] = []
    for part in jax.tree.leaves(state, is_leaf=_is_mark):
        side = part.side if isinstance(part, At) else LEARNER
        side = REPLAY if isinstance(part, DeviceReplay) else side
        sides += [side] * len(jax.tree.leaves(part))
    return tuple(sides)


@dataclass(frozen=True)
class Reach:
    """A side that host Python accesses through its own connection, not through a channel."""

    side: Side
    sends: bool
    """True if the function sends its arguments to the side, False if it fetches its result."""
    place: str
    """Where that side runs, in words."""


def here() -> str:
    """The user's file and line being traced."""
    found = jex.source_info_util.summarize(jex.source_info_util.current())
    return found.split(" (")[0]


class RL:
    """The boundaries, as passed to `iteration`. The plan decides which link carries each."""

    def send(
        self,
        tree: Any,
        to: Side,
        how: How | str = How.COPY,
        *,
        source: Side | None = None,
        name: str = "send",
    ) -> Any:
        """Sends values to a side from the side where they live.

        If `source` is given, the values must live there. `how` ("copy", "join", "divide" or
        "mean") says how they are distributed when a side has several copies; see `How`.
        """
        raise NotImplementedError

    def call(
        self,
        side: Side,
        function: Callable[..., Any],
        *args: Any,
        how: How | str = How.JOIN,
        host: bool = False,
        result: Any = None,
    ) -> Any:
        """Runs `function(*args)` on a side: sends the arguments there and the results back.

        Arguments that already live there are not sent; marked parts arrive without their mark.
        Parts of the result marked with `dt.at(side, …)` stay on the side. With "join", arrays are
        batches along axis 1, and arrays with fewer axes are copied. With "copy", all copies of the
        caller hold the same values.

        With `host=True` the function is plain Python: it takes numpy arrays and returns numpy
        arrays as declared by `result`, a pytree of `jax.ShapeDtypeStruct`.
        """
        raise NotImplementedError

    def python(
        self,
        name: str,
        side: Side,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        result: Any,
        reach: Reach | None = None,
    ) -> Any:
        """Runs plain Python on the side where its arguments live.

        It takes numpy arrays and returns numpy arrays as declared by `result`. Each copy of the
        side runs it on its own part.
        """
        raise NotImplementedError

    def unroll(self, act: Any, params: Params, length: int, bootstrap: Any = None) -> Trajectory:
        """Actors ↔ environments: takes `length` steps in every environment, acting with `params`.

        `act(params, carry, timestep, key) -> (action, extras, carry)` is written for one
        environment and mapped over the batch, unless the algorithm defines `act_batch` or `act` is
        marked with `dt.batched`. The same applies to `bootstrap(params, carry, timestep)`. The
        trajectory has leaves [length, B, …].
        """
        raise NotImplementedError

    def mean(self, tree: Any) -> Any:
        """Averages over learner copies; the identity with one. Allowed inside scan and jit."""
        raise NotImplementedError

    def max(self, tree: Any) -> Any:
        """Elementwise maximum over learner copies; the identity with one. Allowed inside scan and
        jit."""
        raise NotImplementedError

    def copies(self, side: Side) -> int:
        """Number of copies of a side that contribute to one update."""
        raise NotImplementedError

    def recall(self, data: Data, draws: jax.Array) -> Sample:
        """Recorded data → learner: samples K batches of n items.

        `draws` [K, n] are random integers (uint32). The sample has leaves [K, n, …]; with several
        learner copies, each receives its part of n.
        """
        raise NotImplementedError

    def own_keys(self, keys: jax.Array, items: int, axis: int = 0) -> jax.Array:
        """Keys with which a learner copy draws for its `items` of a batch the same numbers that a
        single learner would draw for them; with one learner, `keys` unchanged.

        The items lie on `axis` of every drawn array. Use `dovetail.keys.on_axis` to draw on another
        axis, and `dovetail.keys.for_all` for draws that are not per item.
        """
        raise NotImplementedError

    def broadcast(self, tree: Any) -> Any:
        """Learner → actors: weights and any other values that acting needs."""
        return self.send(tree, ACTOR, How.COPY, source=LEARNER, name="broadcast")

    def gather(self, tree: Any) -> Any:
        """Actors → learner, joined along the environment axis (axis 1), in environment order."""
        return self.send(tree, LEARNER, How.JOIN, source=ACTOR, name="gather")

    def reduce(self, tree: Any) -> Any:
        """Actors → learner, averaged over actors: gradients, statistics."""
        return self.mean(self.send(tree, LEARNER, How.MEAN, source=ACTOR, name="reduce"))

    def insert(
        self,
        replay: Replay,
        trajectory: Trajectory,
        rows: Any,
        final: Any = None,
        priorities: Any = None,
    ) -> Replay:
        """Actors → replay: inserts `rows` [T, B, …] made from `trajectory`.

        The trajectory tells where episodes end. `final` holds the values that follow each row, as a
        part of the rows' tree; it is read where an episode ends. `priorities` [T, B] belong to the
        items that begin at each row; unless given, new items get the highest priority so far.
        """
        rows_sent = insertion(trajectory, rows, final, priorities)
        if isinstance(replay, RemoteReplay):
            return self._insert_remote(replay, rows_sent)
        assert isinstance(replay, DeviceReplay)
        actors, shards = self.copies(ACTOR), replay.shards
        if actors % shards:
            raise UserError(
                f"{actors} actors cannot be split evenly among {shards} shards of the replay: "
                f"choose a multiple of {shards} actors (--actors)."
            )
        arrived = self.send(rows_sent, REPLAY, How.JOIN, source=ACTOR, name="insert")
        return replay.insert(arrived, actors // shards)

    def _insert_remote(self, replay: RemoteReplay, sent: Any) -> RemoteReplay:
        """Each actor inserts directly into the servers; the learner only gets a confirmation."""
        sent = self.send(sent, ACTOR, How.JOIN, source=ACTOR, name="insert")
        reach = Reach(REPLAY, True, replay.place)
        told = replay.told(sent.first.shape[BATCH_AXIS])
        done = self.python("insert", ACTOR, replay.inserting, (sent,), told, reach)
        done = self.send(done, LEARNER, How.JOIN, source=ACTOR, name="inserted")
        # The turn depends on every actor's insertion, so later samples come after it.
        return replay.after(replay.turn + jnp.min(done))

    def sample(self, replay: Replay, draws: jax.Array) -> tuple[Replay, Sample]:
        """Replay → learner: samples K batches of n items.

        `draws` [K, n] are uniform numbers from [0, 1). The sample has leaves [K, n, …]; with
        several learner copies, each receives its part of n.
        """
        self.refuse_uneven_draws("sample", draws, replay.shards)
        if isinstance(replay, RemoteReplay):
            self._refuse_replicas()
            draws = self.send(draws, LEARNER, source=LEARNER, name="sample")
            reach, result = Reach(REPLAY, False, replay.place), replay.shapes(draws)
            given = (replay.turn, draws)
            turn, found = self.python("sample", LEARNER, replay.sampling, given, result, reach)
            return replay.after(turn), found
        assert isinstance(replay, DeviceReplay)
        asked = self.send(draws, REPLAY, How.DIVIDE, source=LEARNER, name="draw")
        replay, found = replay.sample(asked)
        arrived = self.send(found, LEARNER, How.JOIN, source=REPLAY, name="sample")
        return replay, of_shards(arrived, replay.shards)

    def update_priorities(self, replay: Replay, keys: ItemKeys, priorities: jax.Array) -> Replay:
        """Learner → replay: sets the priorities [K, n] of sampled items."""
        sent, name = (keys, priorities), "update_priorities"
        if isinstance(replay, RemoteReplay):
            keys, priorities = self.send(sent, LEARNER, source=LEARNER, name=name)
            reach, given = Reach(REPLAY, True, replay.place), (replay.turn, keys, priorities)
            result = jax.ShapeDtypeStruct((), jnp.int32)
            return replay.after(self.python(name, LEARNER, replay.updating, given, result, reach))
        assert isinstance(replay, DeviceReplay)
        keys, priorities = self.send(sent, REPLAY, How.JOIN, source=LEARNER, name=name)
        return replay.update_priorities(keys, priorities)

    def _refuse_replicas(self) -> None:
        if self.copies(LEARNER) > 1:
            raise UserError(
                f"{here()}: a served replay gives its samples to one learner, but there are "
                f"{self.copies(LEARNER)} replicas: use one (--devices 1), or --replay learner."
            )

    def refuse_uneven_draws(self, name: str, draws: jax.Array, shards: int = 1) -> None:
        """Raises unless draws are [batches, items] and the number of items is divisible by the
        numbers of shards and of learner copies."""
        replicas = self.copies(LEARNER)
        parts = max(shards, replicas)
        if draws.ndim == 2 and draws.shape[1] % shards == draws.shape[1] % replicas == 0:
            return
        whose = "shard" if shards == parts else "learner replica"
        among = f" in {parts} equal parts, one for each {whose}" if parts > 1 else ""
        raise UserError(
            f"{here()}: rl.{name} takes draws [batches, items]{among}, but was given "
            f"{list(draws.shape)}: choose another number of items (--batch-size)."
        )
