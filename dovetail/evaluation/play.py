"""Acting in evaluation, and the record of the played steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.algorithm import Algorithm, Params, Timestep
from dovetail.batching import act_for_one, act_on_batch, defines, greedy_on_batch, takes_batch
from dovetail.envs.interface import Continuous
from dovetail.graph.check import GREEDY, check_action, results, same_carry
from dovetail.graph.unroll import Act, environment_keys, initial_actor, slot_reset
from dovetail.graph.unroll import StepRecord as Turn

ACTING = 0x616374
"""Mixed with an environment's key, so that acting shares no random numbers with stepping."""

MAX_STEPS = 27_000
"""Step limit of an episode: 108,000 Atari frames, the usual limit in the literature."""


class Played(NamedTuple):
    """The recorded steps of counted episodes: leaves [T, B, …]."""

    observation: Any
    action: Any
    reward: Any
    terminated: Any
    truncated: Any
    first: Any
    valid: Any
    """False where an environment has finished its episodes or only reset itself."""
    next_observation: Any
    log_probability: Any
    """None if unknown."""


StepRecord = Callable[[Played], None]
"""Called with the played steps, in order."""


@dataclass(frozen=True)
class Manner:
    """The options of playing an evaluation."""

    explore: bool = False
    """Whether to act as in training instead of greedily."""
    record: StepRecord | None = None
    max_steps: int = MAX_STEPS


def acting(algorithm: Algorithm, explore: bool) -> Act:
    """Returns (params, carry, timestep, (keys, step)) → (action, log-probability, carry) for a
    batch, with `act` or `greedy`; the caller has reset the carries."""
    whole = act_on_batch(algorithm) if explore else greedy_on_batch(algorithm)
    # A greedy discrete action has probability 1; a continuous one has no density.
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
    """`acting` for host environments: compiled, with the carry donated and reset by slot."""
    act = jax.jit(acting(algorithm, explore), donate_argnums=1)
    own = defines(algorithm, "reset_carry")
    reset = algorithm.reset_carry if own else slot_reset(algorithm.initial_carry())
    reset = jax.jit(reset, donate_argnums=0)

    def reset_and_act(params: Params, carry: Any, timestep: Timestep, at: Any) -> Any:
        if jax.tree.leaves(carry) and np.count_nonzero(timestep.first):
            carry = reset(carry, timestep.first)
        return act(params, carry, timestep, at)

    return reset_and_act


def check_greedy(algorithm: Algorithm) -> None:
    """Traces the greedy policy of a bound algorithm for a batch of two, and checks its results:
    otherwise its errors would appear only at the first evaluation."""
    whole, spec = greedy_on_batch(algorithm), algorithm.task.env
    name = "greedy_batch" if takes_batch(whole) else "greedy"
    own = getattr(algorithm, name)

    def acted(key: jax.Array) -> Any:
        seen = jax.tree.map(lambda x: jnp.zeros((2, *x.shape), x.dtype), spec.observation)
        actor = initial_actor((), seen, algorithm.initial_carry(), environment_keys(key, 2))
        made = whole(algorithm.acting(algorithm.init(key)), actor.carry, actor.timestep)
        action, carry = results(algorithm, name, own, made, GREEDY)
        same_carry(algorithm, name, own, actor.carry, carry)
        return action

    check_action(algorithm, name, own, spec, jax.eval_shape(acted, jax.random.key(0)))


def played(turn: Turn) -> Played:
    """The recorded fields of a step."""
    row = turn.row
    fields = {name: getattr(row, name) for name in Played._fields[:-1]}
    return Played(**fields, log_probability=row.extras)


def knows_probabilities(algorithm: Algorithm, explore: bool) -> bool:
    """Whether the probabilities of a bound algorithm's actions are known."""
    if not explore:
        return not isinstance(algorithm.task.env.action, Continuous)

    def acted(key: jax.Array) -> Any:
        params = algorithm.acting(algorithm.init(key))
        seen = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), algorithm.task.env.observation)
        timestep = Timestep(seen, jnp.float32(0), jnp.bool_(True))
        return act_for_one(algorithm)(params, algorithm.initial_carry(), timestep, key)[1]

    return hasattr(jax.eval_shape(acted, jax.random.key(0)), "log_prob")
