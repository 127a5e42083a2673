"""An unroll whose environments step on other workers: acting is batched across them.

Groups of environments come back when their step is done. As soon as enough of them are ready, or
after a limit, one call of acting serves those; the others go on stepping meanwhile. Each
environment acts with its own key at its own step, so how batches fall out changes no result.
"""

import math
import time
from collections import deque
from typing import Any

import jax
import numpy as np

from dovetail.graph.ir import Graph, Unroll
from dovetail.graph.unroll import ActorState
from dovetail.runtime.acting import Acting
from dovetail.runtime.host import Compiled, HostUnroll, Rows
from dovetail.runtime.placing import Device
from dovetail.runtime.stage import Group, Stage
from dovetail.runtime.watch import Watch
from dovetail.telemetry.spans import Track
from dovetail.trajectory import Timestep

LONGEST_WAIT = 1.0
"""Seconds without any environment being ready after which one is asked what is wrong."""


class BatchedUnroll(HostUnroll):
    """Runs one unroll node for environments on other workers."""

    def __init__(
        self,
        unroll: Unroll,
        graph: Graph,
        compiled: Compiled,
        stage: Stage,
        watch: Watch,
        track: Track,
        batch: int,
        seconds: float | None,
        device: Device | None = None,
    ) -> None:
        super().__init__(unroll, graph, compiled, stage, watch, track, device)
        self.calls = self.served = 0
        """Calls of acting, and the environments that they served."""
        self._limit = math.inf if seconds is None else seconds
        self._size = stage.groups[0].part.stop - stage.groups[0].part.start
        self._batch = batch
        self._per_call = batch // self._size

    def warm_up(self, values: Any) -> None:
        """Compiles by acting once for the first environments; nothing is kept of it."""
        actor, inputs = self._actor(values), self._taken(values)
        rows = self._rows()
        turn = _Turn(self._unroll, actor, rows, self._batch, self._acting)
        turn.fill(self._stage.groups[:1], [0], self._size)
        weights = self._acting.weights(self._unroll.act_inputs(inputs))
        self._acting.call(weights, *turn.arguments())
        self._warm_up_bootstrap(inputs, actor)
        self._free.append(rows)

    def _steps(self, inputs: list[Any], actor: ActorState, rows: Rows) -> ActorState:
        """Serves groups as they become ready until each has taken all its steps."""
        stage, unroll, clock = self._stage, self._unroll, time.perf_counter
        stage.load(actor.env)
        weights = self._acting.weights(unroll.act_inputs(inputs))
        for _, buffer in rows.bootstrap:
            buffer[...] = 0
        turn = _Turn(unroll, actor, rows, self._batch, self._acting)
        steps = [0] * len(stage.groups)
        ready, flying = deque(range(len(stage.groups))), set[int]()
        acting = waiting = 0.0
        while ready or flying:
            began = clock()
            self._gather(ready, flying, steps, turn, inputs)
            between = clock()
            waiting += between - began
            if not ready:
                continue
            chosen = [ready.popleft() for _ in range(min(self._per_call, len(ready)))]
            self._act(chosen, steps, turn, weights)
            flying.update(chosen)
            acting += clock() - between
            self._watch.beat()
        following = turn.following()
        for i, buffer in rows.last:
            buffer[0] = jax.tree.leaves(following)[i]
        if rows.bootstrap:
            ongoing = np.logical_not(np.asarray(rows.trajectory.truncated)[-1])
            self._write_bootstrap(
                rows, unroll.length - 1, inputs, turn.whole_carry(), following, ongoing
            )
        self._note(acting, waiting)
        step = np.asarray(actor.step) + np.int32(unroll.length)
        return actor._replace(
            env=stage.state(), timestep=following, carry=turn.whole_carry(), step=step
        )

    def _gather(
        self,
        ready: deque[int],
        flying: set[int],
        steps: list[int],
        turn: "_Turn",
        inputs: list[Any],
    ) -> None:
        """Waits until a batch is ready, or some groups are and the limit has passed."""
        heard, deadline = self._stage.heard, time.perf_counter() + self._limit
        while flying and len(ready) < min(self._per_call, len(ready) + len(flying)):
            left = deadline - time.perf_counter() if ready else LONGEST_WAIT
            if left > 0 and heard(True, min(left, LONGEST_WAIT)):
                done = [g for g in flying if self._stage.groups[g].port.ready()]
            elif ready and left <= LONGEST_WAIT:
                return
            else:
                done = [min(flying)]  # its port waits with a limit, and says what is wrong
            for g in done:
                after = self._stage.groups[g].port.receive()
                flying.discard(g)
                part = self._stage.groups[g].part
                turn.record(part, steps[g], after)
                if turn.rows.bootstrap and np.count_nonzero(after.truncated):
                    at, mask = turn.final(part, after)
                    carry = turn.whole_carry()
                    self._write_bootstrap(turn.rows, steps[g], inputs, carry, at, mask)
                steps[g] += 1
                if steps[g] < self._unroll.length:
                    ready.append(g)

    def _act(self, chosen: list[int], steps: list[int], turn: "_Turn", weights: list[Any]) -> None:
        groups = [self._stage.groups[g] for g in chosen]
        turn.fill(groups, [steps[g] for g in chosen], self._size)
        made, carry = self._acting.call(weights, *turn.arguments())
        leaves = self._acting.unpack(made)
        turn.keep(groups, [steps[g] for g in chosen], self._size, leaves, carry)
        self.calls += 1
        self.served += len(chosen) * self._size
        for i, (g, group) in enumerate(zip(chosen, groups, strict=True)):
            own = [leaf[i * self._size : (i + 1) * self._size] for leaf in leaves]
            group.port.send(self._acting.action(own), turn.start + steps[g])


class _Turn:
    """The arrays of one unroll while groups of environments are at different steps of it."""

    def __init__(
        self, unroll: Unroll, actor: ActorState, rows: Rows, batch: int, acting: Acting
    ) -> None:
        self.rows = rows
        self.start = int(np.asarray(actor.step)[0])
        self._length = unroll.length
        self._carry_tree = jax.tree.structure(actor.carry)
        self._carry = [np.array(leaf) for leaf in jax.tree.leaves(actor.carry)]
        self._reward = np.array(actor.timestep.reward)
        self._number = np.array(actor.timestep.number)
        self._last_first = np.zeros(len(self._reward), np.bool_)
        self._words = [acting.words(actor.keys, self.start)] if acting.random else []
        self._acting = acting
        self._observation = jax.tree.map(np.array, actor.timestep.observation)
        firsts: Any = rows.trajectory.first
        for row, leaf in zip(
            jax.tree.leaves(rows.observations[0]), jax.tree.leaves(self._observation), strict=True
        ):
            row[...] = leaf
        firsts[0] = actor.timestep.first
        for i, buffer in rows.carry:
            buffer[0] = self._carry[i]
        self._seen = [
            np.zeros((batch, *leaf.shape[2:]), leaf.dtype)
            for leaf in jax.tree.leaves(rows.trajectory.observation)
        ]
        self._of_batch: dict[str, Any] = {
            "carry": [np.zeros((batch, *leaf.shape[1:]), leaf.dtype) for leaf in self._carry],
            "reward": np.zeros(batch, np.float32),
            "first": np.zeros(batch, np.bool_),
            "number": np.zeros(batch, np.int32),
            "words": [np.zeros((batch, *w.shape[2:]), w.dtype) for w in self._words],
        }

    def fill(self, groups: list[Group], steps: list[int], size: int) -> None:
        """Copies what acting takes of these groups into the batch; the rest of it is padding."""
        batch = self._of_batch
        trajectory: Any = self.rows.trajectory
        observations = jax.tree.leaves(trajectory.observation)
        for i, (group, t) in enumerate(zip(groups, steps, strict=True)):
            into, part = slice(i * size, (i + 1) * size), group.part
            for buffer, leaf in zip(self._seen, observations, strict=True):
                buffer[into] = leaf[t, part]
            for buffer, leaf in zip(batch["carry"], self._carry, strict=True):
                buffer[into] = leaf[part]
            batch["reward"][into] = self._reward[part]
            batch["first"][into] = trajectory.first[t, part]
            if self._acting.numbered:
                batch["number"][into] = self._number[part]
            for buffer, words in zip(batch["words"], self._words, strict=True):
                buffer[into] = words[t, part]

    def arguments(self) -> tuple[Any, ...]:
        """What `Acting.call` takes after the weights."""
        batch, acting = self._of_batch, self._acting
        seen = [leaf for leaf, used in zip(self._seen, acting.observed, strict=True) if used]
        last = [batch["reward"]] if acting.rewarded else []
        last += [batch["first"]] if acting.begun else []
        last += [batch["number"]] if acting.numbered else []
        carry = self._carry_tree.unflatten(batch["carry"])
        return carry, seen, last, batch["words"]

    def keep(
        self,
        groups: list[Group],
        steps: list[int],
        size: int,
        leaves: list[np.ndarray],
        carry: Any,
    ) -> None:
        """Writes what acting made for these groups into their rows, and keeps their carries."""
        carries = [np.asarray(leaf) for leaf in jax.tree.leaves(carry)]
        for i, (group, t) in enumerate(zip(groups, steps, strict=True)):
            own = slice(i * size, (i + 1) * size)
            for row, leaf in zip(self.rows.made, leaves, strict=True):
                row[t, group.part] = leaf[own]
            for kept, leaf in zip(self._carry, carries, strict=True):
                kept[group.part] = leaf[own]

    def record(self, part: slice, t: int, after: Any) -> None:
        """Writes a group's transition into row `t`."""
        rows: Any = self.rows.trajectory
        rows.reward[t, part] = after.reward
        rows.terminated[t, part] = after.terminated
        rows.truncated[t, part] = after.truncated
        rows.valid[t, part] = after.valid
        for i, buffer in self.rows.next_observation:
            buffer[t, part] = jax.tree.leaves(after.next_observation)[i]
        self._reward[part] = np.where(after.first, np.float32(0), after.reward)
        more = t + 1 < self._length
        target = jax.tree.leaves(self.rows.observations[t + 1] if more else self._observation)
        for buffer, leaf in zip(target, jax.tree.leaves(after.observation), strict=True):
            buffer[part] = leaf
        if more:
            rows.first[t + 1, part] = after.first
        else:
            self._last_first[part] = after.first

    def final(self, part: slice, after: Any) -> tuple[Timestep, np.ndarray]:
        """What the actors would see at a group's true successors, and where that is wanted."""

        def whole(leaf: Any) -> np.ndarray:
            padded = np.zeros((len(self._reward), *leaf.shape[1:]), leaf.dtype)
            padded[part] = leaf
            return padded

        observation = jax.tree.map(whole, after.next_observation)
        reward, never = whole(after.reward), np.zeros(len(self._reward), np.bool_)
        timestep: Any = Timestep(observation, reward, never, self._number)  # type: ignore[arg-type]
        return timestep, whole(after.truncated)

    def whole_carry(self) -> Any:
        """Every environment's carry."""
        return self._carry_tree.unflatten(self._carry)

    def following(self) -> Timestep:
        """What the actors see after the last step."""
        seen: dict[str, Any] = {"observation": self._observation, "reward": self._reward}
        return Timestep(**seen, first=self._last_first, number=self._number)  # type: ignore[arg-type]
