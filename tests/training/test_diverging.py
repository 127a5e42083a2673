"""A loss or a weight that is not finite ends the run, and the last good state is kept."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import LENGTH, QUIET, numbers, ppo, saved, train_module

import dovetail
from dovetail.algorithm import RL
from dovetail.algorithms.a2c import A2C
from dovetail.errors import UserError
from dovetail.policies.fused import Fused
from dovetail.policies.local import Local
from dovetail.run import Run

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


@pytest.mark.parametrize("policy", [Fused(4), Local(4)], ids=["fused", "local"])
def test_a_loss_that_is_not_a_number(policy: Any) -> None:
    with pytest.raises(UserError) as error:
        dovetail.train(
            Fails(unroll_length=LENGTH, hidden=(8,)), CHAIN, policy, steps=STEPS, settings=QUIET
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


def test_a_learning_rate_out_of_all_bounds() -> None:
    with pytest.raises(UserError, match="Training diverged: .* became (nan|inf|-inf) ") as error:
        dovetail.train(ppo(learning_rate=1e30), CHAIN, Fused(4), steps=STEPS, settings=QUIET)
    assert np.isfinite(numbers(saved(run_of(error.value))[0]["state"])).all()


def test_weights_are_looked_at_too() -> None:
    algorithm = Bursts(unroll_length=LENGTH, hidden=(8,))
    with pytest.raises(UserError, match="a weight is no longer finite in update 1;") as error:
        dovetail.train(algorithm, CHAIN, Fused(4), steps=LENGTH * 4, settings=QUIET)
    tree, meta = saved(run_of(error.value))
    assert meta["updates"] == 0 and np.isfinite(numbers(tree["state"])).all()


def test_the_seed_that_diverged_is_found_among_the_others() -> None:
    loop = train_module.Loop.__new__(train_module.Loop)
    loop.good = train_module.Loop.__init__.__globals__["Snapshot"]((), (), 4, 64)
    after = type(loop.good)((), (), 9, 144)
    with pytest.raises(UserError, match="loss became inf between updates 5 and 9"):
        loop._refuse_nonfinite({"loss": np.array([0.5, np.inf])}, after)
