"""What an evaluation plays can be recorded: the episodes that count, and only these."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import QUIET

import dovetail
from dovetail.algorithm import Task
from dovetail.algorithms.dqn import DQN
from dovetail.algorithms.ppo import PPO
from dovetail.data import Reader, record
from dovetail.data.episode import Source
from dovetail.envs.resolve import resolve
from dovetail.evaluation.evaluate import evaluate
from dovetail.evaluation.play import knows_probabilities

ENVS = ["dovetail:CartPole-v1", "CartPole-v1", "CartPole-v1?vectorization=sync", "Pendulum-v1"]


def bound(env: str, algorithm: Any) -> tuple[Any, Any, Any]:
    """(environment, algorithm, new parameters)."""
    found = resolve(env)
    algorithm = algorithm.bind(Task(found.spec, 1, 100))
    return found, algorithm, algorithm.acting(algorithm.init(jax.random.key(0)))


@pytest.mark.parametrize("explore", [False, True])
@pytest.mark.parametrize("env", ENVS)
def test_the_episodes_that_count_are_recorded(env: str, explore: bool, tmp_path: Path) -> None:
    found, algorithm, params = bound(env, PPO(hidden_sizes=(4,)))
    options: dict[str, Any] = {"episodes": 5, "seed": 3, "max_steps": 60, "explore": explore}
    if found.host is not None:
        options["num_envs"] = 2
    plain = evaluate(algorithm, params, found, **options)
    known = knows_probabilities(algorithm, explore)
    assert known == (explore or env != "Pendulum-v1")
    source = Source(found.spec.id)
    with record(tmp_path / "d", found, (source,), log_probabilities=known) as recorder:
        shown = evaluate(algorithm, params, found, **options, record=recorder.add)
    assert shown.returns.tolist() == plain.returns.tolist()
    with Reader(tmp_path / "d") as reader:
        assert reader.num_episodes == 5
        returns = [float(episode.rewards.astype(np.float64).sum()) for episode in reader]
        np.testing.assert_allclose(sorted(returns), sorted(plain.returns), rtol=1e-5)
        assert sorted(reader.episodes.lengths) == sorted(plain.lengths)
        assert not reader.episodes.cut.any()
        # what goes on behind a limit of the evaluation's own is no episode's beginning
        fragments = int((~reader.episodes.begun).sum())
        assert fragments <= (0 if found.host is None else plain.cut)
        assert fragments == 3 or env != "Pendulum-v1"  # whose episodes are longer than 180 steps
        assert sum(bool(episode.truncations[-1]) for episode in reader) == plain.cut
        rows = reader.rows(0, 5)
        again = algorithm.bind(Task(replace(found.spec, id=""), 1, 100))
        if not explore:
            _follows(again, params, rows)
        wanted = rows.log_probability[~rows.last]
        assert np.isfinite(wanted).all() == known
        if known:
            assert (wanted == 0).all() == (not explore)


def _follows(algorithm: Any, params: Any, rows: Any) -> None:
    """The recorded actions are the policy's."""
    from dovetail.algorithm import Timestep

    def greedy(seen: Any) -> Any:
        step = Timestep(seen, jnp.float32(0), jnp.bool_(False))
        return algorithm.greedy(params, algorithm.initial_carry(), step)[0]

    chosen = np.asarray(jax.vmap(greedy)(rows.observation))
    taken = np.clip(chosen, -1, 1) if chosen.dtype == np.float32 else chosen
    np.testing.assert_allclose(rows.action[~rows.last], taken[~rows.last], atol=1e-5)


def test_what_knows_its_probabilities() -> None:
    _, dqn, _ = bound("CartPole-v1", DQN())
    _, noisy, _ = bound("CartPole-v1", DQN(noisy=True))
    assert all(knows_probabilities(one, explore=False) for one in (dqn, noisy))
    assert knows_probabilities(dqn, explore=True)
    assert not knows_probabilities(noisy, explore=True)


def test_a_run_is_evaluated_and_recorded(tmp_path: Path) -> None:
    run = dovetail.train(
        PPO(unroll_length=8, hidden_sizes=(4,)),
        "dovetail:CartPole-v1",
        total_steps=64,
        settings=QUIET,
    )
    found = dovetail.evaluate_run(run, 3, record=tmp_path / "d", explore=True)
    with Reader(tmp_path / "d") as reader:
        assert reader.num_steps == found.lengths.sum()
        (source,) = reader.metadata.sources
        assert (source.kind, source.run, source.algorithm, source.seed) == (
            "evaluation",
            str(run.path),
            "ppo",
            0,
        )
        assert set(reader.rows(0, 3).version[:-1].tolist()) - {0} == {run.summary["updates"]}
        assert reader.metadata.environment == "dovetail:CartPole-v1"
    with pytest.raises(dovetail.UserError, match="is not empty, and a dataset never overwrites"):
        dovetail.evaluate_run(run, 3, record=tmp_path / "d")
