"""An unroll whose environments step on other workers: acting is batched across them.

A group of environments is ready when its step is done. As soon as enough groups are ready, or after
a time limit, one call of acting serves them while the others keep stepping. Each environment acts
with its own key at its own step, so the composition of batches does not change the result. Carries
stay on the device: a call gathers those of its slots and scatters them back.
"""

import math
import time
from collections import deque
from itertools import compress

import jax
import numpy as np

from dovetail.graph.ir import Graph, Unroll
from dovetail.runtime.buffers import BufferPart
from dovetail.runtime.devices import Device
from dovetail.runtime.environments import ActorEnvironments
from dovetail.runtime.heartbeat import Watch
from dovetail.runtime.host_unroll import HostUnroll, UnrollEnvironments
from dovetail.runtime.turns import Compiled, Turns
from dovetail.telemetry.spans import Track

LONGEST_WAIT = 1.0
"""Seconds without a ready environment after which a port is asked for its error."""


class BatchedUnroll(HostUnroll):
    """Runs one unroll node for environments on other workers."""

    def __init__(
        self,
        unroll: Unroll,
        graph: Graph,
        compiled: Compiled,
        actor_envs: ActorEnvironments,
        watch: Watch,
        track: Track,
        batch: int,
        seconds: float | None,
        device: Device | None = None,
    ) -> None:
        super().__init__(unroll, graph, compiled, actor_envs, watch, track, device)
        self.calls = self.served = 0
        """Number of calls of acting, and of environments served by them."""
        # Infinity needs no special case: the deadline is then never reached.
        self.limit = math.inf if seconds is None else seconds
        """Seconds that ready groups wait for a full batch."""
        self.groups_per_call = batch // (self._parts[0].stop - self._parts[0].start)
        self._batch = batch

    def _environments(self, turns: Turns) -> UnrollEnvironments:
        batch = ActBatch(turns, self._compiled, self._batch)
        return Groups(turns, self._actor_envs, batch, self)


class ActBatch:
    """The input buffers of one call of acting: rows of some environments, and padding."""

    def __init__(self, turns: Turns, compiled: Compiled, size: int) -> None:
        acting = compiled.acting
        self.acting, self._turns, self._carries = acting, turns, compiled.carries
        self._all = len(turns.reward)
        # Buffers of a fixed size: every call has the same shapes, so nothing recompiles.
        rows = turns.rows.trajectory
        seen = compress(jax.tree.leaves(rows.observation), acting.observed)
        self._seen = [_room(size, leaf[0]) for leaf in seen]
        self._reward = [_room(size, turns.reward)] if acting.rewarded else []
        self._first = [_room(size, rows.first[0])] if acting.begun else []
        self._number = [_room(size, turns.number)] if acting.numbered else []
        self._words = [] if turns.words is None else [_room(size, turns.words[0])]
        self._slots = np.zeros(size, np.int32)

    def act(self, shares: list[BufferPart], steps: list[int]) -> list[np.ndarray]:
        """Acts for the environments of `shares`, each at its own step.

        `shares` have at most as many environments as a batch; the rest of it is padding. Returns
        the leaves of the results; their first rows belong to these environments, in order.
        """
        turns, end, begun = self._turns, 0, False
        first = np.zeros(self._all, np.bool_)
        self._slots[...] = self._all  # out of range: padding rows are dropped
        for share, t in zip(shares, steps, strict=True):
            own = slice(end, end := end + share.part.stop - share.part.start)
            self._fill(share, t, own)
            if self._carries and np.count_nonzero(share.firsts[t]):
                first[share.part], begun = share.firsts[t], True
        if begun:
            turns.reset(first)
        last = [*self._reward, *self._first, *self._number]
        if self._carries:
            made, turns.carry = self.acting.call_slots(
                turns.weights, turns.carry, self._slots, self._seen, last, self._words
            )
        else:
            made, _ = self.acting.call(turns.weights, turns.carry, self._seen, last, self._words)
        return self.acting.unpack(made)

    def _fill(self, share: BufferPart, t: int, own: slice) -> None:
        """Copies the inputs of one group at step `t` into the rows `own` of the buffers."""
        turns, part = self._turns, share.part
        self._slots[own] = range(part.start, part.stop)
        for buffer, leaf in zip(self._seen, share.seen[t], strict=True):
            buffer[own] = leaf
        for buffer in self._reward:
            buffer[own] = turns.reward[part]
        for buffer in self._first:
            buffer[own] = share.firsts[t]
        for buffer in self._number:
            buffer[own] = turns.number[part]
        for buffer in self._words:
            assert turns.words is not None
            buffer[own] = turns.words[t, part]


def _room(size: int, rows: np.ndarray) -> np.ndarray:
    """Zeros [size, …] for rows like these."""
    return np.zeros((size, *rows.shape[1:]), rows.dtype)


class Groups:
    """Environments on other workers; each group is at its own step."""

    def __init__(
        self, turns: Turns, actor_envs: ActorEnvironments, batch: ActBatch, unroll: BatchedUnroll
    ) -> None:
        self._turns, self._actor_envs, self._batch, self._unroll = turns, actor_envs, batch, unroll
        self._shares = turns.rows.shares
        self._steps = [0] * len(actor_envs.groups)
        self._ready, self._flying = deque(range(len(actor_envs.groups))), set[int]()

    def warm_up(self) -> None:
        """Acts for the first group without sending the action."""
        self._batch.act(self._shares[:1], [0])

    def act(self) -> bool:
        """Acts for a batch of ready groups and sends their actions; False if none is ready."""
        ready, steps, unroll = self._ready, self._steps, self._unroll
        if not ready:
            return False
        chosen = [ready.popleft() for _ in range(min(unroll.groups_per_call, len(ready)))]
        shares = [self._shares[g] for g in chosen]
        leaves = self._batch.act(shares, [steps[g] for g in chosen])
        end = 0
        for g, share in zip(chosen, shares, strict=True):
            begin, end = end, end + share.part.stop - share.part.start
            own = [leaf[begin:end] for leaf in leaves]
            for row, leaf in zip(self._turns.rows.made, own, strict=True):
                row[steps[g], share.part] = leaf
            # Sent group by group, so that the first ones step while the rest are still written.
            port = self._actor_envs.groups[g].port
            port.send(self._batch.acting.action(own), self._turns.start + steps[g])
        self._flying.update(chosen)
        unroll.calls += 1
        unroll.served += end
        return True

    def step(self) -> None:
        """Waits until a batch is ready, or until the limit passes with some groups ready.

        Raises the error of a group whose environments failed.
        """
        ready, flying, groups = self._ready, self._flying, self._actor_envs.groups
        heard, deadline = self._actor_envs.heard, time.perf_counter() + self._unroll.limit
        while flying and len(ready) < min(self._unroll.groups_per_call, len(ready) + len(flying)):
            # With no group ready there is nobody to serve, so the limit does not apply.
            left = deadline - time.perf_counter() if ready else LONGEST_WAIT
            # One release of the bell may stand for a group already recorded; then `done` is empty
            # and the loop waits again.
            if left > 0 and heard(True, min(left, LONGEST_WAIT)):
                done = [g for g in flying if groups[g].port.ready()]
            elif ready and left <= LONGEST_WAIT:
                return
            else:
                done = [min(flying)]  # its port has a timeout and raises the error
            for g in done:
                self._turns.record(self._shares[g], self._steps[g], groups[g].port.receive())
                flying.discard(g)
                self._steps[g] += 1
                if self._steps[g] < self._turns.length:
                    ready.append(g)
