"""An unroll whose environments step on the host: a lean Python loop round two compiled calls.

What the trajectory's readers use is written row by row into numpy buffers, which the learner's
program takes as they are. A set of buffers is written again only after it was released: while the
learner still reads one, the next unroll fills another.
"""

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from dovetail.graph.ir import Graph, Unroll, Value
from dovetail.graph.unroll import ActorState, Episodes
from dovetail.runtime.acting import Acting
from dovetail.runtime.bundles import Slab, Values
from dovetail.runtime.placing import Device, to_device
from dovetail.runtime.stage import Stage
from dovetail.runtime.watch import Watch
from dovetail.telemetry.spans import COMPUTE, Track
from dovetail.trajectory import Timestep, Trajectory


class Rows:
    """Buffers for one unroll, with a view of every row made beforehand."""

    def __init__(self, unroll: Unroll, slab: Slab | None) -> None:
        self.memory, arrays = (None, {}) if slab is None else slab.buffers()
        """What the buffers lie in, if in one piece."""
        written = {value.id for value in written_values(unroll)}
        self.trajectory: Trajectory = unroll.trajectory_tree.unflatten(
            [
                arrays[value.id]
                if value.id in arrays
                else np.zeros(value.shape, value.dtype)
                if value.id in written
                else np.broadcast_to(np.zeros((), value.dtype), value.shape)
                for value in unroll.trajectory
            ]
        )
        live = unroll.trajectory_tree.unflatten(unroll.live)
        self.observations = [
            jax.tree.map(lambda buffer, t=t: buffer[t], self.trajectory.observation)
            for t in range(unroll.length)
        ]
        self.seen: list[list[np.ndarray]] = []
        self.begins: list[list[np.ndarray]] = []
        self.next_observation = _kept(self.trajectory.next_observation, live.next_observation)
        extras = [row for _, row in _kept(self.trajectory.extras, live.extras)]
        self.made = [*jax.tree.leaves(self.trajectory.action), *extras]
        self.carry = _kept(self.trajectory.carry, live.carry)
        self.last = _kept(self.trajectory.last, live.last)
        self.bootstrap = _kept(self.trajectory.bootstrap, live.bootstrap)

    def show(self, acting: Acting) -> None:
        """Prepares what actors see of each row."""
        self.seen = [
            list(compress(jax.tree.leaves(row), acting.observed)) for row in self.observations
        ]
        firsts: Any = self.trajectory.first
        self.begins = [[first] if acting.begun else [] for first in firsts]
        self.keeper = acting.keeper(self.made)


ALWAYS = frozenset({"observation", "action", "reward", "terminated", "truncated", "first", "valid"})
"""Fields that the loop itself reads or writes, whoever else does."""


def leaf_fields(unroll: Unroll) -> list[str]:
    """The field of `Trajectory` to which each leaf belongs."""
    numbered = unroll.trajectory_tree.unflatten(range(len(unroll.trajectory)))
    return [name for name in Trajectory._fields for _ in jax.tree.leaves(getattr(numbered, name))]


def written_values(unroll: Unroll) -> list[Value]:
    """The values of the trajectory that are written: those that somebody reads."""
    leaves = zip(unroll.trajectory, unroll.live, leaf_fields(unroll), strict=True)
    return [value for value, live, name in leaves if live or name in ALWAYS]


def _kept(tree: Any, live: Any) -> list[tuple[int, np.ndarray]]:
    """The leaves that somebody reads, each with its position."""
    flags = zip(jax.tree.leaves(tree), jax.tree.leaves(live), strict=True)
    return [(i, leaf) for i, (leaf, is_live) in enumerate(flags) if is_live]


class Compiled:
    """The compiled calls of an unroll with host environments, for all copies of the actor."""

    def __init__(self, unroll: Unroll) -> None:
        live: Trajectory = unroll.trajectory_tree.unflatten(unroll.live)
        observations = len(jax.tree.leaves(live.observation))
        self.acting = Acting(unroll, jax.tree.leaves(live.extras), observations)
        self.bootstrap: Callable[..., Any] | None = None
        if unroll.bootstrap is not None:
            assert unroll.bootstrap.program is not None
            value = jaxpr_as_fun(unroll.bootstrap.program)
            self.bootstrap = jax.jit(
                lambda inputs, carry, at: value(*inputs, *jax.tree.leaves((carry, at)))
            )


class HostUnroll:
    """Runs one unroll node with environments on the host, in the actor's own thread."""

    def __init__(
        self,
        unroll: Unroll,
        graph: Graph,
        compiled: Compiled,
        stage: Stage,
        watch: Watch,
        track: Track,
        device: Device | None = None,
    ) -> None:
        self.name = unroll.name
        self.slab = Slab.of(written_values(unroll))
        """How its buffers lie in one piece of memory, if they do."""
        self._track = track
        self.seconds = {f"{unroll.name}.act": 0.0, f"{unroll.name}.step": 0.0}
        self._unroll = unroll
        self._graph = graph
        self._stage = stage
        self._watch = watch
        self._device = device
        self._free: deque[Rows] = deque()
        self._never = np.zeros(graph.actor_envs, np.bool_)
        self._began = 0.0
        self._acting, self._bootstrap = compiled.acting, compiled.bootstrap

    def can_warm_up(self, values: Values) -> bool:
        """Whether everything that acting takes is there before the iteration begins."""
        return all(v.id in values for v in self._unroll.inputs + self._unroll.actor_inputs)

    def warm_up(self, values: Values) -> None:
        """Compiles the acting programs by one call of each; nothing is kept of it."""
        actor = self._actor(values)
        inputs = self._taken(values)
        acting, rows = self._acting, self._rows()
        weights = acting.weights(self._unroll.act_inputs(inputs))
        reward = [_as_host(actor.timestep.reward)] if acting.rewarded else []
        last = [*reward, *self._begins(actor, rows)[0]]
        words = self._words(actor)
        acting.call(weights, actor.carry, rows.seen[0], last, words[0])
        self._warm_up_bootstrap(inputs, actor)
        self._free.append(rows)

    def _warm_up_bootstrap(self, inputs: list[Any], actor: ActorState) -> None:
        if self._bootstrap is not None:
            at = jax.tree.map(_as_host, actor.timestep)
            self._bootstrap(self._unroll.bootstrap_inputs(inputs), actor.carry, at)

    def run(self, values: Values) -> Callable[[], None]:
        """`length` steps of every environment; puts the trajectory and the actors' state.

        Returns what to call when the trajectory has been read and may be written again.
        """
        unroll, began, before = self._unroll, time.perf_counter(), sum(self.seconds.values())
        actor = self._actor(values)
        rows = self._free.pop() if self._free else self._rows()
        self._watch.stepping = True
        self._began = began
        after = self._steps(self._taken(values), actor, rows)
        episodes, after = _count_episodes(rows.trajectory, after)
        made = [*jax.tree.leaves(rows.trajectory), *jax.tree.leaves(after), *episodes]
        values.update(zip((v.id for v in unroll.outputs), made, strict=True))
        if self.slab is not None:
            values[self.slab.key] = rows.memory
        halves = sum(self.seconds.values()) - before
        rest = time.perf_counter() - began - halves
        self._track.add(COMPUTE, f"{self.name}.record", began + halves, rest)
        return partial(self._free.append, rows)

    def _rows(self) -> Rows:
        rows = Rows(self._unroll, self.slab)
        rows.show(self._acting)
        return rows

    def _taken(self, values: Values) -> list[Any]:
        inputs = [values[v.id] for v in self._unroll.inputs]
        return inputs if self._device is None else [to_device(x, self._device) for x in inputs]

    def _actor(self, values: Values) -> ActorState:
        return self._graph.actor.tree.unflatten([values[v.id] for v in self._unroll.actor_inputs])

    def _steps(self, inputs: list[Any], actor: ActorState, rows: Rows) -> ActorState:
        """The loop. Observations go straight into their row, and actors see that row."""
        unroll, stepper, act = self._unroll, self._stage.stepper, self._acting.call
        assert stepper is not None
        stepper.state = actor.env
        watch = self._watch
        length, clock, some = unroll.length, time.perf_counter, np.count_nonzero
        weights, rewarded = self._acting.weights(unroll.act_inputs(inputs)), self._acting.rewarded
        words = self._words(actor)
        observations, seen, begins = rows.observations, rows.seen, self._begins(actor, rows)
        buffers: Any = rows.trajectory
        rewards, terminations, truncations = buffers.reward, buffers.terminated, buffers.truncated
        valid, firsts, keep = buffers.valid, buffers.first, rows.keeper.put
        carry, reward = actor.carry, _as_host(actor.timestep.reward)
        number = _as_host(actor.timestep.number)
        start = int(np.asarray(actor.step)[0])
        _copy(actor.timestep.observation, observations[0])
        for i, buffer in rows.carry:
            buffer[0] = jax.tree.leaves(carry)[i]
        for _, buffer in rows.bootstrap:
            buffer[...] = 0
        firsts[0] = actor.timestep.first
        acting = stepping = 0.0
        after: Any = None
        began = clock()
        for t in range(length):
            last = [reward, *begins[t]] if rewarded else begins[t]
            made, carry = act(weights, carry, seen[t], last, words[t])
            action = keep(t, made)
            between = clock()
            acting += between - began
            after = stepper.step(action, start + t)
            began = watch.since = clock()
            stepping += began - between
            reward = after.reward
            rewards[t] = reward
            terminations[t] = after.terminated
            truncations[t] = after.truncated
            valid[t] = after.valid
            for i, buffer in rows.next_observation:
                buffer[t] = jax.tree.leaves(after.next_observation)[i]
            if rows.bootstrap and some(after.truncated):
                final = _timestep(after.next_observation, reward, self._never, number)
                self._write_bootstrap(rows, t, inputs, carry, final, after.truncated)
            if (rewarded or t + 1 == length) and some(after.first):
                reward = np.where(after.first, np.float32(0), reward)
            if t + 1 < length:
                _copy(after.observation, observations[t + 1])
                firsts[t + 1] = after.first
        rows.keeper.finish()
        observation = jax.tree.map(np.copy, after.observation)
        following = _timestep(observation, reward, np.copy(after.first), number)
        for i, buffer in rows.last:
            buffer[0] = jax.tree.leaves(following)[i]
        if rows.bootstrap:
            ongoing = np.logical_not(truncations[-1])
            self._write_bootstrap(rows, length - 1, inputs, carry, following, ongoing)
        self._note(acting, stepping)
        step = np.asarray(actor.step) + np.int32(length)
        return actor._replace(env=stepper.state, timestep=following, carry=carry, step=step)

    def _words(self, actor: ActorState) -> list[list[np.ndarray]]:
        """For each step what acting takes of the keys."""
        if not self._acting.random:
            return [[]] * self._unroll.length
        return [[row] for row in self._acting.words(actor.keys, int(np.asarray(actor.step)[0]))]

    def _begins(self, actor: ActorState, rows: Rows) -> list[list[np.ndarray]]:
        """For each step what acting takes of beginnings and of the environments' numbers."""
        if not self._acting.numbered:
            return rows.begins
        number = _as_host(actor.timestep.number)
        return [[*begins, number] for begins in rows.begins]

    def _note(self, acting: float, stepping: float) -> None:
        """The two halves of an unroll, each as if it had been done in one go."""
        name, length, began = self.name, self._unroll.length, self._began
        self.seconds[f"{name}.act"] += acting
        self.seconds[f"{name}.step"] += stepping
        items = length * self._graph.actor_envs
        self._track.add(COMPUTE, f"{name}.act", began, acting, length, items=items)
        self._track.add(COMPUTE, f"{name}.step", began + acting, stepping, length, items=items)

    def _write_bootstrap(
        self, rows: Rows, t: int, inputs: list[Any], carry: Any, at: Timestep, mask: np.ndarray
    ) -> None:
        assert self._bootstrap is not None
        found = self._bootstrap(self._unroll.bootstrap_inputs(inputs), carry, at)
        for i, buffer in rows.bootstrap:
            chosen = mask.reshape(mask.shape + (1,) * (found[i].ndim - 1))
            buffer[t] = np.where(chosen, found[i], buffer[t])


def _timestep(observation: Any, reward: Any, first: Any, number: Any) -> Timestep:
    """What actors see, as numpy arrays."""
    return Timestep(observation, reward, first, number)


def _copy(tree: Any, rows: Any) -> None:
    """Copies every leaf into its row; a bare array, the common case, without walking a tree."""
    if isinstance(rows, np.ndarray):
        rows[...] = tree
        return
    for row, leaf in zip(jax.tree.leaves(rows), jax.tree.leaves(tree), strict=True):
        row[...] = leaf


def _as_host(leaf: Any) -> Any:
    """A numpy array, but for random keys, which stay as they are."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return leaf if is_key or isinstance(leaf, np.ndarray) else np.asarray(leaf)


def _count_episodes(rows: Trajectory, actor: ActorState) -> tuple[Episodes, ActorState]:
    """Episodes that ended in these rows, and the running totals of those that go on."""
    done = rows.terminated | rows.truncated
    reward, valid = np.asarray(rows.reward), np.asarray(rows.valid)
    returns, lengths = np.asarray(actor.episode_return), np.asarray(actor.episode_length)
    if not np.count_nonzero(done):
        returns, lengths = returns + reward.sum(0), lengths + valid.sum(0, np.int32)
        none = Episodes(np.zeros_like(lengths), np.zeros_like(returns), np.zeros_like(lengths))  # type: ignore[arg-type]
        return none, actor._replace(episode_return=returns, episode_length=lengths)
    count = done.sum(0).astype(np.int32)
    any_ended = count > 0
    # a row belongs to an episode that ended if its environment is done there or later
    ended = np.logical_or.accumulate(done[::-1])[::-1]
    ongoing = ~ended
    # products and then sums: numpy's sums over a mask take several times as long
    ended_returns = np.where(any_ended, returns, 0) + (reward * ended).sum(0)
    ended_lengths = np.where(any_ended, lengths, 0) + (valid & ended).sum(0, np.int32)
    returns = np.where(any_ended, 0, returns) + (reward * ongoing).sum(0)
    lengths = np.where(any_ended, 0, lengths) + (valid & ongoing).sum(0, np.int32)
    episodes = Episodes(count, ended_returns, ended_lengths)  # type: ignore[arg-type]
    return episodes, actor._replace(episode_return=returns, episode_length=lengths)
