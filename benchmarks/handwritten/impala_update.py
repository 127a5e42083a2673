"""The update of Dovetail's IMPALA as plain functions: V-trace, one gradient step per batch.

What `threaded_impala.py` learns with. Network, acting and keys are those of `ppo_update.py`:
Dovetail's own objects, so that both sides multiply the same matrices and hash the same way.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import protocol as p
from benchmarks.handwritten.ppo_update import Batch, Learner, network, variance

optimizer = optax.chain(
    optax.clip_by_global_norm(p.MAX_GRAD_NORM),
    optax.adam(p.IMPALA_LEARNING_RATE, eps=p.ADAM_EPSILON),
)


def init(key: jax.Array) -> Learner:
    network_key, key = jax.random.split(key)
    params = network.init(network_key)
    return Learner(params, optimizer.init(params), key, jnp.zeros((), jnp.int32))


def corrections(delta: jax.Array, decay: jax.Array) -> jax.Array:
    def step(y: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y = row[0] + row[1] * y
        return y, y

    return jax.lax.scan(step, jnp.zeros_like(delta[0]), (delta, decay), reverse=True)[1]


def vtrace(batch: Batch, log_ratio: jax.Array, values: jax.Array) -> tuple[jax.Array, ...]:
    """(targets, advantages, weights) [T, B]; all ratios are cut off at 1."""
    ended = batch.terminated | batch.truncated
    weights = jnp.minimum(jnp.exp(log_ratio), 1.0)
    beyond = jnp.where(batch.truncated, batch.bootstrap, values[1:])
    delta = batch.reward + p.DISCOUNT * jnp.where(batch.terminated, 0.0, beyond) - values[:-1]
    found = corrections(weights * delta, jnp.where(ended, 0.0, p.DISCOUNT * weights))
    following = jnp.concatenate([found[1:], jnp.zeros_like(found[:1])])
    advantages = delta + jnp.where(ended, 0.0, p.DISCOUNT * following)
    return jax.lax.stop_gradient((values[:-1] + found, advantages, weights))


def loss(params: Any, batch: Batch, last: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`last` [1, B, 4] is what the actors see after the unroll."""
    w = batch.valid.astype(jnp.float32)
    w = w / jnp.maximum(jnp.mean(w), 1e-8)
    observations = jnp.concatenate([batch.observation, last])
    distribution, values, _ = network.step(params, (), observations)
    distribution = jax.tree.map(lambda x: x[:-1], distribution)
    log_prob = distribution.log_prob(batch.action)
    targets, advantages, weights = vtrace(batch, log_prob - batch.log_prob, values)
    policy = -jnp.mean(log_prob * weights * advantages * w)
    error = 0.5 * jnp.mean(jnp.square(values[:-1] - targets) * w)
    entropy = jnp.mean(distribution.entropy() * w)
    total = policy + p.VALUE_COEFFICIENT * error - p.ENTROPY_COEFFICIENT * entropy
    return total, {
        "loss": total,
        "policy_loss": policy,
        "value_loss": error,
        "entropy": entropy,
        "explained_variance": 1
        - variance(targets - values[:-1], w) / jnp.maximum(variance(targets, w), 1e-8),
        "mean_ratio": jnp.mean(weights * w),
    }


def update(learner: Learner, batch: Batch, last: jax.Array) -> tuple[Learner, dict[str, jax.Array]]:
    gradients, metrics = jax.grad(loss, has_aux=True)(learner.params, batch, last)
    changes, moments = optimizer.update(gradients, learner.optimizer, learner.params)
    params = optax.apply_updates(learner.params, changes)
    return Learner(params, moments, learner.key, learner.updates + 1), metrics
