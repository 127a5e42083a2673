"""The conformance kit finds what it should: each broken promise, one sentence."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.envs import (
    Continuous,
    Discrete,
    EnvSpec,
    HostStep,
    JaxStep,
    check_host_env,
    check_jax_env,
)
from dovetail.errors import UserError

BOX = jax.ShapeDtypeStruct((2,), jnp.float32)


class Fair:
    """A JaxEnv without fault; subclasses break one promise each."""

    spec = EnvSpec("mine:Fair", BOX, Continuous(2, True))

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        x = jax.random.uniform(key, (2,))
        return (x, jnp.int32(0)), x

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> JaxStep:
        x, time = state
        x = x + 0.1 * jnp.clip(action, -1, 1)
        end, limit = x[0] > 2, time + 1 >= 10
        return JaxStep((x, time + 1), x, x.sum(), end, limit & ~end)


class WrongShape(Fair):
    spec = EnvSpec("mine:Env", jax.ShapeDtypeStruct((3,), jnp.float32), Discrete(2))


class WrongReward(Fair):
    def step(self, state, action, key):
        return super().step(state, action, key)._replace(reward=jnp.zeros(1))


class ChangingState(Fair):
    def step(self, state, action, key):
        after = super().step(state, action, key)
        return after._replace(state=(after.state[0], jnp.float32(0)))


class BothFlags(Fair):
    def step(self, state, action, key):
        return (
            super()
            .step(state, action, key)
            ._replace(terminated=jnp.bool_(True), truncated=jnp.bool_(True))
        )


class Unclipped(Fair):
    def step(self, state, action, key):
        return super().step(state, action, key)._replace(observation=action * 2)


class NotANumber(Fair):
    def step(self, state, action, key):
        return super().step(state, action, key)._replace(reward=jnp.float32(jnp.nan))


class NotTraceable(Fair):
    def step(self, state, action, key):
        after = super().step(state, action, key)
        return after if action[0] > 0 else after._replace(reward=-after.reward)


def test_a_fair_jax_environment_passes():
    check_jax_env(Fair(), steps=30)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (WrongShape, r"reset's observation is float32\[2\], not float32\[3\]"),
        (WrongReward, r"reward is float32\[1\], not float32\[\]"),
        (ChangingState, "they must agree, for the state goes round a loop"),
        (BothFlags, "sets terminated and truncated at once"),
        (Unclipped, r"does not clip: the action \[-3.0, -3.0\] led elsewhere"),
        (NotANumber, "not finite"),
        (NotTraceable, "cannot be traced by JAX"),
    ],
)
def test_a_broken_jax_environment_is_told_off(kind, sentence):
    with pytest.raises(UserError, match=sentence):
        check_jax_env(kind(), steps=5)


def test_something_else_is_told_off():
    with pytest.raises(UserError, match="lacks spec, reset"):
        check_jax_env(object())  # pyright: ignore[reportArgumentType]


COUNTERS = EnvSpec("mine:Counters", BOX, Discrete(2))


@dataclass
class Counters:
    """A HostEnv that counts to 3 and resets in the same step; `fault` breaks one promise."""

    num_envs: int
    fault: str = ""
    spec: EnvSpec = COUNTERS

    def reset(self, seeds: list[int]) -> np.ndarray:
        self.time, self.seeds = 0, np.array(seeds, np.float32)
        if self.fault == "random":
            self.seeds = np.random.default_rng().random(self.num_envs, np.float32)
        if self.fault == "shared":
            self.seeds = np.full(self.num_envs, sum(seeds), np.float32)
        return self._show(0)

    def _show(self, time: int) -> np.ndarray:
        return np.stack([np.full(self.num_envs, time, np.float32), self.seeds], axis=1)

    def step(self, action: np.ndarray) -> HostStep:
        self.time += 1
        end = np.full(self.num_envs, self.time == 3)
        led_to = self._show(self.time)
        self.time %= 3
        no, yes = np.zeros(self.num_envs, np.bool_), np.ones(self.num_envs, np.bool_)
        reward = np.zeros(self.num_envs, np.float32)
        step = HostStep(self._show(self.time), led_to, reward, end, no, end, yes)
        match self.fault:
            case "dtype":
                return step._replace(reward=reward.astype(np.float64))
            case "first":
                return step._replace(first=no)
            case "always":
                return step._replace(first=yes)
            case "valid":
                return step._replace(valid=~end)
            case "both":
                return step._replace(truncated=end)
            case "next":
                return step._replace(next_observation=led_to + 1)
            case _:
                return step

    def close(self) -> None:
        """Nothing is held."""


def test_a_fair_host_environment_passes():
    check_host_env(Counters, steps=10)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("dtype", r"reward is float64\[3\], not float32\[3\]"),
        ("first", "step 2: observation and next_observation differ where no episode began"),
        ("always", "step 0: first is set though no episode ended"),
        ("valid", "step 2: valid must be False just after"),
        ("both", "step 2: terminated and truncated are set at once"),
        ("next", "step 0: observation and next_observation differ where no episode began"),
        ("random", "different things when reset with the same seeds"),
        ("shared", "its randomness depends on the others"),
    ],
)
def test_a_broken_host_environment_is_told_off(fault, sentence):
    with pytest.raises(UserError, match=sentence):
        check_host_env(lambda num_envs: Counters(num_envs, fault), steps=10)
