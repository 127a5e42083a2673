"""Distributes the state of every side to the workers and collects it again."""

import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from dovetail.boundaries import Side
from dovetail.envs.resolve import Env
from dovetail.graph.ir import Graph, Value
from dovetail.graph.unroll import ActorState
from dovetail.plan.ir import Plan
from dovetail.runtime.arrays import Leaf, Values, leaves_of, numbered
from dovetail.runtime.devices import mesh_of, replicated, to_device
from dovetail.runtime.environments import begin_episodes
from dovetail.runtime.placement import workers_of
from dovetail.runtime.records import LOOK_SECONDS
from dovetail.runtime.remote import WorkerLost
from dovetail.runtime.schedule import Workers
from dovetail.runtime.supervision import StopRequest
from dovetail.runtime.worker import RunningWorker

AGAIN_SECONDS = 10.0
"""How long to wait for a lost worker before falling back to its last saved state."""


class States:
    """The state that the workers of a plan hold."""

    def __init__(
        self, graph: Graph, plan: Plan, env: Env, workers: Workers, stop: StopRequest
    ) -> None:
        self._graph, self._plan, self._env, self._workers = graph, plan, env, workers
        self._stop = stop
        self.copies: list[list[Leaf]] = []
        """For each acting copy, the leaves of its state as of the last update."""
        self._keys: jax.Array | None = None
        """The keys [num_envs] with which host environments begin episodes; None before `split`."""
        self._saved: dict[str, Values] = {}
        """For each worker in another process, its state at the start or at the last checkpoint."""
        self._hosts = {
            side: [
                w for name in workers_of(graph, plan, side) for w in workers.all if w.name == name
            ]
            for side in graph.sides
        }

    def split(self, actor: ActorState, episode_keys: jax.Array) -> None:
        """Splits the actors' state among the acting copies; sets the keys for new episodes."""
        self._keys = episode_keys
        copies, parts = self._plan.copies_of(*self._graph.acting), [actor]
        if copies > 1:
            envs = [self._envs(copy) for copy in range(copies)]
            parts = [jax.tree.map(lambda x, own=own: x[own], actor) for own in envs]
        self.copies = [jax.tree.leaves(part) for part in parts]

    def _envs(self, copy: int) -> slice:
        size = self._plan.num_envs // self._plan.copies_of(*self._graph.acting)
        return slice(copy * size, (copy + 1) * size)

    def acts(self, worker: RunningWorker) -> int | None:
        """The index of the acting copy on a worker; None if it does not act."""
        return next((worker.copies[s] for s in self._graph.acting if s in worker.copies), None)

    def give(self, worker: RunningWorker, state: object) -> None:
        """Gives a worker its part of the state and of the actors' state."""
        leaves = jax.tree.leaves(state)
        own = self._own(worker, leaves)
        worker.held = {}
        if worker.away is not None:
            # Kept here, because the process may die before the first checkpoint.
            self._saved[worker.name] = own
            worker.held |= own
        else:
            worker.hold(self._copied(own))
        if worker is self._workers.home:
            inputs = self._graph.state.inputs
            self.refill([leaves[i] for i in self._graph.data if inputs[i].side in worker.copies])
        copy = self.acts(worker)
        if copy is not None:
            self._set_actor(worker, self.copies[copy])

    def _own(self, worker: RunningWorker, leaves: Sequence[Leaf]) -> Values:
        """A worker's part of the state; for a table with several copies, one shard."""
        found: Values = {}
        for value, leaf in zip(self._graph.state.inputs, leaves, strict=True):
            if value.side in worker.copies:
                found[value.id] = (
                    leaf[worker.copies[value.side]] if self._divided(value.side) else leaf
                )
        return found

    def _divided(self, side: Side) -> bool:
        """Whether the copies of a side hold different parts of its state."""
        return side in self._graph.tables and self._plan.copies_of(side) > 1

    def _copied(self, own: Values) -> Values:
        """Copies the arrays of tables: programs donate these, and the caller keeps its own."""
        held = [v for v in self._graph.state.inputs if v.id in own and v.side in self._graph.tables]
        return own | numbered(held, [jnp.copy(leaf) for leaf in leaves_of(own, held)])

    def refill(self, data: Sequence[Leaf]) -> None:
        """Replaces the recorded steps that iterations sample."""
        home = self._workers.home
        devices = [jax.devices()[i] for i in self._plan.worker(home.name).devices]
        if len(devices) > 1:
            mesh = mesh_of(devices)
            data = [replicated(leaf, mesh) for leaf in data]
        elif self._workers.programs.many_devices:
            data = [to_device(_array(leaf), devices[0]) for leaf in data]
        home.held |= numbered([self._graph.state.inputs[i] for i in self._graph.data], data)

    def set_up(self, worker: RunningWorker, attempt: int) -> Callable[[], None]:
        """Starts to set up a worker: its process with its last saved state, and its environments.

        Host environments begin new episodes. The returned function waits until this is done.
        """
        keys = self._episode_keys(worker, attempt)
        if worker.away is not None:
            coming = worker.away.begin(self._saved[worker.name] | self._actor_held(worker), keys)
            return lambda: self._heard(worker, coming())
        if keys is not None:
            leaves = leaves_of(worker.held, self._graph.actor.inputs)
            actor = self._graph.actor.tree.unflatten(leaves)
            actor_envs = self._workers.programs.envs_of.get(worker.name)
            begun = begin_episodes(self._env, actor_envs, actor, keys)
            self._keep_actor(worker, jax.tree.leaves(begun))
        return lambda: None

    def _episode_keys(self, worker: RunningWorker, attempt: int) -> jax.Array | None:
        """The keys [B] for new episodes of a worker's environments; None if it does not act."""
        copy = self.acts(worker)
        if copy is None or self._keys is None:
            return None
        keys = self._keys[self._envs(copy)]
        if attempt:
            # Otherwise a restarted environment would replay the episodes before its failure.
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys, 1_000_000 + attempt)
        return keys

    def _actor_held(self, worker: RunningWorker) -> Values:
        if self.acts(worker) is None:
            return {}
        return {value.id: worker.held[value.id] for value in self._graph.actor.inputs}

    def _heard(self, worker: RunningWorker, held: Values) -> None:
        """Stores the actor state that a worker in another process has reported."""
        if self.acts(worker) is not None:
            self._keep_actor(worker, leaves_of(held, self._graph.actor.inputs))

    def _keep_actor(self, worker: RunningWorker, leaves: list[Leaf]) -> None:
        self._set_actor(worker, leaves)
        copy = self.acts(worker)
        assert copy is not None
        self.copies[copy] = leaves

    def _set_actor(self, worker: RunningWorker, leaves: list[Leaf]) -> None:
        number = self._plan.worker(worker.name).devices[0]
        if self._workers.programs.many_devices and worker.away is None:
            leaves = [to_device(x, jax.devices()[number]) for x in map(_array, leaves)]
        worker.held |= numbered(self._graph.actor.inputs, leaves)

    def whole(self, leaves: Sequence[Leaf | None]) -> object:
        """The whole state: the home side's `leaves`, and the current parts of other sides.

        It is consistent only while no turn is running.
        """
        home, parts = self._graph.home, dict[Side, list[Values]]()
        kept = {value.side for value in self._graph.state.inputs}
        for side, workers in self._hosts.items():
            if side != home and side in kept:
                parts[side] = [self._held_now(worker) for worker in workers]
        present = [
            leaf if value.side == home else self._joined(value, parts[value.side])
            for value, leaf in zip(self._graph.state.inputs, leaves, strict=True)
        ]
        return self._graph.state.tree.unflatten(present)

    def _joined(self, value: Value, parts: list[Values]) -> Leaf:
        """The whole of a value, of which the copies of its side hold equal or different parts."""
        leaves = [leaf for part in parts for leaf in leaves_of(part, [value])]
        return jnp.stack(list(map(_array, leaves))) if self._divided(value.side) else leaves[0]

    def _held_now(self, worker: RunningWorker) -> Values:
        """The current state of a worker; if it is in another process, also saves it.

        Raises `WorkerLost` if that process is gone and a stop was requested: its part of the last
        checkpoint would not fit the rest of the state.
        """
        if worker.away is None:
            return worker.all_held()
        deadline = time.monotonic() + AGAIN_SECONDS
        while True:
            try:
                held = worker.away.held()
                break
            except WorkerLost:  # its own thread restarts it, if it has more turns
                if self._stop:  # nothing restarts it: what it held later is lost
                    raise
                if time.monotonic() > deadline:
                    return self._saved[worker.name]
                time.sleep(LOOK_SECONDS)
        # Arrays from another process are numpy arrays: convert them once, here.
        own = [value for value in self._graph.state.inputs if value.id in held]
        saved = numbered(own, [_array(leaf) for leaf in leaves_of(held, own)])
        self._saved[worker.name] = saved
        return saved

    def actor(self, copies: list[list[Leaf]]) -> ActorState:
        """Joins the actors' state of all copies."""
        if len(copies) == 1:
            return self._graph.actor.tree.unflatten(copies[0])
        # The copies may act on different devices, and concatenate needs one.
        device = jax.local_devices()[0]
        columns = zip(*copies, strict=True)
        leaves = [jnp.concatenate([to_device(_array(x), device) for x in c]) for c in columns]
        return self._graph.actor.tree.unflatten(leaves)


def _array(leaf: Leaf) -> jax.Array:
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
