"""An unroll whose environments step on the host: a lean Python loop round two compiled calls.

What the trajectory's readers use is written row by row into numpy buffers that the learner's program
takes as they are. Two sets of buffers take turns: while the learner still reads one, the next
unroll fills the other, and acting waits for the learner's weights before a set comes round again.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from dovetail.algorithm import Timestep, Trajectory
from dovetail.envs import batched
from dovetail.envs.interface import HostEnv, JaxEnv
from dovetail.graph.ir import Graph, Unroll
from dovetail.graph.unroll import ActorState, Episodes, act_key, env_key
from dovetail.runtime.programs import Values


class Stepper(Protocol):
    """What the loop needs of an environment."""

    state: Any

    def step(self, action: np.ndarray, step: int) -> Any:
        """One transition; returns something with `HostStep`'s fields."""
        ...


class HostStepper:
    """Environments outside JAX; they keep their own state."""

    def __init__(self, env: HostEnv) -> None:
        self.state = ()
        self._env = env

    def step(self, action: np.ndarray, step: int) -> Any:
        """One transition."""
        return self._env.step(action)


class JaxStepper:
    """A JAX environment stepped from the host, one compiled call per step."""

    def __init__(self, env: JaxEnv, state: Any, keys: jax.Array) -> None:
        self.state = state
        self._keys = keys

        def step(state: Any, action: Any, keys: jax.Array, number: Any) -> batched.BatchStep:
            return batched.step(env, state, action, jax.vmap(env_key, (0, None))(keys, number))

        self._step = jax.jit(step)

    def step(self, action: np.ndarray, step: int) -> Any:
        """One transition."""
        after = self._step(self.state, action, self._keys, np.int32(step))
        self.state = after.state
        return jax.tree.map(np.asarray, after._replace(state=()))


class HostUnroll:
    """Runs one unroll node with environments on the host."""

    def __init__(self, unroll: Unroll, graph: Graph, make_stepper: Callable[..., Stepper]) -> None:
        self.name = unroll.name
        self.seconds = {f"{unroll.name}.act": 0.0, f"{unroll.name}.step": 0.0}
        self._unroll = unroll
        self._graph = graph
        self._make_stepper = make_stepper
        self._stepper: Stepper | None = None
        self._live = _by_field(unroll)
        self._act = self._compile_act()
        self._bootstrap = self._compile_bootstrap()
        self._buffers = [self._allocate(), self._allocate()]

    def run(self, values: Values) -> None:
        """`length` steps of every environment; puts the trajectory and the actors' state."""
        unroll = self._unroll
        actor: ActorState = self._graph.actor.tree.unflatten(
            [values[v.id] for v in unroll.actor_inputs]
        )
        if self._stepper is None:
            self._stepper = self._make_stepper(actor.env, actor.keys)
        self._stepper.state = actor.env
        inputs = [values[v.id] for v in unroll.inputs]
        self._buffers.reverse()
        rows = self._buffers[0]
        after = self._steps(inputs, actor, rows)
        trajectory = jax.tree.leaves(rows)
        values.update(zip((v.id for v in unroll.trajectory), trajectory, strict=True))
        episodes, after = _count_episodes(rows, after)
        values.update(zip((v.id for v in unroll.episodes), episodes, strict=True))
        values.update(zip((v.id for v in unroll.actor_outputs), jax.tree.leaves(after), strict=True))

    def _steps(self, inputs: list[Any], actor: ActorState, rows: Trajectory) -> ActorState:
        unroll, stepper, live = self._unroll, self._stepper, self._live
        assert stepper is not None
        act_inputs = unroll.act_inputs(inputs)
        timestep, carry, start = actor.timestep, actor.carry, int(np.asarray(actor.step)[0])
        if live.carry:
            for row, leaf in zip(jax.tree.leaves(rows.carry), jax.tree.leaves(carry), strict=True):
                row[0] = leaf
        clock = time.perf_counter
        acting = stepping = 0.0
        for t in range(unroll.length):
            began = clock()
            action, extras, carry = self._act(
                act_inputs, carry, timestep, actor.keys, np.int32(start + t)
            )
            action = jax.tree.map(np.asarray, action)
            between = clock()
            after = stepper.step(action, start + t)
            stepping += clock() - between
            acting += between - began
            _write(rows, t, timestep, action, extras, after, live)
            if unroll.bootstrap is not None and after.truncated.any():
                final = Timestep(after.next_observation, after.reward, np.zeros_like(after.first))
                self._write_bootstrap(rows, t, inputs, carry, final, after.truncated)
            timestep = Timestep(
                jax.tree.map(np.copy, after.observation),
                np.where(after.first, np.float32(0), after.reward),
                np.array(after.first),
            )
        if unroll.bootstrap is not None:
            ongoing = ~rows.truncated[-1]
            self._write_bootstrap(rows, unroll.length - 1, inputs, carry, timestep, ongoing)
        self.seconds[f"{unroll.name}.act"] += acting
        self.seconds[f"{unroll.name}.step"] += stepping
        return actor._replace(
            env=stepper.state,
            timestep=timestep,
            carry=carry,
            step=np.asarray(actor.step) + np.int32(unroll.length),
        )

    def _write_bootstrap(
        self, rows: Trajectory, t: int, inputs: list[Any], carry: Any, at: Timestep, mask: np.ndarray
    ) -> None:
        assert self._bootstrap is not None
        found = self._bootstrap(self._unroll.bootstrap_inputs(inputs), carry, at)
        for row, leaf in zip(jax.tree.leaves(rows.bootstrap), jax.tree.leaves(found), strict=True):
            row[t][mask] = np.asarray(leaf)[mask]

    def _compile_act(self) -> Callable[..., Any]:
        inner, live = self._unroll.act, self._live
        assert inner.program is not None and inner.out_tree is not None
        function, tree = jaxpr_as_fun(inner.program), inner.out_tree

        def act(inputs: Any, carry: Any, timestep: Timestep, keys: jax.Array, step: Any) -> Any:
            acting_keys = jax.vmap(act_key, (0, None))(keys, step)
            leaves = jax.tree.leaves((carry, timestep, acting_keys))
            action, extras, carry = tree.unflatten(function(*inputs, *leaves))
            wanted = [x for x, is_live in zip(jax.tree.leaves(extras), live.extras, strict=True) if is_live]
            return action, wanted, carry

        return jax.jit(act)

    def _compile_bootstrap(self) -> Callable[..., Any] | None:
        inner = self._unroll.bootstrap
        if inner is None:
            return None
        assert inner.program is not None
        function = jaxpr_as_fun(inner.program)
        return jax.jit(lambda inputs, carry, at: function(*inputs, *jax.tree.leaves((carry, at))))

    def _allocate(self) -> Trajectory:
        """Buffers for one unroll; leaves that nobody reads share one row of zeros."""
        unroll = self._unroll
        needed = {"reward", "terminated", "truncated", "valid"}
        leaves: list[np.ndarray] = []
        fields = _field_of_leaf(unroll)
        for value, is_live, name in zip(unroll.trajectory, unroll.live, fields, strict=True):
            if is_live or name in needed:
                leaves.append(np.zeros(value.shape, value.dtype))
            else:
                zero = np.zeros((), value.dtype)
                leaves.append(np.broadcast_to(zero, value.shape))
        return unroll.trajectory_tree.unflatten(leaves)


def _field_of_leaf(unroll: Unroll) -> list[str]:
    numbered = unroll.trajectory_tree.unflatten(range(len(unroll.trajectory)))
    return [
        name for name in Trajectory._fields for _ in jax.tree.leaves(getattr(numbered, name))
    ]


def _by_field(unroll: Unroll) -> Trajectory:
    """For every field of the trajectory: which of its leaves are read."""
    live = unroll.trajectory_tree.unflatten(unroll.live)
    return Trajectory(*[jax.tree.leaves(getattr(live, name)) for name in Trajectory._fields])


def _write(
    rows: Trajectory,
    t: int,
    timestep: Timestep,
    action: Any,
    extras: list[Any],
    after: Any,
    live: Trajectory,
) -> None:
    """One step's row, of the leaves that somebody reads."""
    rows.reward[t] = after.reward
    rows.terminated[t] = after.terminated
    rows.truncated[t] = after.truncated
    rows.valid[t] = after.valid
    if live.first[0]:
        rows.first[t] = timestep.first
    _write_live(rows.observation, t, timestep.observation, live.observation)
    _write_live(rows.action, t, action, live.action)
    _write_live(rows.next_observation, t, after.next_observation, live.next_observation)
    kept = [x for x, is_live in zip(jax.tree.leaves(rows.extras), live.extras, strict=True) if is_live]
    for buffer, leaf in zip(kept, extras, strict=True):
        buffer[t] = leaf


def _write_live(buffers: Any, t: int, tree: Any, live: list[bool]) -> None:
    for buffer, leaf, is_live in zip(
        jax.tree.leaves(buffers), jax.tree.leaves(tree), live, strict=True
    ):
        if is_live:
            buffer[t] = leaf


def _count_episodes(rows: Trajectory, actor: ActorState) -> tuple[Episodes, ActorState]:
    """Episodes that ended in these rows, and the running totals of those that go on."""
    done = rows.terminated | rows.truncated
    returns = np.array(actor.episode_return)
    lengths = np.array(actor.episode_length)
    batch = done.shape[1]
    count = done.sum(0).astype(np.int32)
    ended_returns, ended_lengths = np.zeros(batch, np.float32), np.zeros(batch, np.int32)
    start = np.zeros(batch, np.int64)
    for t, i in zip(*np.nonzero(done), strict=True):
        ended_returns[i] += returns[i] + rows.reward[start[i] : t + 1, i].sum()
        ended_lengths[i] += lengths[i] + rows.valid[start[i] : t + 1, i].sum()
        returns[i], lengths[i], start[i] = 0, 0, t + 1
    for i in range(batch):
        returns[i] += rows.reward[start[i] :, i].sum()
        lengths[i] += rows.valid[start[i] :, i].sum()
    episodes = Episodes(count, ended_returns, ended_lengths)  # type: ignore[arg-type]
    return episodes, actor._replace(episode_return=returns, episode_length=lengths)


def initial_observation(env: HostEnv, keys: jax.Array) -> Any:
    """Resets host environments, each with a seed drawn from its own key."""
    bits = np.asarray(jax.vmap(lambda key: jax.random.bits(key, (), jnp.uint32))(keys))
    return jax.tree.map(np.copy, env.reset([int(word) >> 1 for word in bits]))
