"""Several seeds as one batch: each is the training that it would have been alone."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from small import LENGTH, QUIET, a2c, numbers, ppo, saved

import dovetail
from dovetail.algorithm import Task
from dovetail.envs.resolve import resolve
from dovetail.errors import UserError
from dovetail.functions.statistics import interquartile_mean
from dovetail.run.folder import Run
from dovetail.run.settings import Settings
from dovetail.strategies.fused import Fused
from dovetail.strategies.local import Local
from dovetail.training.start import first_state

SEEDS = 4
ENVS = 4
STEPS = 10 * LENGTH * ENVS
CARTPOLE = "dovetail:CartPole-v1"
SEVERAL = dataclasses.replace(QUIET, seeds=SEEDS)


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("seeds")
    settings = dataclasses.replace(SEVERAL, folder=str(folder / "run"))
    return dovetail.train(
        a2c(num_envs=ENVS), CARTPOLE, Fused(), total_steps=STEPS, seed=7, settings=settings
    )


@pytest.mark.parametrize("index", [0, 3])
def test_a_seed_of_the_batch_is_the_training_alone(batch: Run, index: int) -> None:
    alone = dovetail.train(
        a2c(num_envs=ENVS), CARTPOLE, Fused(), total_steps=STEPS, seed=7 + index, settings=QUIET
    )
    together, expected = saved(batch)[0]["state"], saved(alone)[0]["state"]
    one = [np.asarray(leaf)[index] for leaf in numbers_by_leaf(together)]
    for found, leaf in zip(one, numbers_by_leaf(expected), strict=True):
        np.testing.assert_allclose(found, leaf, rtol=1e-4, atol=1e-5)


def numbers_by_leaf(state: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves((state.params, state.updates))]


def test_each_seed_begins_with_the_very_weights_it_has_alone() -> None:
    """To the last bit: they are not made as a batch, on which XLA's CPU pool can hang."""
    env = resolve(CARTPOLE)
    bound = ppo(recurrent=4).bind(Task(env.spec, ENVS, STEPS))
    together = first_state(bound, env.jax, ENVS, 7, SEEDS)
    for index in range(SEEDS):
        alone = first_state(bound, env.jax, ENVS, 7 + index)
        np.testing.assert_array_equal(
            numbers(jax.tree.map(lambda leaf, i=index: leaf[i], together)), numbers(alone)
        )


def test_the_seeds_differ(batch: Run) -> None:
    state = saved(batch)[0]["state"]
    flat = np.stack([numbers([np.asarray(x)[i] for x in numbers_by_leaf(state)]) for i in range(4)])
    assert np.abs(flat[1:] - flat[0]).max(axis=1).min() > 0.01


def test_the_summary_has_the_interquartile_mean_and_its_interval(batch: Run) -> None:
    summary = batch.summary
    returns = summary["final_returns"]
    assert len(returns) == SEEDS
    assert summary["final_return"] == pytest.approx(np.ravel(interquartile_mean(np.array(returns))))
    low, high = summary["final_return_interval"]
    assert min(returns) <= low <= summary["final_return"] <= high <= max(returns)
    assert summary["env_steps"] == STEPS  # of each


def test_metrics_have_a_column_for_each_seed(batch: Run) -> None:
    metrics = batch.metrics
    for name in ("loss", "entropy"):
        each = np.stack([metrics[f"{name}/seed{i}"] for i in range(SEEDS)])
        np.testing.assert_allclose(metrics[name], each.mean(axis=0), rtol=1e-6)
        assert f"{name}/seed{SEEDS}" not in metrics


def test_what_was_trained_can_be_evaluated(batch: Run) -> None:
    found = dovetail.evaluate_run(batch, episodes=3)
    assert found.returns.shape == (3 * SEEDS,)


def test_only_fused_on_one_device_batches_seeds() -> None:
    for strategy in (Local(), Fused(devices=2)):
        with pytest.raises(UserError, match="--seeds 4 .* needs --strategy fused on one device"):
            dovetail.train(
                a2c(num_envs=ENVS), CARTPOLE, strategy, total_steps=STEPS, settings=SEVERAL
            )


def test_until_is_for_one_seed() -> None:
    with pytest.raises(UserError, match="--until stops one training"):
        Settings(seeds=2, until=1.0)
