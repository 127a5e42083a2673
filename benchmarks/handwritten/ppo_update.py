"""The update of Dovetail's PPO as plain functions: advantages, losses, epochs of minibatches.

What `fused_ppo.py` and `local_ppo.py` share. The network is Dovetail's own object and keys are
Dovetail's own keys, so that both sides multiply the same matrices and hash the same way; the rest
is written out here.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks import protocol as p
from dovetail.envs.interface import Discrete
from dovetail.networks.actor_critic import ActorCritic

network = ActorCritic(jax.ShapeDtypeStruct((4,), jnp.float32), Discrete(2), p.HIDDEN, "tanh")
optimizer = optax.chain(
    optax.clip_by_global_norm(p.MAX_GRAD_NORM), optax.adam(p.LEARNING_RATE, eps=p.ADAM_EPSILON)
)

PIECE = 8192
"""Samples whose gradient is taken at once, at most."""


class Learner(NamedTuple):
    params: Any
    optimizer: Any
    key: jax.Array
    updates: jax.Array


class Batch(NamedTuple):
    """One unroll of every environment, [T, B, …]."""

    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    valid: jax.Array
    bootstrap: jax.Array
    """The value beyond a truncation and beyond the last row; 0 elsewhere."""


class Samples(NamedTuple):
    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array
    advantage: jax.Array
    target: jax.Array
    weight: jax.Array


def init(key: jax.Array) -> Learner:
    network_key, key = jax.random.split(key)
    params = network.init(network_key)
    return Learner(params, optimizer.init(params), key, jnp.zeros((), jnp.int32))


def act(params: Any, observation: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
    """(action, log-probability, value) in one environment."""
    distribution, value, _ = network.step(params, (), observation)
    action = distribution.sample(key)
    return action, distribution.log_prob(action), value


def value(params: Any, observation: jax.Array) -> jax.Array:
    return network.step(params, (), observation)[1]


@jax.jit
def greedy(params: Any, observation: jax.Array) -> jax.Array:
    return network.step(params, (), observation)[0].mode()


def advantages(batch: Batch) -> jax.Array:
    following = jnp.concatenate([batch.value[1:], batch.bootstrap[-1:]])
    next_value = jnp.where(batch.truncated, batch.bootstrap, following)
    next_value = jnp.where(batch.terminated, 0.0, next_value)
    delta = batch.reward + p.DISCOUNT * next_value - batch.value
    decay = jnp.where(batch.terminated | batch.truncated, 0.0, p.DISCOUNT * p.LAMBDA)

    def step(y: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y = row[0] + row[1] * y
        return y, y

    return jax.lax.scan(step, jnp.zeros_like(delta[0]), (delta, decay), reverse=True)[1]


def loss(params: Any, samples: Samples) -> tuple[jax.Array, dict[str, jax.Array]]:
    w = samples.weight
    distribution, values, _ = network.step(params, (), samples.observation)
    log_prob = distribution.log_prob(samples.action)
    log_ratio = log_prob - samples.log_prob
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - p.CLIP, 1 + p.CLIP)
    gain = jnp.minimum(ratio * samples.advantage, clipped * samples.advantage)
    policy = -jnp.mean(gain * w)
    error = 0.5 * jnp.mean(jnp.square(values - samples.target) * w)
    entropy = jnp.mean(distribution.entropy() * w)
    total = policy + p.VALUE_COEFFICIENT * error - p.ENTROPY_COEFFICIENT * entropy
    return total, {
        "loss": total,
        "policy_loss": policy,
        "value_loss": error,
        "entropy": entropy,
        "approx_kl": jnp.mean((jnp.expm1(log_ratio) - log_ratio) * w),
        "clip_fraction": jnp.mean((jnp.abs(ratio - 1) > p.CLIP) * w),
    }


def gradient(params: Any, samples: Samples) -> tuple[Any, dict[str, jax.Array]]:
    """The gradient of a minibatch, summed over pieces that fit the cache."""
    count = samples.weight.shape[0]
    pieces = -(-count // PIECE)
    grad = jax.grad(loss, has_aux=True)
    if pieces == 1:
        return grad(params, samples)
    split = jax.tree.map(lambda x: x.reshape(pieces, count // pieces, *x.shape[1:]), samples)

    def add(total: Any, part: Samples) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, grad(params, part)), None

    shapes = jax.eval_shape(grad, params, jax.tree.map(lambda x: x[0], split))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    total, _ = jax.lax.scan(add, zeros, split)
    return jax.tree.map(lambda x: x / pieces, total)


def update(learner: Learner, batch: Batch) -> tuple[Learner, dict[str, jax.Array]]:
    """One PPO update; a minibatch is a random set of time rows of every environment."""
    length = batch.reward.shape[0]
    weight = batch.valid.astype(jnp.float32)
    weight = weight / jnp.maximum(jnp.mean(weight), 1e-8)
    advantage = advantages(batch)
    target = advantage + batch.value
    centred = advantage - jnp.mean(advantage * weight)
    scaled = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred) * weight) + 1e-8)
    samples = Samples(batch.observation, batch.action, batch.log_prob, scaled, target, weight)

    def step(state: tuple[Any, Any], rows: jax.Array) -> tuple[Any, Any]:
        params, moments = state
        chosen = jax.tree.map(lambda x: x[rows].reshape(-1, *x.shape[2:]), samples)
        gradients, metrics = gradient(params, chosen)
        changes, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, changes), moments), metrics

    keys = jax.random.split(jax.random.fold_in(learner.key, learner.updates), p.EPOCHS)
    order = jax.vmap(lambda key: jax.random.permutation(key, length))(keys)
    order = order.reshape(p.EPOCHS * p.MINIBATCHES, -1)
    (params, moments), metrics = jax.lax.scan(step, (learner.params, learner.optimizer), order)
    metrics = jax.tree.map(jnp.mean, metrics)
    metrics["explained_variance"] = 1 - variance(target - batch.value, weight) / variance(
        target, weight
    )
    return Learner(params, moments, learner.key, learner.updates + 1), metrics


def variance(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(x - jnp.mean(x * weight)) * weight)
