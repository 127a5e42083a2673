"""How an evaluation acts, and what can be recorded of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.algorithm import Algorithm, Params, Timestep
from dovetail.batching import act_for_one, act_on_batch, defines, greedy_on_batch
from dovetail.envs.interface import Continuous
from dovetail.graph.unroll import Act, slot_reset
from dovetail.graph.unroll import StepRecord as Turn

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


StepRecord = Callable[[Played], None]
"""Shown what is played, in order."""


@dataclass(frozen=True)
class Manner:
    """How an evaluation is played."""

    explore: bool = False
    """Whether actions are chosen as in training, not greedily."""
    record: StepRecord | None = None
    max_steps: int = MAX_STEPS


def acting(algorithm: Algorithm, explore: bool) -> Act:
    """(params, carry, timestep, (keys, step)) → (action, log-probability, carry) over a batch, as
    `greedy` or `act` chooses; carries are reset already."""
    whole = act_on_batch(algorithm) if explore else greedy_on_batch(algorithm)
    certain = not isinstance(algorithm.task.env.action, Continuous)

    def act(params: Params, carry: Any, timestep: Timestep, at: tuple[Any, Any]) -> Any:
        if not explore:
            action, carry = whole(params, carry, timestep)
            return action, jnp.zeros(timestep.first.shape) if certain else None, carry
        keys, step = at
        own = jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, ACTING), step))(keys)
        action, extras, carry = whole(params, carry, timestep, own)
        return action, getattr(extras, "log_prob", None), carry

    return act


def acting_on_host(algorithm: Algorithm, explore: bool) -> Act:
    """The same for environments on the host: compiled, the carry in place, and reset by slot."""
    act = jax.jit(acting(algorithm, explore), donate_argnums=1)
    own = defines(algorithm, "reset_carry")
    reset = algorithm.reset_carry if own else slot_reset(algorithm.initial_carry())
    reset = jax.jit(reset, donate_argnums=0)

    def reset_and_act(params: Params, carry: Any, timestep: Timestep, at: Any) -> Any:
        if jax.tree.leaves(carry) and np.count_nonzero(timestep.first):
            carry = reset(carry, timestep.first)
        return act(params, carry, timestep, at)

    return reset_and_act


def played(turn: Turn) -> Played:
    """What is recorded of a turn."""
    row = turn.row
    fields = {name: getattr(row, name) for name in Played._fields[:-1]}
    return Played(**fields, log_probability=row.extras)


def knows_probabilities(algorithm: Algorithm, explore: bool) -> bool:
    """Whether it is known how probable the actions of a bound algorithm are."""
    if not explore:
        return not isinstance(algorithm.task.env.action, Continuous)

    def acted(key: jax.Array) -> Any:
        params = algorithm.acting(algorithm.init(key))
        seen = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), algorithm.task.env.observation)
        timestep = Timestep(seen, jnp.float32(0), jnp.bool_(True))
        return act_for_one(algorithm)(params, algorithm.initial_carry(), timestep, key)[1]

    return hasattr(jax.eval_shape(acted, jax.random.key(0)), "log_prob")
