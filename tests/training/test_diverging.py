"""A loss or a weight that is not finite ends the run, and the last good state is kept."""

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import LENGTH, QUIET, a2c, numbers, ppo, saved

import dovetail
from dovetail.algorithm import RL
from dovetail.algorithms.a2c import A2C
from dovetail.envs.interface import Discrete, EnvSpec, JaxStep
from dovetail.errors import UserError
from dovetail.graph.unroll import environment_keys
from dovetail.keys import seed_key
from dovetail.run.folder import Run
from dovetail.strategies.fused import Fused
from dovetail.strategies.local import Local
from dovetail.training.divergence import refuse_nonfinite

STEPS = 20 * LENGTH * 4
CHAIN = "dovetail:Chain-v0"


@dataclass(frozen=True)
class Fails(A2C):
    """A2C whose loss is not a number in one update."""

    at: int = 6

    def learn(self, rl: RL, state: Any, batch: Any) -> Any:
        after, metrics = super().learn(rl, state, batch)
        metrics["loss"] = jnp.where(after.updates == self.at, jnp.nan, metrics["loss"])
        return after, metrics


@dataclass(frozen=True)
class Bursts(A2C):
    """A2C whose first update makes the weights infinite, which its metrics do not show yet."""

    def learn(self, rl: RL, state: Any, batch: Any) -> Any:
        after, metrics = super().learn(rl, state, batch)
        return after._replace(params=jax.tree.map(lambda x: x / 0.0, after.params)), metrics


def run_of(error: UserError) -> Run:
    return Run.open(str(error).rpartition(" in ")[2])


@pytest.mark.parametrize("strategy", [Fused(), Local()], ids=["fused", "local"])
def test_a_loss_that_is_not_a_number(strategy: Any) -> None:
    with pytest.raises(UserError) as error:
        dovetail.train(
            Fails(unroll_length=LENGTH, num_envs=4, hidden_sizes=(8,)),
            CHAIN,
            strategy,
            total_steps=STEPS,
            settings=QUIET,
        )
    sentence = str(error.value)
    assert sentence.startswith("Training diverged: loss became nan ")
    assert "try a lower --learning-rate" in sentence
    run = run_of(error.value)
    tree, meta = saved(run)
    assert f"Update {meta['updates']} is saved in {run.path}" in sentence
    assert meta["updates"] < 6 and int(tree["state"].updates) == meta["updates"]
    assert np.isfinite(numbers(tree["state"])).all()
    assert run.summary == {} and (run.path / "metrics.csv").is_file()


class Rots:
    """A JAX environment in which some episodes turn into NaN at their third step."""

    spec = EnvSpec("test:Rots", jax.ShapeDtypeStruct((2,), np.float32), Discrete(2))

    def reset(self, key: jax.Array) -> Any:
        return jnp.array([0.0, jax.random.uniform(key)]), jnp.zeros(2)

    def step(self, state: jax.Array, action: jax.Array, key: jax.Array) -> JaxStep:
        time, rotten = state[0] + 1, state[1] < 0.4
        shown = jnp.where(rotten & (time > 2), jnp.nan, time) * jnp.ones(2)
        return JaxStep(state.at[0].set(time), shown, jnp.float32(1), time > 9, time > 99)


def test_a_jax_environment_that_is_to_blame_is_named() -> None:
    with pytest.raises(UserError, match=r"Training diverged: .*; environment \d+ showed") as error:
        dovetail.train(a2c(), Rots(), Fused(), total_steps=STEPS, settings=QUIET)
    keys = environment_keys(jax.random.fold_in(seed_key(0), 1), 8)
    rotten = np.flatnonzero(np.asarray(jax.vmap(jax.random.uniform)(keys)) < 0.4)
    told = re.search(r"environment (\d+) showed .* not finite by step (\d+),", str(error.value))
    assert told and told[1] == str(rotten[0]) and int(told[2]) % LENGTH == 0
    assert 0 < len(rotten) < 8


def test_a_learning_rate_out_of_all_bounds() -> None:
    with pytest.raises(UserError, match="Training diverged: .* became (nan|inf|-inf) ") as error:
        dovetail.train(
            ppo(learning_rate=1e30, num_envs=4), CHAIN, Fused(), total_steps=STEPS, settings=QUIET
        )
    assert np.isfinite(numbers(saved(run_of(error.value))[0]["state"])).all()


def test_weights_are_looked_at_too() -> None:
    algorithm = Bursts(unroll_length=LENGTH, num_envs=4, hidden_sizes=(8,))
    with pytest.raises(UserError, match="a weight is no longer finite in update 1;") as error:
        dovetail.train(algorithm, CHAIN, Fused(), total_steps=LENGTH * 4, settings=QUIET)
    tree, meta = saved(run_of(error.value))
    assert meta["updates"] == 0 and np.isfinite(numbers(tree["state"])).all()


def test_the_seed_that_diverged_is_found_among_the_others() -> None:
    with pytest.raises(UserError, match="loss became inf between updates 5 and 9"):
        refuse_nonfinite({"loss": np.array([0.5, np.inf])}, True, (5, 9), None)
