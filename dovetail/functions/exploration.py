"""Exploration: random actions, and schedules for their frequency."""

import jax
import jax.numpy as jnp


def linear(start: float, end: float, steps: float, at: jax.Array) -> jax.Array:
    """Linear interpolation from `start` to `end` over `steps`, then constant."""
    done = jnp.clip(at / max(steps, 1), 0.0, 1.0)
    return start + (end - start) * done


def ladder(epsilon: float, power: float, number: jax.Array | int, count: int) -> jax.Array:
    """Epsilon of actor `number` of `count`, from `epsilon` down to epsilon ** (1 + power),
    https://arxiv.org/abs/1803.00933 (section 4.1)."""
    return epsilon ** (1.0 + power * jnp.asarray(number, jnp.float32) / max(count - 1, 1))


def epsilon_greedy(key: jax.Array, values: jax.Array, epsilon: jax.Array) -> jax.Array:
    """The greedy action under values [actions]; with probability `epsilon`, a random one."""
    # Two keys: with one, the action would depend on the number that decides to explore.
    whether, which = jax.random.split(key)
    random = jax.random.randint(which, (), 0, values.shape[-1], jnp.int32)
    explores = jax.random.uniform(whether) < epsilon
    return jnp.where(explores, random, jnp.argmax(values, axis=-1).astype(jnp.int32))


def epsilon_greedy_log_prob(
    values: jax.Array, epsilon: jax.Array | float, action: jax.Array
) -> jax.Array:
    """Log-probability that `epsilon_greedy` takes an action."""
    # The greedy action can also be drawn at random.
    best = action == jnp.argmax(values, axis=-1)
    return jnp.log((1.0 - epsilon) * best + epsilon / values.shape[-1])


def add_noise(key: jax.Array, action: jax.Array, scale: float) -> jax.Array:
    """An action in [-1, 1] plus normal noise of standard deviation `scale`, clipped to [-1, 1]."""
    noise = scale * jax.random.normal(key, action.shape)
    return jnp.clip(action + noise, -1.0, 1.0)
