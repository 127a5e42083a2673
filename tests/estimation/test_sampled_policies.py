"""Estimates of policies as they draw their actions: of known values, and of what algorithms do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from recorded_control import OFFLINE, record_random
from recorded_mdp import recorded
from small import QUIET
from small_mdp import BEHAVIOR, DISCOUNT, TARGET, live, value

import dovetail
from dovetail.algorithm import Algorithm, Task, Timestep
from dovetail.algorithms import (
    AWAC,
    BC,
    CQL,
    DQN,
    IQL,
    PPO,
    QRDQN,
    R2D2,
    SAC,
    TD3,
    ApeX,
    DiscreteCQL,
    SACDiscrete,
)
from dovetail.data import Episode, Metadata, Reader, Source, Writer, info
from dovetail.errors import UserError
from dovetail.estimation import FittedQ, estimate_policy, parts
from dovetail.estimation.target import DRAWS, Target
from dovetail.functions.distributions import Categorical, SquashedGaussian

QUICK = FittedQ(updates=1500, batch=128, hidden_sizes=(), learning_rate=0.03, tau=0.05)
UNROLLED: dict[str, Any] = {"unroll_length": 8, "hidden_sizes": (4,)}
REPLAYED: dict[str, Any] = {
    "hidden_sizes": (4,),
    "batch_size": 4,
    "gradient_steps": 1,
    "learning_starts": 16,
}


@dataclass(frozen=True)
class Soft(Algorithm):
    """Acts by given probabilities [states, actions]."""

    def act(self, params: Any, carry: Any, timestep: Timestep, key: Any) -> tuple[Any, Any, Any]:
        return self._choice(params, timestep).sample(key), (), carry

    def log_prob(self, params: Any, carry: Any, timestep: Timestep, action: Any) -> jax.Array:
        return self._choice(params, timestep).log_prob(action)

    def _choice(self, params: Any, timestep: Timestep) -> Categorical:
        return Categorical(jnp.log(params[timestep.observation.argmax()]))


@dataclass(frozen=True)
class Squashed(Algorithm):
    """Always draws from the same squashed normal distribution."""

    def act(self, params: Any, carry: Any, timestep: Timestep, key: Any) -> tuple[Any, Any, Any]:
        return SquashedGaussian(*params).sample(key)[0], (), carry

    def log_prob(self, params: Any, carry: Any, timestep: Timestep, action: Any) -> jax.Array:
        return SquashedGaussian(*params).log_prob(action)


def test_every_method_finds_the_value_of_a_random_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "BYTES", 8)  # so that every episode is looked at by itself
    known = value(TARGET)
    with Reader(recorded(tmp_path / "d", live(BEHAVIOR, 1000, seed=0))) as reader:
        target = Target(Soft().bind(Task(reader.spec, 1, 1)), jnp.array(TARGET), sampled=True)
        followed = target.follow(reader)
        found = estimate_policy(reader, target, (), DISCOUNT, QUICK)
        rows = reader.rows(0, reader.num_episodes)
    state, step = rows.observation.argmax(axis=-1), ~rows.last
    chances = TARGET[state, rows.action][step]
    np.testing.assert_allclose(np.exp(followed.log_probability[step]), chances, rtol=1e-5)
    begins = np.append(True, rows.last[:-1])
    for number in (0, 1):
        for which in (begins, ~begins):
            drawn = followed.actions[which & (state == number)]
            assert drawn.shape[1:] == (DRAWS,)
            np.testing.assert_allclose(drawn.mean(), TARGET[number, 1], atol=0.04)
    assert [one.method for one in found] == ["is", "wis", "pdis", "wpdis", "dr", "fqe"]
    for one in found:
        assert abs(one.value - known) < 0.2, (one, known)
        assert one.low < known < one.high and not one.note


def test_densities_are_of_actions_between_the_bounds(tmp_path: Path) -> None:
    """Evenly spread actions of an environment that takes -2 … 2; an episode is one step, and what
    it returns is the action."""
    spread = np.linspace(-0.995, 0.995, 200)
    told_of: dict[str, Any] = {"sources": (Source("e"),), "infos": ("log_probability",)}
    box = spaces.Box(-2, 2, (1,), np.float32)
    with Writer(tmp_path / "d", Metadata(box, box, **told_of)) as writer:
        for x in spread:
            end = np.array([True])
            seen, told = np.zeros((2, 1)), {"log_probability": np.log([0.5])}
            writer.write(Episode(seen, np.array([[2 * x]]), np.array([x]), end, ~end, told))
    params = jnp.array([0.4]), jnp.log(jnp.array([0.5]))
    samples, _ = SquashedGaussian(*(jnp.broadcast_to(x, (100_000, 1)) for x in params)).sample(
        jax.random.key(0)
    )
    with Reader(tmp_path / "d") as reader:
        target = Target(Squashed().bind(Task(reader.spec, 1, 1)), params, sampled=True)
        found = estimate_policy(reader, target, ("is", "wis", "dr", "fqe"), 0.9, QUICK)
    for one in found:
        assert abs(one.value - float(samples.mean())) < 0.04, one
    assert found[0].effective_episodes is not None and found[0].effective_episodes > 100


@pytest.mark.parametrize(
    "algorithm, env",
    [
        (PPO(**UNROLLED), "CartPole-v1"),
        (PPO(**UNROLLED, recurrent=4, num_minibatches=1), "Pendulum-v1"),
        (DQN(**REPLAYED), "CartPole-v1"),
        (QRDQN(**REPLAYED), "CartPole-v1"),
        (ApeX(**REPLAYED), "CartPole-v1"),
        (R2D2(**REPLAYED, recurrent=4), "CartPole-v1"),
        (SAC(**REPLAYED), "Pendulum-v1"),
        (SACDiscrete(**REPLAYED), "CartPole-v1"),
        (BC(**OFFLINE), "Pendulum-v1"),
        (IQL(**OFFLINE), "CartPole-v1"),
        (AWAC(**OFFLINE), "Pendulum-v1"),
        (CQL(**OFFLINE), "Pendulum-v1"),
        (DiscreteCQL(**OFFLINE), "CartPole-v1"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Algorithm) else one,
)
def test_a_policy_is_worth_what_it_returned(tmp_path: Path, algorithm: Any, env: str) -> None:
    """Judged by its own episodes, no step weighs more or less than it did."""
    data = {"data": record_random(tmp_path / "r", env, 3, 9)} if algorithm.needs_data else {}
    given = () if data else (env,)
    run = dovetail.train(algorithm, *given, **data, total_steps=64, settings=QUIET)
    lived = dovetail.evaluate_run(run, 3, env=env, record=tmp_path / "d", explore=True)
    assert info(tmp_path / "d").log_probabilities == 1
    found = dovetail.estimate(tmp_path / "d", run, ("is", "wpdis"), gamma=1.0, acting="sampled")
    for one in found:
        np.testing.assert_allclose(one.value, lived.returns.mean(), rtol=1e-2)
        assert one.effective_episodes == pytest.approx(3, rel=1e-2)


def test_what_cannot_be_judged_as_sampled(tmp_path: Path) -> None:
    folder = record_random(tmp_path / "r", "CartPole-v1", 3, 9)
    run = dovetail.train(DQN(**REPLAYED, noisy=True), "CartPole-v1", total_steps=64, settings=QUIET)
    with pytest.raises(UserError) as raised:
        dovetail.estimate(folder, run, acting="sampled")
    assert str(raised.value) == (
        "DQN with noisy weights does not say how probable its actions are: judge it as greedy."
    )
    with pytest.raises(UserError, match="--acting is random: give greedy or sampled."):
        dovetail.estimate(folder, run, acting="random")
    folder = record_random(tmp_path / "p", "Pendulum-v1", 3, 9)
    run = dovetail.train(TD3(**REPLAYED), "Pendulum-v1", total_steps=64, settings=QUIET)
    with pytest.raises(UserError) as raised:
        dovetail.estimate(folder, run, acting="sampled")
    assert str(raised.value) == (
        "TD3 does not say how probable its actions are, so it cannot be judged as sampled: judge "
        "it as greedy, with epsilon for the share of its random actions."
    )
