"""A `JaxEnv` mapped over a batch; finished episodes are reset in the same step.

The reset is computed only in steps where some episode ended, which on a CPU saves most of its cost.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.envs.interface import JaxEnv, Observation
from dovetail.errors import UserError


class BatchStep(NamedTuple):
    """One step of a batch of environments; leading axis [B]. Fields as in `HostStep`."""

    state: Any
    observation: Observation
    next_observation: Observation
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    first: jax.Array
    valid: jax.Array
    info: Any = ()


def reset(env: JaxEnv, keys: jax.Array) -> tuple[Any, Observation]:
    """Starts an episode in every environment; keys [B]."""
    return jax.vmap(env.reset)(keys)


def step(env: JaxEnv, state: Any, action: Any, keys: jax.Array) -> BatchStep:
    """One transition in every environment, with keys [B]; a new episode starts where one ended."""
    step_keys, reset_keys = jax.vmap(jax.random.split, out_axes=1)(keys)
    after = jax.vmap(env.step)(state, action, step_keys)
    terminated = after.terminated.astype(bool)
    # Termination wins: an episode that terminated was not cut short.
    truncated = after.truncated.astype(bool) & ~terminated
    done = terminated | truncated
    going_on = (after.state, after.observation)

    def begin_anew() -> tuple[Any, Observation]:
        return jax.tree.map(
            lambda new, old: jnp.where(_like(done, old), new, old), reset(env, reset_keys), going_on
        )

    next_state, observation = jax.lax.cond(done.any(), begin_anew, lambda: going_on)
    return BatchStep(
        state=next_state,
        observation=observation,
        next_observation=after.observation,
        reward=after.reward.astype(jnp.float32),
        terminated=terminated,
        truncated=truncated,
        first=done,
        valid=jnp.ones_like(done),
        info=_info(env.spec.info, after.info, done, env.spec.id),
    )


def _info(keys: Sequence[str], found: Mapping[str, jax.Array], like: jax.Array, env_id: str) -> Any:
    """The values of `keys` as float32[B, K], NaN where the environment has none; () without any."""
    if not keys:
        return ()
    wrong = next((key for key in keys if key in found and found[key].shape != like.shape), None)
    if wrong is not None:
        raise UserError(
            f"--log-info {wrong} is an array of shape {found[wrong].shape[1:]} in the info of "
            f"{env_id}: log single numbers."
        )
    missing = jnp.full(like.shape, jnp.nan, jnp.float32)
    columns = [jnp.asarray(found[key], jnp.float32) if key in found else missing for key in keys]
    return jnp.stack(columns, axis=-1)


def _like(mask: jax.Array, x: jax.Array) -> jax.Array:
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
