"""What can go wrong with a replay table is said in a sentence."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from replay_tables import make

from dovetail.errors import UserError
from dovetail.replay import History, HostTable, Lowest, Prioritized, Sequences, Table, Transitions
from dovetail.replay.device import table as device
from dovetail.replay.storage.save import load, save

ROW = {"observation": np.zeros(2, np.float32), "action": np.zeros((), np.int32)}


def rows(length: int = 1, envs: int = 2, **other: Any) -> dict[str, Any]:
    made = {name: np.zeros((length, envs, *x.shape), x.dtype) for name, x in ROW.items()}
    return made | other


def table(**options: Any) -> HostTable:
    return HostTable(Table(capacity=8, **options), ROW, 2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"capacity": 0}, "capacity is 0: give at least 1"),
        ({"items": Transitions(0)}, "give at least 1 step"),
        ({"items": Sequences(4, 5)}, "a period from 1 to it"),
        ({"max_times_sampled": 0}, "max_times_sampled is 0"),
        ({"sampler": Prioritized(-1.0)}, "exponent is -1.0"),
        ({"sampler": Prioritized(float("nan"))}, "exponent is nan"),
        ({"spare": -0.5}, "spare is -0.5"),
        ({"history": (History("observation", 1),)}, "fewer than 2 frames"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Table(**options)


def test_a_table_that_is_too_small_for_its_environments() -> None:
    with pytest.raises(UserError, match="capacity is 3 items for 4 environments"):
        HostTable(Table(capacity=3), ROW, 4)
    with pytest.raises(UserError, match="smallest table of these rows for 4 environments takes"):
        HostTable(Table(max_bytes=100), ROW, 4)


@pytest.mark.parametrize(
    ("path", "frames", "sentence"),
    [("pixels", 2, "no leaf of the rows"), ("observation", 3, "has 3 frames along axis -1")],
)
def test_a_history_of_what_is_no_stack(path: str, frames: int, sentence: str) -> None:
    options = Table(history=(History(path, frames),))
    for build in (HostTable, device.init):
        with pytest.raises(UserError, match=sentence):
            build(options, ROW, 1)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"observation": np.zeros((1, 2, 2), np.float32)}, "lacks 'action' of the table's rows"),
        (rows(reward=np.zeros((1, 2))), "has 'reward', unlike the table's rows"),
        (rows(action=np.zeros((1, 2), np.int64)), "action of int64.1, 2., but .* want int32"),
        (rows(observation=np.zeros((1, 2, 3), np.float32)), "observation of float32.1, 2, 3."),
        (rows(envs=3), "observation of float32.1, 3, 2.|action of int32.1, 3."),
    ],
)
def test_rows_that_differ_from_the_table(given: Any, sentence: str) -> None:
    state = device.init(Table(capacity=8), ROW, 2)
    with pytest.raises(UserError, match=sentence):
        table().insert(given)
    with pytest.raises(UserError, match=sentence):
        device.insert(
            Table(capacity=8),
            state,
            {name: jnp.asarray(x) for name, x in given.items()}
            if "int64" not in sentence
            else given,
        )


def test_other_arguments_of_an_insert() -> None:
    made = table()
    with pytest.raises(UserError, match="ends has shape .2, 2., but the rows are .1, 2."):
        made.insert(rows(), np.zeros((2, 2), bool))
    with pytest.raises(UserError, match="environments 1 to 3, but the table has 2"):
        made.insert(rows(), envs=(1, 3))
    with pytest.raises(UserError, match="as final has 'reward'"):
        made.insert(rows(), np.ones((1, 2), bool), final={"reward": np.zeros((1, 2))})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_priorities_that_are_none(bad: float) -> None:
    made = table(sampler=Prioritized())
    priorities = np.array([[1.0, bad]], np.float32)
    with pytest.raises(UserError, match=f"A priority is {bad}"):
        made.insert(rows(), priorities=priorities)
    made.insert(rows(2))
    sample = made.sample(np.array([0.2, 0.7]))
    with pytest.raises(UserError, match=f"A priority is {bad}"):
        made.update_priorities(sample.keys, priorities[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_the_device_passes_over_priorities_that_are_none(bad: float) -> None:
    made = make("device", Table(capacity=8, sampler=Prioritized(1.0)), ROW, 2)
    made.insert(rows(2))
    sample = made.sample(np.array([0.5, 0.5]))
    made.update_priorities(sample.keys, np.array([bad, 3.0], np.float32))
    sample = made.sample(np.array([0.1, 0.9]))
    np.testing.assert_allclose(sample.probabilities, [0.25, 0.75])


def test_nothing_to_sample() -> None:
    with pytest.raises(UserError, match="empty"):
        table().sample(np.array([0.5]))
    with pytest.raises(UserError, match="9 items was asked of a replay table that holds 8"):
        table().sample(np.zeros(9))
    with pytest.raises(UserError, match="9 items was asked"):
        device.sample(Table(capacity=8), device.init(Table(capacity=8), ROW, 2), jnp.zeros(9))
    made = table(sampler=Prioritized())
    made.insert(rows(2), priorities=np.zeros((2, 2), np.float32))
    with pytest.raises(UserError, match="All 2 items of the replay table have priority 0"):
        made.sample(np.array([0.5]))


@pytest.mark.parametrize(
    "options", [{}, {"sampler": Prioritized()}, {"sampler": Prioritized(), "remover": Lowest()}]
)
def test_a_saved_table_goes_on_the_same_way(options: dict[str, Any]) -> None:
    one, other = table(**options), table(**options)
    random = np.random.default_rng(0)

    def step(made: HostTable, numbers: np.random.Generator) -> list[Any]:
        given = rows(observation=numbers.random((1, 2, 2), np.float32))
        ends = numbers.random((1, 2)) < 0.3
        made.insert(given, ends, priorities=numbers.random((1, 2), np.float32))
        sample = made.sample(numbers.random(3))
        made.update_priorities(sample.keys, numbers.random(3, np.float32))
        return [sample.rows["observation"].tolist(), sample.probabilities.tolist()]

    one.insert(rows(3))
    for _ in range(20):
        step(one, random)
    load(other, save(one))
    for seed in range(20):
        found = [step(made, np.random.default_rng(seed)) for made in (one, other)]
        assert found[0] == found[1]


def test_a_saved_table_of_other_options_is_refused() -> None:
    saved = save(table())
    with pytest.raises(UserError, match="load it with the options it was saved with"):
        load(table(sampler=Prioritized()), saved)
    with pytest.raises(UserError, match="saved replay table has"):
        load(HostTable(Table(capacity=20), ROW, 2), saved)
