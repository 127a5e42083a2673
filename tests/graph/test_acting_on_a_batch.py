"""An algorithm that acts on a whole batch does the same under every strategy, as the interpreter
does, and as one that is mapped does; carries are reset where episodes begin, and nowhere else."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from decoders import Decoder, Forgetful, Mapped
from small import Started
from toys import Drift, RecurrentToy, Toy, drift_step, drift_task, leaves_close, with_iteration

import dovetail as dt
from dovetail.algorithm import RL
from dovetail.errors import UserError
from dovetail.graph.interpret import interpret
from dovetail.graph.trace import trace
from dovetail.strategies import (
    ActorLearner,
    CentralInference,
    Environments,
    Fused,
    Local,
)
from dovetail.strategies.interface import Strategy
from dovetail.training.start import first_state

ENVS, ITERATIONS, SEED = 8, 5, 7
STRATEGIES: dict[str, Strategy] = {
    "fused": Fused(),
    "fused on 2 devices": Fused(devices=2),
    "local": Local(),
    "2 actors": ActorLearner(actors=2, staleness=0),
    "inference, half at a time": CentralInference(workers=4),
    "inference, one at a time": CentralInference(workers=4, batch=2),
    "inference, all at a time": CentralInference(workers=2, batch=8),
    "environments": Environments(workers=4),
}
CASES = [
    *((Decoder(), name) for name in STRATEGIES),
    *((Forgetful(), name) for name in ("fused", "local", "inference, one at a time")),
    *((Mapped(), name) for name in ("fused", "local", "inference, half at a time")),
]


@cache
def interpreted(algorithm: Decoder) -> tuple[Any, Any, float]:
    """(state, actors, beginnings) of the interpreter."""
    bound = algorithm.bind(drift_task(ENVS))
    state, actor = first_state(bound, Drift(), ENVS, SEED)
    iteration = jax.jit(lambda state, actor: interpret(bound, drift_step, state, actor))
    begun = 0.0
    for _ in range(ITERATIONS):
        state, metrics, actor, _ = iteration(state, actor)
        assert float(metrics["wrong"]) == 0
        begun += float(metrics["begun"])
    return state, actor, begun


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "strategy"), CASES, ids=[f"{type(a).__name__}-{name}" for a, name in CASES]
)
def test_a_strategy_equals_the_interpreter(algorithm: Decoder, strategy: str) -> None:
    with Started(algorithm, Drift(), STRATEGIES[strategy], seed=SEED) as running:
        reports = [running.advance(1), running.advance(ITERATIONS - 1)]
    assert sum(float(report.metrics["wrong"]) for report in reports) == 0
    state, actor, begun = interpreted(algorithm)
    leaves_close(running.state, state)
    leaves_close(running.actor, actor)
    assert begun > 2 * ENVS  # episodes begin in the middle of unrolls too


def test_mapped_and_native_acting_agree() -> None:
    native, mapped = interpreted(Decoder()), interpreted(Mapped())
    leaves_close(native[:2], mapped[:2])


def test_a_reset_that_forgets_only_lengths_learns_the_same_behavior() -> None:
    _, forgetful, _ = interpreted(Forgetful())
    _, plain, _ = interpreted(Decoder())
    for name in ("length", "owner"):
        leaves_close(forgetful.carry[name], plain.carry[name])


@pytest.mark.slow
def test_debugging_calls_it_with_values() -> None:
    seen: list[np.ndarray] = []

    def iteration(self: Any, rl: RL, state: Any) -> Any:
        def act(params: Any, carry: Any, timestep: Any, keys: Any) -> Any:
            seen.append(np.asarray(timestep.number))
            return Decoder.act_batch(self, params, carry, timestep, keys)

        rl.unroll(dt.batched(act), rl.broadcast(state.params), 2)
        return state, {}

    algorithm = replace(with_iteration(iteration, Decoder), num_envs=3)
    dt.interpret(algorithm, Drift(), debug=True)
    assert [list(numbers) for numbers in seen] == [[0, 1, 2]] * 2


def test_act_batch_goes_before_act_unless_act_is_newer() -> None:
    class Both(Toy):
        def act_batch(self, params: Any, carry: Any, timestep: Any, keys: Any) -> Any:
            action, extras, carry = jax.vmap(super().act, (None, 0, 0, 0))(
                params, carry, timestep, keys
            )
            return action, {"native": extras}, carry

    class Newer(Both):
        def act(self, params: Any, carry: Any, timestep: Any, key: Any) -> Any:
            return super().act(params, carry, timestep, key)

    def extras(algorithm: Toy) -> Any:
        found: list[Any] = []

        def iteration(self: Any, rl: RL, state: Any) -> Any:
            found.append(rl.unroll(self.act, rl.broadcast(state.params), 2).extras)
            return state, {}

        trace(with_iteration(iteration, type(algorithm)), drift_task(2), Drift())
        return found[0]

    assert set(extras(Both())) == {"native"}
    assert not isinstance(extras(Newer()), dict)


def refusal(act: Any, base: type[Toy] = RecurrentToy, **methods: Any) -> str:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        rl.unroll(dt.batched(act), rl.broadcast(state.params), 2)
        return state, {}

    algorithm = with_iteration(iteration, base)
    for name, method in methods.items():
        setattr(type(algorithm), name, method)
    with pytest.raises(UserError) as refused:
        trace(algorithm, drift_task(4), Drift())
    return str(refused.value)


def flags(timestep: Any) -> Any:
    return timestep.first.astype(np.int32)


def test_what_a_batch_may_not_return() -> None:
    assert "Altered.act_batch returns no carry[" in refusal(
        lambda p, carry, at, keys: (flags(at), (), (carry,))
    )
    assert refusal(lambda p, carry, at, keys: (flags(at)[:1], (), carry)).endswith(
        "Altered.act_batch returns action of shape [1] for 4 environments: return [4, …], a row "
        "for each."
    )
    assert "returns extras['x'] of shape [] for 4" in refusal(
        lambda p, carry, at, keys: (flags(at), {"x": flags(at).sum()}, carry)
    )
    assert "Altered.reset_carry changes carry['memory'] from shape [4] to [2]" in refusal(
        lambda p, carry, at, keys: (flags(at), (), carry),
        reset_carry=lambda self, carry, first: carry | {"memory": carry["memory"][:, :2]},
    )
