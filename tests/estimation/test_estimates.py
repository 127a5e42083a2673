"""Estimates from datasets: of a small MDP's known values, and of trained runs."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from recorded_mdp import recorded
from small import QUIET
from small_mdp import BEHAVIOR, DISCOUNT, action_values, live, value

import dovetail
from dovetail.algorithm import Algorithm, Task, Timestep
from dovetail.algorithms.ppo import PPO
from dovetail.data import Reader
from dovetail.errors import UserError
from dovetail.estimation import FittedQ, estimate_policy, parts
from dovetail.estimation import target as module
from dovetail.estimation.fitted_q import fit
from dovetail.estimation.target import Target

GREEDY = np.array([[0.0, 1.0], [0.0, 1.0]])
EPSILON = 0.6
SOFT = (1 - EPSILON) * GREEDY + EPSILON / 2
QUICK = FittedQ(updates=1500, batch=128, hidden_sizes=(), learning_rate=0.03, tau=0.05)


@dataclass(frozen=True)
class Second(Algorithm):
    """Always takes the second action; its carry counts, so that it has one."""

    remembers: bool = False

    def initial_carry(self) -> Any:
        return jnp.int32(0) if self.remembers else ()

    def greedy(self, params: Any, carry: Any, timestep: Timestep) -> tuple[Any, Any]:
        if not self.remembers:
            return jnp.int32(params), carry
        right = timestep.first == (carry == 0)
        return jnp.where(right, params, 0).astype(jnp.int32), carry + 1


def target(reader: Reader, epsilon: float = EPSILON, remembers: bool = False) -> Target:
    algorithm = Second(remembers).bind(Task(reader.spec, 1, 1))
    return Target(algorithm, np.int32(1), epsilon)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """1000 episodes of BEHAVIOR."""
    folder = recorded(tmp_path_factory.mktemp("mdp") / "d", live(BEHAVIOR, 1000, seed=0))
    with Reader(folder) as reader:
        yield reader


def test_a_policy_with_a_memory_is_followed_through_episodes(reader: Reader) -> None:
    rows = reader.num_steps + reader.num_episodes
    for remembers in (False, True):
        greedy = target(reader, remembers=remembers).follow(reader)
        assert greedy.actions.tolist() == [[1]] * rows


@dataclass(frozen=True)
class Counting(Algorithm):
    """Takes the second action at every third step of an episode, if it remembers them all."""

    def initial_carry(self) -> Any:
        return jnp.int32(0)

    def greedy(self, params: Any, carry: Any, timestep: Timestep) -> tuple[Any, Any]:
        return (carry % 3 == 2).astype(jnp.int32), carry + 1


@pytest.mark.parametrize("places", [1, 7, 100, 1 << 15])
def test_little_is_looked_at_at_a_time(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, places: int
) -> None:
    row = 8  # bytes: one of two states, as float32
    monkeypatch.setattr(parts, "BYTES", places * row)
    sizes: list[int] = []

    def window(*given: Any) -> Any:
        for one in windows(*given):
            sizes.append(one.grid.timestep.observation.nbytes)
            yield one

    windows = module._windows
    monkeypatch.setattr(module, "_windows", window)
    steps = np.concatenate([np.arange(n + 1) for n in reader.episodes.lengths])
    counting = Counting().bind(Task(reader.spec, 1, 1))
    found = Target(counting, ()).follow(reader)
    assert found.actions[:, 0].tolist() == (steps % 3 == 2).astype(int).tolist()
    assert len(target(reader).follow(reader).actions) == len(steps)
    assert max(sizes) <= 4 * places * row
    assert len(sizes) > 1 or places > len(steps)


def test_every_method_finds_the_known_value(reader: Reader) -> None:
    found = estimate_policy(reader, target(reader), (), DISCOUNT, QUICK)
    known = value(SOFT)
    np.testing.assert_allclose(known, 2.3065, atol=1e-4)
    assert [one.method for one in found] == ["is", "wis", "pdis", "wpdis", "dr", "fqe"]
    for one in found:
        assert abs(one.value - known) < 0.3, one
        assert one.low < one.value < one.high
        assert one.high - one.low < 2.5, one
        assert not one.note
    assert found[0].effective_episodes is not None and 100 < found[0].effective_episodes < 1000
    by = {one.method: one for one in found}
    assert abs(by["dr"].value - known) < 0.15 and abs(by["fqe"].value - known) < 0.15
    assert by["dr"].high - by["dr"].low < by["is"].high - by["is"].low


def test_fitted_values_are_those_of_the_policy(reader: Reader) -> None:
    own = target(reader).follow(reader).actions
    options = FittedQ(DISCOUNT, 1500, 128, 2, 0.03, 0.05, ())
    values = fit(reader, own, options, epsilon=EPSILON)
    rows = reader.rows(0, 200)
    q, v = values.along(rows, own[: len(rows.reward)])
    right = action_values(SOFT)
    state = rows.observation.argmax(axis=-1)
    step = ~rows.last
    assert np.abs(q - right[state, rows.action])[step].max() < 0.3
    assert np.abs(v - (SOFT * right).sum(axis=1)[state])[step].max() < 0.3


def test_values_that_have_not_settled_say_what_they_lack(reader: Reader) -> None:
    early = replace(QUICK, updates=60, learning_rate=0.01, tau=0.01)
    (one,) = estimate_policy(reader, target(reader), ("fqe",), DISCOUNT, early)
    assert one.value < 0.7 * value(SOFT)
    lack = float(re.findall(r"about (\S+) to go", one.note)[0])
    assert abs(one.value + lack - value(SOFT)) < 0.25 * (value(SOFT) - one.value)


@pytest.mark.slow
def test_fitted_intervals_cover_the_value(tmp_path: Path) -> None:
    known, covered = value(SOFT), 0
    for seed in range(10):
        with Reader(recorded(tmp_path / str(seed), live(BEHAVIOR, 300, seed=seed))) as reader:
            (one,) = estimate_policy(reader, target(reader), ("fqe",), DISCOUNT, QUICK)
        covered += one.low <= known <= one.high
    assert covered >= 8


def test_what_was_not_recorded_cannot_be_weighed(tmp_path: Path) -> None:
    with Reader(recorded(tmp_path / "d", live(BEHAVIOR, 50, seed=0), known=False)) as reader:
        with pytest.raises(UserError) as raised:
            estimate_policy(reader, target(reader), ("wis",), DISCOUNT)
        steps = reader.num_steps
        options = FittedQ(updates=20, members=2)
        found = estimate_policy(reader, target(reader), (), DISCOUNT, options)
    assert str(raised.value) == (
        f"The dataset {tmp_path / 'd'} does not say how probable {steps} of its {steps} actions "
        "were, and importance sampling needs that: use the method fqe, which does not, or record "
        "a policy that draws its actions (dovetail eval RUN --explore --record FOLDER, of ppo, "
        "dqn, sac, iql or their kin)."
    )
    assert [one.method for one in found] == ["fqe"]


def test_a_policy_that_never_agrees(tmp_path: Path) -> None:
    lived = live(np.array([[1.0, 0.0], [1.0, 0.0]]), 20, seed=0)
    with Reader(recorded(tmp_path / "d", lived)) as reader:
        one, other = estimate_policy(reader, target(reader, 0.0), ("is", "wis"), DISCOUNT)
    assert (one.value, one.effective_episodes) == (0, 0)
    assert "nothing is left to weigh" in one.note
    assert np.isnan(other.value)


@pytest.mark.parametrize(
    "methods, epsilon, discount, sentence",
    [
        (("fgq",), 0.0, 0.9, "There is no method 'fgq': did you mean 'fqe'?"),
        (("is",), 1.5, 0.9, "epsilon is 1.5: give 0 to 1."),
        (("is",), 0.0, 1.5, "The discount is 1.5: give 0 to 1, less than 1 for dr and fqe."),
        (("wpdis",), 0.0, -0.1, "The discount is -0.1: give 0 to 1"),
        (("pdis",), 0.0, float("nan"), "The discount is nan: give 0 to 1"),
        (("fqe",), 0.0, 1.0, "Fitted-Q evaluation was given the discount 1.0"),
    ],
)
def test_mistakes(
    tmp_path: Path, methods: Any, epsilon: float, discount: float, sentence: str
) -> None:
    with (
        Reader(recorded(tmp_path / "d", live(BEHAVIOR, 5, seed=0))) as reader,
        pytest.raises(UserError, match=re.escape(sentence)),
    ):
        estimate_policy(reader, target(reader, epsilon), methods, discount)


def test_a_run_with_continuous_actions_is_judged_by_its_values(tmp_path: Path) -> None:
    run = dovetail.train(
        PPO(unroll_length=8, hidden_sizes=(4,)), "Pendulum-v1", total_steps=64, settings=QUIET
    )
    dovetail.evaluate_run(run, 2, record=tmp_path / "d", explore=True)
    options = FittedQ(updates=20, members=2, hidden_sizes=(8,))
    (one,) = dovetail.estimate(tmp_path / "d", run, options=options)
    assert one.method == "fqe" and np.isfinite([one.value, one.low, one.high]).all()
    with pytest.raises(UserError, match="cannot judge a greedy policy with the actions Continuous"):
        dovetail.estimate(tmp_path / "d", run, ("pdis",))
    with pytest.raises(UserError, match="only Discrete actions can be drawn evenly"):
        dovetail.estimate(tmp_path / "d", run, epsilon=0.1)
    cartpole = dovetail.train(
        PPO(unroll_length=8, hidden_sizes=(4,)),
        "dovetail:CartPole-v1",
        total_steps=64,
        settings=QUIET,
    )
    with pytest.raises(UserError, match=r"has observations float32\[3\], but dovetail:CartPole-v1"):
        dovetail.estimate(tmp_path / "d", cartpole)
