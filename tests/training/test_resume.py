"""A run that is stopped and resumed ends as the run that was not."""

from typing import Any

import numpy as np
import pytest
from small import LENGTH, QUIET, a2c, numbers, ppo, saved, stop_after

import dovetail
from dovetail.errors import UserError
from dovetail.run.folder import Run
from dovetail.strategies.fused import Fused
from dovetail.strategies.local import Local

ENVS = 4
UPDATES = 40
STEPS = UPDATES * LENGTH * ENVS
CHAIN = "dovetail:Chain-v0"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The final checkpoint of a training that nobody interrupts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("straight"))
        run = dovetail.train(ppo(num_envs=ENVS), CHAIN, Fused(), total_steps=STEPS, settings=QUIET)
        return saved(run)[0]


def interrupted(monkeypatch: pytest.MonkeyPatch, looks: int, *what: Any, **how: Any) -> Run:
    """The folder of a training that was stopped by Ctrl-C at the n-th look."""
    with monkeypatch.context() as patch:
        stop_after(patch, looks)
        with pytest.raises(KeyboardInterrupt, match="everything is saved") as stopped:
            dovetail.train(*what, **how)
    assert getattr(stopped.value, "code", None) == 130
    return Run.open(str(stopped.value).rpartition(" ")[2])


@pytest.mark.parametrize("looks", [0, 2, 4])
def test_fused_resumes_bit_for_bit(
    straight: Any, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    run = interrupted(
        monkeypatch, looks, ppo(num_envs=ENVS), CHAIN, Fused(), total_steps=STEPS, settings=QUIET
    )
    stopped_at = saved(run)[1]["updates"]
    assert stopped_at < UPDATES and (stopped_at > 0) == (looks > 0)
    assert run.summary["updates"] == stopped_at
    resumed = dovetail.resume(run)
    tree, meta = saved(resumed)
    assert (meta["updates"], meta["env_steps"]) == (UPDATES, STEPS)
    assert resumed.summary["env_steps"] == STEPS
    np.testing.assert_array_equal(numbers(tree["state"]), numbers(straight["state"]))
    np.testing.assert_array_equal(numbers(tree["actor"]), numbers(straight["actor"]))


def test_two_interruptions_make_no_difference(
    straight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = interrupted(
        monkeypatch, 1, ppo(num_envs=ENVS), CHAIN, Fused(), total_steps=STEPS, settings=QUIET
    )
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            dovetail.resume(run)
    assert saved(run)[1]["updates"] < UPDATES
    dovetail.resume(run)
    np.testing.assert_array_equal(numbers(saved(run)[0]), numbers(straight))


def test_without_annealing_a_new_total_goes_on_bit_for_bit() -> None:
    algorithm = a2c(anneal_lr=False, num_envs=ENVS)
    whole = dovetail.train(algorithm, CHAIN, Fused(), total_steps=STEPS, settings=QUIET)
    part = dovetail.train(algorithm, CHAIN, Fused(), total_steps=STEPS // 2, settings=QUIET)
    half = numbers(saved(part)[0]["state"])
    dovetail.resume(part, total_steps=STEPS)
    np.testing.assert_array_equal(numbers(saved(part)[0]), numbers(saved(whole)[0]))
    assert not np.array_equal(half, numbers(saved(whole)[0]["state"]))
    assert part.config["steps"] == STEPS


def test_a_new_total_is_annealed_over_and_kept() -> None:
    run = dovetail.train(a2c(num_envs=ENVS), CHAIN, Fused(), total_steps=STEPS // 2, settings=QUIET)
    before = numbers(saved(run)[0]["state"].params)
    dovetail.resume(run, total_steps=STEPS)
    moved = np.abs(numbers(saved(run)[0]["state"].params) - before).max()
    assert moved > 1e-3  # at the old total's rate, 0, nothing would move
    assert run.config["steps"] == STEPS
    with pytest.raises(UserError, match="has taken 640 steps already.*give a larger one"):
        dovetail.resume(run)
    with pytest.raises(UserError, match="its total is 320"):
        dovetail.resume(run, total_steps=STEPS // 2)
    assert run.config["steps"] == STEPS


def test_local_with_a_jax_environment_resumes_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    what: Any = (a2c(num_envs=ENVS), CHAIN, Local())
    whole = dovetail.train(*what, total_steps=STEPS // 4, settings=QUIET)
    run = interrupted(monkeypatch, 2, *what, total_steps=STEPS // 4, settings=QUIET)
    assert 0 < saved(run)[1]["updates"] < 10
    dovetail.resume(run)
    np.testing.assert_array_equal(numbers(saved(run)[0]), numbers(saved(whole)[0]))


def test_local_resumes_all_but_the_host_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    what: Any = (a2c(num_envs=ENVS), "gymnasium:CartPole-v1", Local())
    whole, _ = saved(dovetail.train(*what, total_steps=STEPS // 4, settings=QUIET))
    run = interrupted(monkeypatch, 2, *what, total_steps=STEPS // 4, settings=QUIET)
    halfway, meta = saved(run)
    assert 0 < meta["updates"] < 10
    tree, meta = saved(dovetail.resume(run))
    assert (meta["updates"], meta["env_steps"]) == (10, STEPS // 4)
    assert int(tree["state"].updates) == 10
    for name in ("keys", "step"):
        found, expected = getattr(tree["actor"], name), getattr(whole["actor"], name)
        np.testing.assert_array_equal(numbers(found), numbers(expected))
    counts = [np.asarray(t["state"].optimizer[1][0].count).item() for t in (halfway, tree, whole)]
    assert counts[0] == halfway["state"].updates and counts[1:] == [10, 10]
    np.testing.assert_array_equal(numbers(tree["state"].key), numbers(whole["state"].key))
