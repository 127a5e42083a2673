"""The steps of one unroll with host environments: inputs of acting, and the recorded results.

Environments on this worker and on others are recorded the same way, and so are bootstrap values at
truncated episodes. The carry of all environments is one tree that stays on the device: every call
of acting donates it and returns it in the same memory. A separate program resets the slots of
beginning episodes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from dovetail.envs.interface import HostStep
from dovetail.graph.ir import Unroll
from dovetail.graph.unroll import ActorState, slot_reset
from dovetail.runtime.act_program import ActProgram
from dovetail.runtime.arrays import Leaf
from dovetail.runtime.buffers import (
    BufferPart,
    UnrollBuffers,
    copy_into,
    host_timestep,
)
from dovetail.runtime.unroll_functions import reset_function
from dovetail.trajectory import Timestep


class Compiled:
    """The compiled functions of an unroll with host environments, shared by all actors."""

    def __init__(self, unroll: Unroll) -> None:
        live = unroll.trajectory_tree.unflatten(unroll.live)
        observations = len(jax.tree.leaves(live.observation))
        self.acting = ActProgram(unroll, jax.tree.leaves(live.extras), observations)
        self.carries = unroll.carry_tree.num_leaves > 0
        self.own: Callable[[object], object] = jax.jit(lambda carry: jax.tree.map(jnp.copy, carry))
        """Copies a carry into fresh memory, so that acting may donate it."""
        self.reset: Callable[[object, np.ndarray], object] = jax.jit(
            reset_function(unroll, slot_reset), donate_argnums=0
        )
        self.bootstrap: Callable[[list[Leaf], object, Timestep], list[jax.Array]] | None = None
        """(inputs, carry, timestep [B]) → the leaves of the bootstrap values [B, …]."""
        if unroll.bootstrap is not None:
            assert unroll.bootstrap.program is not None
            value = jaxpr_as_fun(unroll.bootstrap.program)
            self.bootstrap = jax.jit(
                lambda inputs, carry, at: value(*inputs, *jax.tree.leaves((carry, at)))
            )


class Turns:
    """The steps of one unroll."""

    def __init__(
        self,
        unroll: Unroll,
        compiled: Compiled,
        inputs: list[Leaf],
        actor: ActorState,
        rows: UnrollBuffers,
    ) -> None:
        acting = compiled.acting
        self.rows, self.length = rows, unroll.length
        self.start = int(np.asarray(actor.step)[0])
        self.weights = acting.weights(unroll.act_inputs(inputs))
        self.words = acting.words(actor.keys, self.start) if acting.random else None
        """The key of every environment at each step, as words [T, B, …]."""
        self.number = np.asarray(actor.timestep.number)
        self.reward = np.array(actor.timestep.reward)
        """The rewards of the last step, as acting sees them."""
        # A checkpoint or a retry may still need the initial carry, so do not donate it.
        self.carry = compiled.own(actor.carry) if compiled.carries else actor.carry
        self._actor, self._compiled = actor, compiled
        self._valued = unroll.bootstrap_inputs(inputs)
        self._rewarded = acting.rewarded
        self._observation = jax.tree.map(
            lambda x: np.empty(x.shape, x.dtype), actor.timestep.observation
        )
        self._first = np.zeros(len(self.reward), np.bool_)
        self._begin()

    def _begin(self) -> None:
        """Writes the observations and carries before the first step."""
        rows, before = self.rows, self._actor
        buffers = rows.trajectory
        copy_into(jax.tree.map(lambda x: x[0], buffers.observation), before.timestep.observation)
        buffers.first[0] = before.timestep.first
        leaves = jax.tree.leaves(before.carry) if rows.carry else []
        for i, buffer in rows.carry:
            buffer[0] = leaves[i]
        for _, buffer in rows.bootstrap:
            # The buffers are reused, and `_bootstrap` writes only some rows.
            buffer[...] = 0

    def record(self, share: BufferPart, t: int, after: HostStep) -> None:
        """Writes step `t` of the environments in `share`, and their next observations."""
        reward, begins = after.reward, after.first
        share.rewards[t] = reward
        share.terminations[t] = after.terminated
        share.truncations[t] = after.truncated
        share.valid[t] = after.valid
        if share.info is not None:
            share.info[t] = after.info
        for i, buffer in share.next_observation:
            buffer[t] = jax.tree.leaves(after.next_observation)[i]
        if self.rows.bootstrap and np.count_nonzero(after.truncated):
            self._bootstrap(t, *self._final(share.part, after))
        # The next row is the input of the next act; after the last step it is the next unroll's.
        if t + 1 < self.length:
            copy_into(share.observations[t + 1], after.observation)
            share.firsts[t + 1][...] = begins
            if not self._rewarded:  # acting does not read it: skip the copy
                return
        else:
            shown = jax.tree.map(lambda x: x[share.part], self._observation)
            copy_into(shown, after.observation)
            self._first[share.part] = begins
        if np.count_nonzero(begins):
            reward = np.where(begins, np.float32(0), reward)
        self.reward[share.part] = reward

    def reset(self, first: np.ndarray) -> None:
        """Resets the carries where an episode begins; `first` is a mask [B]."""
        self.carry = self._compiled.reset(self.carry, first)

    def finish(self, env: object) -> ActorState:
        """Writes the final timestep and bootstrap; returns the state for the next unroll."""
        rows, before = self.rows, self._actor
        following = host_timestep(self._observation, self.reward, self._first, self.number)
        for i, buffer in rows.last:
            buffer[0] = jax.tree.leaves(following)[i]
        if rows.bootstrap:
            ongoing = np.logical_not(rows.trajectory.truncated[-1])
            self._bootstrap(self.length - 1, following, ongoing)
        step = np.asarray(before.step) + np.int32(self.length)
        return before._replace(env=env, timestep=following, carry=self.carry, step=step)

    def _final(self, part: slice, after: HostStep) -> tuple[Timestep, np.ndarray]:
        """The true successors as timesteps [B] and the mask of truncated episodes [B].

        Rows of environments outside `part` are zero.
        """
        size = len(self.reward)

        def whole(leaf: np.ndarray) -> np.ndarray:
            if len(leaf) == size:
                return leaf
            padded = np.zeros((size, *leaf.shape[1:]), leaf.dtype)
            padded[part] = leaf
            return padded

        observation = jax.tree.map(whole, after.next_observation)
        never = np.zeros(size, np.bool_)
        at = host_timestep(observation, whole(after.reward), never, self.number)
        return at, whole(after.truncated)

    def _bootstrap(self, t: int, at: Timestep, mask: np.ndarray) -> None:
        value = self._compiled.bootstrap
        assert value is not None
        # Always the whole batch, so that there is one shape to compile; the mask selects rows.
        found = value(self._valued, self.carry, at)
        for i, buffer in self.rows.bootstrap:
            chosen = mask.reshape(mask.shape + (1,) * (found[i].ndim - 1))
            buffer[t] = np.where(chosen, found[i], buffer[t])
