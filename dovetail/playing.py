"""How an evaluation acts, and what can be recorded of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.algorithm import Algorithm, Params, Timestep
from dovetail.envs.interface import Continuous

ACTING = 0x616374
"""Mixed with an environment's key, so that acting shares no random number with stepping."""

MAX_STEPS = 27_000
"""Steps after which an episode is cut: 108,000 Atari frames, the field's usual limit."""


class Played(NamedTuple):
    """Steps of the episodes that count, as they are recorded: leaves [T, B, …]."""

    observation: Any
    action: Any
    reward: Any
    terminated: Any
    truncated: Any
    first: Any
    valid: Any
    """False where an environment's episodes are over, or it only reset."""
    next_observation: Any
    log_probability: Any
    """None where it is not known."""


Record = Callable[[Played], None]
"""Shown what is played, in order."""


@dataclass(frozen=True)
class Manner:
    """How an evaluation is played."""

    explore: bool = False
    """Whether actions are chosen as in training, not greedily."""
    record: Record | None = None
    max_steps: int = MAX_STEPS


def batched(algorithm: Algorithm, explore: bool) -> Callable[..., tuple[Any, Any, Any]]:
    """(action, log-probability, carry) over a batch, as `greedy` or `act` chooses; where an episode
    begins, the carry and the last reward are renewed."""
    initial = algorithm.initial_carry()
    certain = not isinstance(algorithm.task.env.action, Continuous) if not explore else False

    def one(
        params: Params,
        carry: Any,
        observation: Any,
        reward: jax.Array,
        first: jax.Array,
        key: jax.Array,
    ) -> tuple[Any, Any, Any]:
        carry = jax.tree.map(lambda new, old: jnp.where(first, new, old), initial, carry)
        reward = jnp.where(first, 0, reward).astype(jnp.float32)
        timestep = Timestep(observation, reward, first)
        if explore:
            action, extras, carry = algorithm.act(params, carry, timestep, key)
            return action, getattr(extras, "log_prob", None), carry
        action, carry = algorithm.greedy(params, carry, timestep)
        return action, jnp.float32(0) if certain else None, carry

    def batch(
        params: Params, carry: Any, observation: Any, reward: Any, first: Any, keys: Any, step: Any
    ) -> tuple[Any, Any, Any]:
        own = jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, ACTING), step))(keys)
        return jax.vmap(one, (None, 0, 0, 0, 0, 0))(params, carry, observation, reward, first, own)

    return batch


def knows_probabilities(algorithm: Algorithm, explore: bool) -> bool:
    """Whether it is known how probable the actions of a bound algorithm are."""
    if not explore:
        return not isinstance(algorithm.task.env.action, Continuous)

    def acted(key: jax.Array) -> Any:
        params = algorithm.acting(algorithm.init(key))
        seen = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), algorithm.task.env.observation)
        timestep = Timestep(seen, jnp.float32(0), jnp.bool_(True))
        return algorithm.act(params, algorithm.initial_carry(), timestep, key)[1]

    return hasattr(jax.eval_shape(acted, jax.random.key(0)), "log_prob")
