"""`--log-info`: numbers of the environments' `info` in the metrics of a run, under any strategy."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from informing import Informing, InformingJax
from small import LENGTH, QUIET, a2c

import dovetail
from dovetail.algorithm import RL
from dovetail.algorithms import A2C, DQN
from dovetail.envs.interface import JaxStep
from dovetail.errors import UserError
from dovetail.strategies import ActorLearner, Environments, Fused, Local
from dovetail.telemetry.tensorboard import tags

CASES: dict[str, tuple[Any, Any, Any]] = {
    "local": (a2c(num_envs=2), Informing, Local()),
    "single steps": (
        DQN(1, num_envs=1, hidden_sizes=(8,), buffer_size=64, batch_size=4, learning_starts=8),
        Informing,
        Local(),
    ),
    "actors": (a2c(num_envs=2), Informing, ActorLearner(actors=2)),
    "processes": (a2c(num_envs=2), Informing, Environments(workers=2)),
    "fused": (a2c(num_envs=2), InformingJax(), Fused()),
    "stepped": (a2c(num_envs=2), InformingJax(), Environments(workers=2)),
}


@dataclass(frozen=True)
class Own(A2C):
    """A2C with a metric of its own."""

    def learn(self, rl: RL, state: Any, batch: Any) -> Any:
        after, metrics = super().learn(rl, state, batch)
        return after, metrics | {"twice": 2.0 * after.updates}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_in_the_metrics(case: str, tmp_path: Path) -> None:
    algorithm, env, strategy = CASES[case]
    keys = ("time", "success", "typo")
    settings = replace(QUIET, folder=str(tmp_path / "run"), log_info=keys)
    run = dovetail.train(algorithm, env, strategy, total_steps=20 * LENGTH, settings=settings)
    metrics = run.metrics
    assert not [name for name in metrics if "typo" in name]
    assert metrics["episode_return"][-1] == 5 and metrics["info_time_final"][-1] == 5
    # Every step counts once; 3 is the mean of 1 to 5, which a row may have in part.
    assert abs(np.nanmean(metrics["info_time"]) - 3) < 0.7
    assert np.nanmax(metrics["info_time"]) <= 5  # resets, whose time is 1000, do not count
    assert np.nanmean(metrics["info_success"]) == metrics["info_success_final"][-1] == 1


@pytest.mark.slow
def test_a_key_that_never_appears_is_said_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = replace(QUIET, folder=str(tmp_path), log_info=("typo",), display="plain")
    algorithm = Own(LENGTH, num_envs=2, hidden_sizes=(8,))
    run = dovetail.train(
        algorithm, InformingJax(), Fused(), total_steps=20 * LENGTH, settings=settings
    )
    assert "no environment has reported typo in its info" in capsys.readouterr().err
    # What `learn` returns is a column under its own name, the mean over the row's updates.
    assert run.metrics["twice"].tolist() == (2 * run.metrics["updates"]).tolist()


def test_an_array_is_refused() -> None:
    class Wide(InformingJax):
        def step(self, state: Any, action: Any, key: Any) -> JaxStep:
            return super().step(state, action, key)._replace(info={"wide": jnp.zeros(3)})

    settings = replace(QUIET, log_info=("wide",))
    with pytest.raises(UserError, match=r"--log-info wide is an array of shape \(3,\) in"):
        dovetail.train(a2c(), Wide(), Fused(), total_steps=8, settings=settings)


def test_tensorboard_has_them_in_a_group_of_their_own() -> None:
    assert tags("info_dist") == ("info/dist",)
    assert tags("info_dist_final/seed1") == ("info/dist_final/seed1",)
