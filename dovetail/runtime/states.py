"""The learner's and the actors' state, as workers hold them: given out, and put together again."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.envs.resolve import Env
from dovetail.graph.ir import Graph, Side
from dovetail.graph.unroll import ActorState
from dovetail.plan.ir import Plan
from dovetail.runtime.placing import mesh_of, replicated, to_device
from dovetail.runtime.schedule import Crew
from dovetail.runtime.stage import begin_episodes
from dovetail.runtime.worker import Worker


class States:
    """What the workers of a crew hold."""

    def __init__(self, graph: Graph, plan: Plan, env: Env, crew: Crew) -> None:
        self._graph, self._plan, self._env, self._crew = graph, plan, env, crew
        self.copies: list[list[Any]] = []
        """The leaves of the actor's state, of each copy, as the last update knew it."""
        self._keys: Any = None
        self._replay = [v.id for v in graph.state.inputs if v.side is Side.REPLAY]
        self._replay_parts: dict[str, list[Any]] = {}
        """By worker, its part of the replay as it was at the start, or at the last checkpoint."""

    def split(self, actor: ActorState, episode_keys: jax.Array) -> None:
        """Sets the state of each copy of the actor, and by which keys episodes begin."""
        self._keys = episode_keys
        parts = [actor]
        if self._plan.actors > 1:
            envs = [self._envs(copy) for copy in range(self._plan.actors)]
            parts = [jax.tree.map(lambda x, own=own: x[own], actor) for own in envs]
        self.copies = [jax.tree.leaves(part) for part in parts]

    def _envs(self, copy: int) -> slice:
        size = self._plan.num_envs // self._plan.actors
        return slice(copy * size, (copy + 1) * size)

    def give(self, worker: Worker, state: Any) -> None:
        """Gives a worker what it holds of the learner's state, or its actor's."""
        inputs, leaves = self._graph.state.inputs, jax.tree.leaves(state)
        worker.held = {}
        if worker.errands is not None:
            self._replay_parts[worker.name] = self._part(worker.copy, leaves)
            self._give_replay(worker)
            return
        if worker is self._crew.learner:
            apart = bool(self._crew.keepers)
            own = {
                v.id: jnp.copy(x) if v.side is Side.REPLAY else x
                for v, x in zip(inputs, leaves, strict=True)
                if not apart or v.side is not Side.REPLAY
            }
            worker.hold(own)
            self.refill([own[inputs[i].id] for i in self._graph.data])
        if self.has_actor(worker):
            self._set_actor(worker, self.copies[worker.copy])

    def has_actor(self, worker: Worker) -> bool:
        """Whether a worker holds the state of an actor."""
        return worker.errands is None and (worker is not self._crew.learner or self._crew.is_one)

    def refill(self, data: Sequence[Any]) -> None:
        """Sets the recorded steps that the next iterations draw from."""
        learner = self._crew.learner
        devices = [jax.devices()[i] for i in self._plan.worker(learner.name).devices]
        if len(devices) > 1:
            mesh = mesh_of(devices)
            data = [replicated(leaf, mesh) for leaf in data]
        elif self._crew.programs.many_devices:
            data = [to_device(_array(leaf), devices[0]) for leaf in data]
        numbers = (self._graph.state.inputs[i].id for i in self._graph.data)
        learner.held |= dict(zip(numbers, data, strict=True))

    def set_up(self, worker: Worker, attempt: int) -> Callable[[], None]:
        """Begins to set a worker's environments, with new episodes on the host, or its part of the
        replay; what it returns waits until they are."""
        if worker.errands is not None:
            self._give_replay(worker)
            return lambda: None
        keys = self._keys[self._envs(worker.copy)]
        if attempt:
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys, 1_000_000 + attempt)
        leaves = [worker.held[value.id] for value in self._graph.actor.inputs]
        actor: ActorState = self._graph.actor.tree.unflatten(leaves)
        if worker.away is not None:
            coming = worker.away.begin(jax.tree.leaves(actor), keys)
            return lambda: self._keep_actor(worker, coming())
        stage = self._crew.programs.stages.get(worker.name)
        begun = begin_episodes(self._env, stage, actor, keys)
        self._keep_actor(worker, jax.tree.leaves(begun))
        return lambda: None

    def _keep_actor(self, worker: Worker, leaves: list[Any]) -> None:
        self._set_actor(worker, leaves)
        self.copies[worker.copy] = leaves

    def _set_actor(self, worker: Worker, leaves: list[Any]) -> None:
        number = self._plan.worker(worker.name).devices[0]
        if self._crew.programs.many_devices and worker.away is None:
            leaves = [to_device(x, jax.devices()[number]) for x in map(_array, leaves)]
        numbers = (value.id for value in self._graph.actor.inputs)
        worker.held |= dict(zip(numbers, leaves, strict=True))

    def _part(self, shard: int, leaves: Sequence[Any]) -> list[Any]:
        """What a worker holds of the replay's leaves: they are of all shards if there are more."""
        several, inputs = self._plan.shards > 1, self._graph.state.inputs
        kept = [x for v, x in zip(inputs, leaves, strict=True) if v.side is Side.REPLAY]
        return [leaf[shard] if several else leaf for leaf in kept]

    def _give_replay(self, worker: Worker) -> None:
        """Gives a worker its part of the replay as it last was when that was asked for."""
        part = self._replay_parts[worker.name]
        if worker.away is not None:
            worker.away.hold(part)
            return
        worker.held = {}
        worker.hold({n: jnp.copy(leaf) for n, leaf in zip(self._replay, part, strict=True)})

    def learner(self, leaves: list[Any]) -> Any:
        """The learner's state of these leaves, with what its replay holds by now: that changes in
        place, and is that of the state only while nothing goes on."""
        held = self._crew.learner.all_held()
        if self._crew.keepers:
            parts = [self._kept(worker) for worker in self._crew.keepers]
            columns = map(list, zip(*parts, strict=True))
            whole = [jnp.stack(column) if len(parts) > 1 else column[0] for column in columns]
            held = dict(zip(self._replay, whole, strict=True))
        present = [
            held[value.id] if value.side is Side.REPLAY else leaf
            for value, leaf in zip(self._graph.state.inputs, leaves, strict=True)
        ]
        return self._graph.state.tree.unflatten(present)

    def _kept(self, worker: Worker) -> list[Any]:
        """A worker's part of the replay."""
        if worker.away is not None:
            part = [_array(leaf) for leaf in worker.away.held()]
            self._replay_parts[worker.name] = part
            return part
        held = worker.all_held()
        return [held[number] for number in self._replay]

    def actor(self, copies: list[list[Any]]) -> Any:
        """The actors' state, of all copies."""
        if len(copies) == 1:
            return self._graph.actor.tree.unflatten(copies[0])
        device = jax.local_devices()[0]
        columns = zip(*copies, strict=True)
        leaves = [jnp.concatenate([to_device(_array(x), device) for x in c]) for c in columns]
        return self._graph.actor.tree.unflatten(leaves)


def _array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
