"""Values go on beyond a time limit and never beyond termination, whoever resets the environment.

Everybody walks right along the chain, and the critic knows the exact values of that. So every
advantage is 0 if and only if bootstrapping is right; place 4, which is terminal, has a wild value.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import Started

from dovetail.algorithm import RL, Algorithm, Metrics, Timestep
from dovetail.functions.returns import generalized_advantages, successor_values
from dovetail.strategies import CentralInference, Fused, Local
from dovetail.strategies.interface import Strategy

DISCOUNT = 0.5
VALUES = (0.125, 0.25, 0.5, 1.0, 100.0)
LENGTH = 10
LOCAL, BATCHED = Local(), CentralInference(workers=2, processes=False)
FIELDS = ("reward", "terminated", "truncated", "first", "valid", "bootstrap", "value", "place")


@dataclass(frozen=True)
class Watcher(Algorithm):
    """Walks right, learns nothing, and keeps the last batch in its state."""

    num_envs: int = 2

    def init(self, key: jax.Array) -> Any:
        rows = {name: jnp.zeros((LENGTH, self.task.num_envs)) for name in FIELDS}
        return {"weight": jnp.ones(()), "rows": rows}

    def acting(self, state: Any) -> Any:
        return state["weight"]

    def value(self, params: Any, carry: Any, timestep: Timestep) -> jax.Array:
        return params * timestep.observation.astype(jnp.float32) @ jnp.array(VALUES)

    def act(self, params: Any, carry: Any, timestep: Timestep, key: jax.Array) -> Any:
        return jnp.int32(1), self.value(params, carry, timestep), carry

    def iteration(self, rl: RL, state: Any) -> tuple[Any, Metrics]:
        params = rl.broadcast(state["weight"])
        batch = rl.gather(rl.unroll(self.act, params, LENGTH, bootstrap=self.value))
        known = batch._asdict() | {"value": batch.extras, "place": batch.observation.argmax(-1)}
        rows = {name: known[name].astype(jnp.float32) for name in FIELDS}
        return {"weight": state["weight"], "rows": rows}, {"loss": batch.reward.sum()}


class ChainEnv(gymnasium.Env[np.ndarray, int]):
    """`dovetail:Chain-v0` as a Gymnasium environment without a time limit of its own."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (5,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, Any]:
        super().reset(seed=seed)
        self.place = 0
        return np.eye(5, dtype=np.float32)[0], {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, Any]:
        self.place = min(max(self.place + (1 if action == 1 else -1), 0), 4)
        arrived = self.place == 4
        return np.eye(5, dtype=np.float32)[self.place], float(arrived), arrived, False, {}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    gymnasium.register("TestChain-v0", ChainEnv)  # pyright: ignore[reportArgumentType]
    yield
    del gymnasium.registry["TestChain-v0"]


def rows(env_id: str, strategy: Strategy) -> dict[str, np.ndarray]:
    """The second batch of two environments: it begins where the first one left off."""
    with Started(Watcher(), env_id, strategy) as running:
        running.advance(2)
    return {name: np.asarray(leaf)[:, :1] for name, leaf in running.state["rows"].items()}


def advantages(rows: dict[str, np.ndarray]) -> np.ndarray:
    batch = {name: jnp.asarray(row) for name, row in rows.items()}
    terminated, truncated = batch["terminated"] > 0, batch["truncated"] > 0
    following = successor_values(batch["value"], batch["bootstrap"], terminated, truncated)
    found = generalized_advantages(
        batch["reward"], batch["value"], following, terminated, truncated, DISCOUNT, 0.9
    )
    return np.asarray(found)


def host(autoreset: str, limit: int, strategy: Strategy = LOCAL) -> tuple[str, Strategy]:
    options = f"vectorization=sync&autoreset={autoreset}&max_episode_steps={limit}"
    return f"gymnasium:TestChain-v0?{options}", strategy


def chain(strategy: Strategy, limit: int) -> tuple[str, Strategy]:
    return f"dovetail:Chain-v0?limit={limit}", strategy


BACKENDS = {
    "jax, fused": lambda limit: chain(Fused(), limit),
    "jax, local": lambda limit: chain(LOCAL, limit),
    "jax, batched": lambda limit: chain(BATCHED, limit),
    "same step": lambda limit: host("same_step", limit),
    "next step": lambda limit: host("next_step", limit),
    "disabled": lambda limit: host("disabled", limit),
    "same step, batched": lambda limit: host("same_step", limit, BATCHED),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_time_limit_is_bootstrapped_through(backend: str) -> None:
    batch = rows(*BACKENDS[backend](3))
    valid = batch["valid"] > 0
    cut = batch["truncated"] > 0
    assert not batch["terminated"].any() and not batch["reward"].any()
    assert batch["place"][cut].tolist() == [2.0] * cut.sum() and cut.sum() in (2, 3)
    assert batch["bootstrap"][:-1].tolist() == np.where(cut, 1.0, 0.0)[:-1].tolist()
    assert batch["bootstrap"][-1] != 0
    assert valid.all() == (backend != "next step")
    if backend == "next step":  # 0 1 2 and a reset, all over again
        assert (~valid).sum() in (2, 3)
        assert not valid[1:][cut[:-1]].any()
    np.testing.assert_allclose(advantages(batch)[valid], 0.0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_termination_is_not(backend: str) -> None:
    batch = rows(*BACKENDS[backend](20))
    valid = batch["valid"] > 0
    over = batch["terminated"] > 0
    assert not batch["truncated"].any() and over.sum() in (2, 3)
    assert batch["reward"].tolist() == over.astype(float).tolist()
    assert not batch["bootstrap"][:-1].any()
    np.testing.assert_allclose(advantages(batch)[valid], 0.0, atol=1e-6)


@pytest.mark.parametrize("limit", [3, 20])
def test_all_back_ends_tell_the_same_story(limit: int) -> None:
    found = {name: rows(*make(limit)) for name, make in BACKENDS.items()}
    expected = found.pop("jax, fused")
    for name, batch in found.items():
        if name == "next step":
            continue  # its rows are shifted by the resets in between: compared above
        for field in FIELDS:
            np.testing.assert_array_equal(batch[field], expected[field], f"{name}: {field}")
