"""The boundaries at which the loop may be cut: what `iteration` is given as `rl`.

There is one crossing, `send`: it brings values from the side where they live to another. Every
other boundary is a short function over it, and so is a new one: a function that takes `rl` and
calls `rl.send`. Learner, actor and replay are the sides that the boundaries below use; any other
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
"""The role on which a value lives: any name."""

LEARNER: Side = "learner"
"""The home of metrics, and of all state that is not marked for another side."""
ACTOR: Side = "actor"
"""Where `unroll` acts; its copies share the environments."""
ENVIRONMENT: Side = "environment"
REPLAY: Side = "replay"

BATCH_AXIS = 1
"""The axis along which values are joined and divided: the environments' in trajectories, which are
time-major, and that of a batch's items in samples."""


class How(StrEnum):
    """What happens to a value that crosses from the copies of one side to those of another."""

    COPY = "copy"
    """Every copy of the source holds the same; every copy of the target gets all of it."""
    JOIN = "join"
    """The copies of the source hold equal parts along the batch axis; each of the target gets an
    equal part of the whole."""
    DIVIDE = "divide"
    """Every copy of the source holds the same; each of the target gets an equal part, along the
    batch axis."""
    MEAN = "mean"
    """The average over the copies of the source; every copy of the target gets all of it."""


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
    """The side of every leaf of a state: a replay's and those that are marked have their own."""
    sides: list[Side] = []
    for part in jax.tree.leaves(state, is_leaf=_is_mark):
        side = part.side if isinstance(part, At) else LEARNER
        side = REPLAY if isinstance(part, DeviceReplay) else side
        sides += [side] * len(jax.tree.leaves(part))
    return tuple(sides)


@dataclass(frozen=True)
class Reach:
    """A side that plain Python reaches by itself, through a connection of its own."""

    side: Side
    sends: bool
    """Whether it brings what it takes there; else it brings what it returns from there."""
    place: str
    """Where that side is, in words."""


def here() -> str:
    """The user's file and line that are being traced."""
    found = jex.source_info_util.summarize(jex.source_info_util.current())
    return found.split(" (")[0]


class RL:
    """The boundaries. `iteration` gets one; how each is carried is the plan's business."""

    def send(
        self,
        tree: Any,
        to: Side,
        how: How | str = How.COPY,
        *,
        source: Side | None = None,
        name: str = "send",
    ) -> Any:
        """Brings values to a side, from the one where they live (`source`, if only that will do).

        With several copies of a side, `how` says what each holds and gets: "copy", "join",
        "divide" or "mean".
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
        """Runs `function(*args)` on a side: brings the arguments there and the results back.

        Arguments that live there already are taken as they are, and marked parts without their
        mark. Parts of the result that are marked with `dt.at(side, …)` stay there. With "join"
        arrays are batches along axis 1, and those with fewer axes are copied; with "copy" every
        copy of the caller holds the same.

        With `host=True` the function is plain Python: it takes numpy arrays and returns what
        `result` declares, a pytree of `jax.ShapeDtypeStruct`.
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
        """Runs plain Python on the side where its arguments live: numpy arrays in, and out what
        `result` declares. Of several copies of the side, each runs it on its own part."""
        raise NotImplementedError

    def unroll(self, act: Any, params: Params, length: int, bootstrap: Any = None) -> Trajectory:
        """Actors ↔ environments: `length` steps of every environment, acting with `params`.

        `act(params, carry, timestep, key) -> (action, extras, carry)` is written for one
        environment and mapped over the batch, unless the algorithm has an `act_batch`, or `act` is
        marked with `dt.batched`. The same holds of `bootstrap(params, carry, timestep)`.
        """
        raise NotImplementedError

    def mean(self, tree: Any) -> Any:
        """Averages over learner replicas: the identity with one. Allowed inside scan and jit."""
        raise NotImplementedError

    def max(self, tree: Any) -> Any:
        """The largest over learner replicas, number by number: the identity with one. Allowed
        inside scan and jit."""
        raise NotImplementedError

    def copies(self, side: Side) -> int:
        """How many copies of a side give to one update."""
        raise NotImplementedError

    def recall(self, data: Data, draws: jax.Array) -> Sample:
        """Recorded data → learner: K batches of n items for `draws` [K, n], whole random numbers
        (uint32); what is sampled is [K, n, …], and a learner replica's part of it with several."""
        raise NotImplementedError

    def own_keys(self, keys: jax.Array, items: int, axis: int = 0) -> jax.Array:
        """Keys by which a learner replica draws for its `items` of a batch what one learner would
        draw for them; the same keys with one. The items stand on `axis` of every array that is
        drawn: `dovetail.keys.on_axis` says so of another, and `for_all` is for what is not drawn
        for each item."""
        raise NotImplementedError

    def broadcast(self, tree: Any) -> Any:
        """Learner → actors: weights, and whatever else acting needs."""
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
        """Actors → replay: `rows` [T, B, …], made of a trajectory, which says where episodes end.
        `final` is what was seen after each row, a part of the rows' tree; `priorities` are those of
        the items that begin with each row."""
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
        """From each actor straight to the servers; the learner only hears that it is done."""
        sent = self.send(sent, ACTOR, How.JOIN, source=ACTOR, name="insert")
        reach = Reach(REPLAY, True, replay.place)
        told = replay.told(sent.first.shape[BATCH_AXIS])
        done = self.python("insert", ACTOR, replay.inserting, (sent,), told, reach)
        done = self.send(done, LEARNER, How.JOIN, source=ACTOR, name="inserted")
        return replay.after(replay.turn + jnp.min(done))

    def sample(self, replay: Replay, draws: jax.Array) -> tuple[Replay, Sample]:
        """Replay → learner: K batches of n items for `draws` [K, n], uniform numbers from [0, 1);
        what is sampled is [K, n, …], and a learner replica's part of it with several."""
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
        """Learner → replay: gives sampled items other priorities [K, n]."""
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
        """Draws are [batches, items], and the items divide among shards and learner replicas."""
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
