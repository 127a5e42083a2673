"""An unroll with host environments: a lean Python loop that alternates acting and stepping.

This module steps the environments of its own thread, all at once; `batched_unroll.py` handles
groups of environments on other workers. A set of buffers is reused only after it was released:
while the learner reads one, the next unroll fills another.
"""

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import jax
import numpy as np

from dovetail.graph.ir import Graph, Unroll
from dovetail.graph.unroll import ActorState, EpisodeSums, info_sums
from dovetail.runtime.arrays import Leaf, Values, leaves_of, numbered
from dovetail.runtime.buffers import HostTrajectory, UnrollBuffers, as_host, written_values
from dovetail.runtime.devices import Device, to_device
from dovetail.runtime.environments import ActorEnvironments, Stepper
from dovetail.runtime.heartbeat import Watch
from dovetail.runtime.packing import Slab
from dovetail.runtime.turns import Compiled, Turns
from dovetail.telemetry.spans import COMPUTE, Track


class UnrollEnvironments(Protocol):
    """The loop's interface to the environments of one unroll."""

    def warm_up(self) -> None:
        """Acts once to compile; the result is discarded."""
        ...

    def act(self) -> bool:
        """Acts for the ready environments; False if all have taken all steps."""
        ...

    def step(self) -> None:
        """Steps, or waits for steps on other workers, and records the results."""
        ...


class OwnEnvironments:
    """Environments that this thread steps, all at once. Acting reads directly from the buffers."""

    def __init__(self, turns: Turns, compiled: Compiled, stepper: Stepper) -> None:
        acting = compiled.acting
        self._turns, self._stepper = turns, stepper
        self._call, self._keep = acting.call, turns.rows.writer.put
        [self._share] = turns.rows.shares
        self._carries = compiled.carries
        # Build the argument lists of all steps here, to keep the loop lean.
        reward = [turns.reward] if acting.rewarded else []
        number = [turns.number] if acting.numbered else []
        begins = [[first] if acting.begun else [] for first in self._share.firsts]
        self._last = [[*reward, *first, *number] for first in begins]
        words = turns.words
        # Each step passes its row of the words, a view that is made here once.
        self._words = [[]] * turns.length if words is None else [[row] for row in words]
        self._t = 0
        self._action = np.zeros(0)

    def warm_up(self) -> None:
        """Acts for all of them."""
        self.act()

    def act(self) -> bool:
        """Acts for all of them."""
        turns, t, share = self._turns, self._t, self._share
        if t == turns.length:
            turns.rows.writer.finish()
            return False
        if self._carries and np.count_nonzero(share.firsts[t]):
            turns.reset(share.firsts[t])
        # Acting reads the buffers that `record` has filled, without a copy.
        made, turns.carry = self._call(
            turns.weights, turns.carry, share.seen[t], self._last[t], self._words[t]
        )
        self._action = self._keep(t, made)
        return True

    def step(self) -> None:
        """Steps all of them."""
        turns, t = self._turns, self._t
        turns.record(self._share, t, self._stepper.step(self._action, turns.start + t))
        self._t = t + 1


class HostUnroll:
    """Runs one unroll node with host environments, in the actor's thread."""

    def __init__(
        self,
        unroll: Unroll,
        graph: Graph,
        compiled: Compiled,
        actor_envs: ActorEnvironments,
        watch: Watch,
        track: Track,
        device: Device | None = None,
    ) -> None:
        self.name = unroll.name
        self.slab = Slab.of(written_values(unroll))
        """The layout of its buffers in one block; None if they are too large."""
        self._track = track
        self.seconds = {f"{unroll.name}.act": 0.0, f"{unroll.name}.step": 0.0}
        self._unroll = unroll
        self._graph = graph
        self._actor_envs = actor_envs
        self._watch = watch
        self._device = device
        self._free: deque[UnrollBuffers] = deque()
        self._began = 0.0
        self._compiled, self._acting = compiled, compiled.acting
        self._parts = [group.part for group in actor_envs.groups] or [slice(0, graph.actor_envs)]

    def can_warm_up(self, values: Values) -> bool:
        """Whether all inputs of acting exist before the iteration begins."""
        return all(v.id in values for v in self._unroll.inputs + self._unroll.actor_inputs)

    def warm_up(self, values: Values) -> None:
        """Compiles the acting programs by calling each once; the results are discarded."""
        actor, inputs, rows = self._actor(values), self._taken(values), self._rows()
        turns = Turns(self._unroll, self._compiled, inputs, actor, rows)
        if self._compiled.carries:
            turns.reset(np.zeros(self._graph.actor_envs, np.bool_))
        if self._compiled.bootstrap is not None:
            at = jax.tree.map(as_host, actor.timestep)
            self._compiled.bootstrap(self._unroll.bootstrap_inputs(inputs), turns.carry, at)
        self._environments(turns).warm_up()
        self._free.append(rows)

    def run(self, values: Values) -> Callable[[], None]:
        """Runs `length` steps; writes the trajectory and the actors' state to `values`.

        Returns a function that releases the trajectory's buffers for reuse.
        """
        unroll, began, before = self._unroll, time.perf_counter(), sum(self.seconds.values())
        actor = self._actor(values)
        rows = self._free.pop() if self._free else self._rows()
        self._watch.stepping = True
        self._began = began
        after = self._steps(self._taken(values), actor, rows)
        # Once per unroll over [T, B]: cheaper than at every step.
        episodes, after = _count_episodes(rows.trajectory, after)
        if rows.info is not None:
            done = rows.trajectory.terminated | rows.trajectory.truncated
            sums = info_sums(rows.info, done, rows.trajectory.valid)
            episodes = episodes._replace(info=sums)
        made = jax.tree.leaves((rows.trajectory, after, episodes))
        values |= numbered(unroll.outputs, made)
        if self.slab is not None and rows.memory is not None:
            values[self.slab.key] = rows.memory
        halves = sum(self.seconds.values()) - before
        rest = time.perf_counter() - began - halves
        self._track.add(COMPUTE, f"{self.name}.record", began + halves, rest)
        return partial(self._free.append, rows)

    def _rows(self) -> UnrollBuffers:
        return UnrollBuffers(self._unroll, self.slab, self._acting, self._parts)

    def _taken(self, values: Values) -> list[Leaf]:
        inputs = leaves_of(values, self._unroll.inputs)
        return inputs if self._device is None else [to_device(x, self._device) for x in inputs]

    def _actor(self, values: Values) -> ActorState:
        return self._graph.actor.tree.unflatten(leaves_of(values, self._unroll.actor_inputs))

    def _steps(self, inputs: list[Leaf], actor: ActorState, rows: UnrollBuffers) -> ActorState:
        """The loop over steps; times acting and stepping."""
        turns = Turns(self._unroll, self._compiled, inputs, actor, rows)
        self._actor_envs.load(actor.env)
        environments = self._environments(turns)
        act, step = environments.act, environments.step
        clock, watch = time.perf_counter, self._watch
        acting = stepping = 0.0
        began = clock()
        while act():
            between = clock()
            acting += between - began
            step()
            began = watch.since = clock()
            stepping += began - between
        after = turns.finish(self._actor_envs.state())
        self._note(acting, stepping)
        return after

    def _environments(self, turns: Turns) -> UnrollEnvironments:
        """The environments, at the start of an unroll."""
        assert self._actor_envs.stepper is not None
        return OwnEnvironments(turns, self._compiled, self._actor_envs.stepper)

    def _note(self, acting: float, stepping: float) -> None:
        """Records the two halves of an unroll, each as one contiguous span."""
        name, length, began = self.name, self._unroll.length, self._began
        self.seconds[f"{name}.act"] += acting
        self.seconds[f"{name}.step"] += stepping
        items = length * self._graph.actor_envs
        self._track.add(COMPUTE, f"{name}.act", began, acting, length, items=items)
        self._track.add(COMPUTE, f"{name}.step", began + acting, stepping, length, items=items)


def _count_episodes(rows: HostTrajectory, actor: ActorState) -> tuple[EpisodeSums, ActorState]:
    """The episodes that ended in these rows, and the running totals of ongoing ones."""
    done = rows.terminated | rows.truncated
    reward, valid = rows.reward, rows.valid
    returns, lengths = np.asarray(actor.episode_return), np.asarray(actor.episode_length)
    if not np.count_nonzero(done):  # the common case with long episodes
        returns, lengths = returns + reward.sum(0), lengths + valid.sum(0, np.int32)
        zeros = np.zeros_like(lengths), np.zeros_like(returns), np.zeros_like(lengths)
        episodes = EpisodeSums._make((*zeros, ()))
        return episodes, actor._replace(episode_return=returns, episode_length=lengths)
    count = done.sum(0).astype(np.int32)
    any_ended = count > 0
    # A row belongs to a finished episode if its environment is done there or later.
    ended = np.logical_or.accumulate(done[::-1])[::-1]
    ongoing = ~ended
    # Multiply, then sum: numpy's masked sums take several times as long.
    ended_returns = np.where(any_ended, returns, 0) + (reward * ended).sum(0)
    ended_lengths = np.where(any_ended, lengths, 0) + (valid & ended).sum(0, np.int32)
    returns = np.where(any_ended, 0, returns) + (reward * ongoing).sum(0)
    lengths = np.where(any_ended, 0, lengths) + (valid & ongoing).sum(0, np.int32)
    episodes = EpisodeSums._make((count, ended_returns, ended_lengths, ()))
    return episodes, actor._replace(episode_return=returns, episode_length=lengths)
