"""The semantics of `unroll`: alternate acting and stepping, and record the trajectory.

The compiled scan, the interpreter and the host loop share these definitions: how random keys are
derived, when carries are reset, and how finished episodes are counted. Each environment has one
fixed key, folded with its step number, so splitting environments among workers changes nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.algorithm import Carry, Params, Timestep, Trajectory
from dovetail.envs.batched import BatchStep

Act = Callable[[Params, Carry, Timestep, Any], tuple[Any, Any, Carry]]
"""Acting over a batch: (params, carry [B], timestep [B], keys [B]) → (action, extras, carry)."""
Reset = Callable[[Carry, jax.Array], Carry]
"""Resets carries: (carry [B], mask of beginning episodes [B]) → carry."""
Bootstrap = Callable[[Params, Carry, Timestep], Any]
Step = Callable[[Any, Any, Any], BatchStep]
"""Steps a batch: (environment state, action, keys [B]) → BatchStep."""


class ActorState(NamedTuple):
    """State of actors and environments between unrolls; every leaf is [B, …]."""

    env: Any
    """The state of JAX environments; empty for host environments, which hold their own state."""
    timestep: Timestep
    carry: Carry
    keys: jax.Array
    number: jax.Array
    """The global index of each environment."""
    step: jax.Array
    episode_return: jax.Array
    episode_length: jax.Array


class EpisodeSums(NamedTuple):
    """Finished episodes per environment [B]: their number, and sums of returns and lengths."""

    number: jax.Array
    returns: jax.Array
    lengths: jax.Array
    info: Any = ()
    """Logged values of `info` [B, 4 K], as `info_sums` returns them; () without any."""


class StepRecord(NamedTuple):
    """One row of the trajectory [B, …] and the actor state after it."""

    row: Trajectory
    actor: ActorState
    episodes: EpisodeSums


def environment_keys(seed_key: jax.Array, num_envs: int) -> jax.Array:
    """The fixed key of every environment [num_envs], derived from its global index."""
    return jax.vmap(jax.random.fold_in, (None, 0))(seed_key, jnp.arange(num_envs))


def act_key(key: jax.Array, step: jax.Array) -> jax.Array:
    """The key for acting in one environment at its `step`."""
    # Even numbers act and odd ones step, so that the two never share a key.
    return jax.random.fold_in(key, 2 * step)


def env_key(key: jax.Array, step: jax.Array) -> jax.Array:
    """The key for one environment's transition (and reset) at its `step`."""
    return jax.random.fold_in(key, 2 * step + 1)


def initial_actor(env_state: Any, observation: Any, carry: Carry, keys: jax.Array) -> ActorState:
    """The state with every environment at the start of an episode; `carry` has no batch axis."""
    batch = keys.shape[0]
    number = jnp.arange(batch, dtype=jnp.int32)
    return ActorState(
        env=env_state,
        timestep=Timestep(observation, jnp.zeros(batch), jnp.ones(batch, bool), number),
        carry=jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *jnp.shape(x))), carry),
        keys=keys,
        number=jnp.arange(batch, dtype=jnp.int32),
        step=jnp.zeros(batch, jnp.int32),
        episode_return=jnp.zeros(batch),
        episode_length=jnp.zeros(batch, jnp.int32),
    )


def no_episodes(batch: int, info: int = 0) -> EpisodeSums:
    """Zero finished episodes, with `info` logged values."""
    zeros = jnp.zeros(batch, jnp.int32), jnp.zeros(batch), jnp.zeros(batch, jnp.int32)
    return EpisodeSums(*zeros, jnp.zeros((batch, 4 * info)) if info else ())


def info_sums(info: Any, done: Any, valid: Any) -> Any:
    """The sums of logged values [B, K] at one step, or [T, B, K] at several: [B, 4 K].

    They are, for each of the K values: its sum and its count over steps, and its sum and its count
    over the last steps of episodes. A value that is not finite is missing.
    """
    arrays: Any = info.__array_namespace__()
    known = arrays.isfinite(info) & valid[..., None]
    last = known & done[..., None]
    parts = [arrays.where(known, info, 0), known, arrays.where(last, info, 0), last]
    found = arrays.concat([part.astype(np.float32) for part in parts], axis=-1)
    return found if found.ndim == 2 else found.sum(0)


def masked_reset(initial: Carry) -> Reset:
    """Resets carries with a mask, for use inside a compiled loop.

    XLA does this in place: ongoing slots are neither copied nor written. Measured in a scan over an
    8 MB cache, it takes no time; a `cond` around it or a loop over the slots does.
    """

    def reset(carry: Carry, first: jax.Array) -> Carry:
        return jax.tree.map(lambda new, old: jnp.where(_like(first, old), new, old), initial, carry)

    return reset


def slot_reset(initial: Carry) -> Reset:
    """Resets carries one slot at a time, for use as a separate program.

    It touches only the slots of beginning episodes.
    """

    def reset(carry: Carry, first: jax.Array) -> Carry:
        # A fixed size for compilation; only the first `first.sum()` entries are used.
        [slots] = jnp.nonzero(first, size=first.shape[0], fill_value=0)

        def write(i: jax.Array, carry: Carry) -> Carry:
            return jax.tree.map(lambda new, old: old.at[slots[i]].set(new), initial, carry)

        return jax.lax.fori_loop(0, first.sum(), write, carry)

    return reset


def resetting(act: Act, reset: Reset) -> Act:
    """Wraps `act` to reset the carries of beginning episodes first."""

    def reset_and_act(params: Params, carry: Carry, timestep: Timestep, keys: jax.Array) -> Any:
        carry = reset(carry, timestep.first) if jax.tree.leaves(carry) else carry
        return act(params, carry, timestep, keys)

    return reset_and_act


def step_once(
    act: Act, step: Step, params: Params, actor: ActorState, keys: tuple[Any, Any]
) -> StepRecord:
    """Acts and steps once in every environment, and counts the episodes that end.

    Compiled loops, the interpreter and evaluation all use it. Arrays are JAX arrays, or numpy
    arrays for host environments. `bootstrap`, `carry` and `last` of the row stay empty.
    """
    acting_keys, stepping_keys = keys
    action, extras, carry = act(params, actor.carry, actor.timestep, acting_keys)
    after = step(actor.env, action, stepping_keys)
    # The array API gives the module that made an array: one definition serves both.
    arrays: Any = after.reward.__array_namespace__()  # numpy or jax.numpy
    done = after.terminated | after.truncated
    episode_return = actor.episode_return + after.reward
    episode_length = actor.episode_length + after.valid  # reset-only steps do not count
    episodes = EpisodeSums(
        done.astype(np.int32),
        arrays.where(done, episode_return, 0),
        arrays.where(done, episode_length, 0),
        info_sums(after.info, done, after.valid) if hasattr(after.info, "shape") else (),
    )
    row = Trajectory(
        observation=actor.timestep.observation,
        action=action,
        reward=after.reward,
        terminated=after.terminated,
        truncated=after.truncated,
        first=actor.timestep.first,
        valid=after.valid,
        next_observation=after.next_observation,
        extras=extras,
        bootstrap=(),
        carry=(),
        last=(),  # type: ignore[arg-type]
    )
    reward = arrays.where(after.first, 0, after.reward)
    number = actor.timestep.number
    following = ActorState(
        env=after.state,
        timestep=Timestep(after.observation, reward, after.first, number),
        carry=carry,
        keys=actor.keys,
        number=actor.number,
        step=actor.step + 1,
        episode_return=arrays.where(done, 0, episode_return),
        episode_length=arrays.where(done, 0, episode_length),
    )
    return StepRecord(row, following, episodes)


def final_timestep(record: StepRecord) -> Timestep:
    """The timestep at the true successor of a row, as if the episode continued.

    Its observation is the last of the episode, not the first of the next one.
    """
    row, number = record.row, record.actor.timestep.number
    return Timestep(row.next_observation, row.reward, jnp.zeros_like(row.first), number)


def unroll_scan(
    act: Act,
    step: Step,
    bootstrap: Bootstrap | None,
    length: int,
    params: Params,
    actor: ActorState,
    scan: Callable[..., Any] = jax.lax.scan,
    info: int = 0,
) -> tuple[Trajectory, ActorState, EpisodeSums]:
    """`length` steps as one scan, with leaves [T, B, …] in the trajectory.

    `act` must reset carries itself (see `resetting`). `scan` has the interface of `jax.lax.scan`.
    `info` is the number of logged values that `step` reports.
    """
    steps = actor.step[None] + jnp.arange(length, dtype=jnp.int32)[:, None]
    # The keys of all steps, [T, B], before the loop.
    over_time = jax.vmap(jax.vmap(act_key), (None, 0)), jax.vmap(jax.vmap(env_key), (None, 0))
    keys = (over_time[0](actor.keys, steps), over_time[1](actor.keys, steps))

    def body(state: tuple[ActorState, EpisodeSums], keys: Any) -> tuple[Any, Trajectory]:
        actor, episodes = state
        record = step_once(act, step, params, actor, keys)
        row = record.row
        if bootstrap is not None:
            row = row._replace(bootstrap=_at_truncation(bootstrap, params, record))
        return (record.actor, jax.tree.map(jnp.add, episodes, record.episodes)), row

    # Episodes are summed in the carry: rows would be [T, B] for a few numbers.
    start = (actor, no_episodes(actor.step.shape[0], info))
    (after, episodes), trajectory = scan(body, start, keys)
    if bootstrap is not None:
        # The value after the last step is needed whether or not an episode was truncated.
        last = bootstrap(params, after.carry, after.timestep)
        trajectory = trajectory._replace(bootstrap=with_last(trajectory, last))
    ends = {"carry": as_row(actor.carry), "last": as_row(after.timestep)}
    return trajectory._replace(**ends), after, episodes


def _at_truncation(bootstrap: Bootstrap, params: Params, record: StepRecord) -> Any:
    """`bootstrap` at the true final observation of truncated episodes, zero elsewhere.

    Truncation is rare, so a `cond` skips the evaluation on steps without any.
    """
    row = record.row

    def evaluate() -> Any:
        values = bootstrap(params, record.actor.carry, final_timestep(record))
        return jax.tree.map(lambda v: jnp.where(_like(row.truncated, v), v, 0), values)

    shapes = jax.eval_shape(evaluate)
    zeros = lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)  # noqa: E731
    return jax.lax.cond(row.truncated.any(), evaluate, zeros)


def with_last(trajectory: Trajectory, last: Any) -> Any:
    """Fills the last row of `bootstrap` where the episode continues beyond the unroll."""
    truncated = trajectory.truncated[-1]
    return jax.tree.map(
        lambda rows, v: rows.at[-1].set(jnp.where(_like(truncated, v), rows[-1], v)),
        trajectory.bootstrap,
        last,
    )


def as_row(tree: Any) -> Any:
    """Adds a time axis to the state at the start or end of an unroll: [B, …] → [1, B, …]."""
    return jax.tree.map(lambda x: x[None], tree)


def _like(mask: jax.Array, x: jax.Array) -> jax.Array:
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
