"""Small tables with written-out numbers: windows, ends, frames, priorities, importance weights."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from replay_tables import AnyTable, close_servers, make

from dovetail.replay import (
    Episodes,
    Fifo,
    History,
    Lowest,
    Prioritized,
    Sequences,
    Table,
    Transitions,
    importance_weights,
)

KINDS = pytest.mark.parametrize("kind", ["host", "device", "service", "server"])


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    yield
    close_servers()


ROW = {"observation": np.zeros((), np.int32), "reward": np.zeros((), np.float32)}


def steps(*values: int) -> dict[str, Any]:
    """Rows of one environment: observations, and rewards a tenth of them."""
    observation = np.array(values, np.int32)[:, None]
    return {"observation": observation, "reward": observation.astype(np.float32) / 10}


def ends(*values: int) -> np.ndarray:
    return np.array(values, bool)[:, None]


def final(*values: int) -> dict[str, np.ndarray]:
    return {"observation": np.array(values, np.int32)[:, None]}


def all_items(table: AnyTable) -> list[tuple[list[int], list[bool]]]:
    """Every item of a uniform table once: observations as far as they have meaning, and mask."""
    size = table.size
    sample = table.sample((np.arange(size) + 0.5) / size)
    found: list[tuple[list[int], list[bool]]] = []
    for row, mask in zip(sample.rows["observation"], sample.mask, strict=True):
        found.append((row[: int(mask.sum()) + 1].tolist(), mask.tolist()))
    return found


@KINDS
def test_transitions_over_the_end_of_an_episode(kind: str) -> None:
    table = make(kind, Table(Transitions(2), 20), ROW, 1)
    table.insert(steps(1, 2, 3, 4), ends(0, 0, 1, 0), None, final(0, 0, 9, 0))
    yes, no = True, False
    assert all_items(table) == [
        ([1, 2, 3], [yes, yes, no]),
        ([2, 3, 9], [yes, yes, no]),
        ([3, 9], [yes, no, no]),
    ]
    table.insert(steps(5, 6), ends(0, 0))
    assert all_items(table)[3:] == [([4, 5, 6], [yes, yes, no])]


@KINDS
def test_a_step_that_only_resets_is_no_row(kind: str) -> None:
    table = make(kind, Table(Transitions(1), 20), ROW, 1)
    valid = ends(1, 0, 1, 1)
    table.insert(steps(1, 2, 3, 4), ends(1, 0, 0, 0), valid, final(7, 0, 0, 0))
    assert [row for row, _ in all_items(table)] == [[1, 7], [3, 4]]


@KINDS
def test_an_item_that_is_completed_by_a_later_insert(kind: str) -> None:
    table = make(kind, Table(Transitions(2), 20), ROW, 1)
    table.insert(steps(1, 2))
    assert table.size == 0
    table.insert(steps(3))
    assert [row for row, _ in all_items(table)] == [[1, 2, 3]]


@KINDS
def test_sequences_overlap_and_cross_ends(kind: str) -> None:
    table = make(kind, Table(Sequences(4, 2), 20), ROW, 1)
    table.insert(steps(1, 2, 3, 4, 5), ends(0, 0, 1, 0, 0), None, final(0, 0, 9, 0, 0))
    sample = table.sample(np.array([0.1, 0.9]))
    assert sample.rows["observation"].tolist() == [[1, 2, 3, 9], [3, 9, 4, 5]]
    assert sample.mask.tolist() == [[True, True, True, False], [True, False, True, True]]


@KINDS
def test_episodes_are_whole_or_cut(kind: str) -> None:
    table = make(kind, Table(Episodes(3), 4), ROW, 1)
    table.insert(steps(1, 2), ends(0, 1), None, final(0, 8))
    table.insert(steps(3, 4, 5, 6, 7), ends(0, 0, 0, 0, 1), None, final(0, 0, 0, 0, 9))
    assert [row for row, _ in all_items(table)] == [[1, 2, 8], [3, 4, 5, 6]]


@KINDS
def test_stacks_are_as_they_were_whatever_they_are_padded_with(kind: str) -> None:
    table = Table(Transitions(1), 20, history=(History("observation", 3, 0),))
    row = {"observation": np.zeros(3, np.int32)}
    first = [[90, 91, 1], [91, 1, 2], [1, 2, 3], [80, 81, 5], [81, 5, 6]]
    last = [2, 3, 4]
    made = make(kind, table, row, 1)
    finals = np.zeros((5, 1, 3), np.int32)
    finals[2, 0] = last
    rows = {"observation": np.array(first, np.int32)[:, None]}
    made.insert(rows, ends(0, 0, 1, 0, 0), None, {"observation": finals})
    sample = made.sample((np.arange(4) + 0.5) / 4)
    assert sample.rows["observation"].tolist() == [
        [first[0], first[1]],
        [first[1], first[2]],
        [first[2], last],
        [first[3], first[4]],
    ]


@KINDS
def test_priorities_probabilities_and_importance_weights(kind: str) -> None:
    table = make(kind, Table(Transitions(1), 20, Prioritized(0.5)), ROW, 1)
    given = np.array([[4.0], [1.0], [9.0], [1.0]], np.float32)
    table.insert(steps(1, 2, 3, 4), None, None, None, given)  # three items: weights 2, 1, 3
    sample = table.sample(np.array([0.5, 0.5, 0.5]))  # strata of 2: at 1, 3 and 5
    assert sample.rows["observation"][:, 0].tolist() == [1, 3, 3]
    np.testing.assert_allclose(sample.probabilities, [2 / 6, 3 / 6, 3 / 6], rtol=1e-6)
    weights = importance_weights(sample.probabilities, sample.size, 0.5)
    np.testing.assert_allclose(weights, [1.0, np.sqrt(2 / 3), np.sqrt(2 / 3)], rtol=1e-6)
    table.update_priorities(sample.keys, np.array([0.0, 16.0, 16.0], np.float32))
    sample = table.sample(np.array([0.1, 0.3, 0.5]))  # weights 0, 1, 4
    assert sample.rows["observation"][:, 0].tolist() == [2, 3, 3]
    np.testing.assert_allclose(sample.probabilities, [0.2, 0.8, 0.8], rtol=1e-6)
    assert sample.times.tolist() == [0, 2, 2]
    table.insert(steps(5))  # the item that began with 4 had priority 1
    sample = table.sample(np.array([0.5, 0.5, 0.999]))
    np.testing.assert_allclose(sample.probabilities, [4 / 6, 4 / 6, 1 / 6], rtol=1e-6)
    table.insert(steps(6))  # and that of 5 the highest so far, 16
    sample = table.sample(np.array([0.999]))
    np.testing.assert_allclose(sample.probabilities, [4 / 10], rtol=1e-6)


@KINDS
def test_a_late_priority_for_an_item_that_has_left_changes_nothing(kind: str) -> None:
    table = make(kind, Table(Transitions(1), 2, Prioritized(1.0)), ROW, 1)
    table.insert(steps(1, 2, 3))
    keys = table.sample(np.array([0.1])).keys
    keys = type(keys)(*(np.array(x) for x in keys))
    for value in range(4, 12):  # through every slot more than once
        table.insert(steps(value))
        table.update_priorities(keys, np.array([100.0], np.float32))
        sample = table.sample(np.array([0.5, 0.5]))
        if kind != "device":
            assert sample.probabilities[0] <= 100 / 101
        found = sample.rows["observation"][:, 0].tolist()
        assert set(found) <= {value - 2, value - 1}


@KINDS
def test_a_queue_gives_each_item_once(kind: str) -> None:
    table = make(kind, Table(Transitions(1), 10, Fifo(), max_times_sampled=1), ROW, 1)
    table.insert(steps(1, 2, 3, 4))
    first = table.sample(np.zeros(2)).rows["observation"][:, 0].tolist()
    second = table.sample(np.zeros(1)).rows["observation"][:, 0].tolist()
    assert (first, second, table.size) == ([1, 2], [3], 0)


@KINDS
def test_the_lowest_priority_leaves(kind: str) -> None:
    table = make(kind, Table(Transitions(1), 3, Fifo(), Lowest()), ROW, 1)
    given = np.array([[5.0], [2.0], [4.0], [3.0], [0.0]], np.float32)
    table.insert(steps(1, 2, 3, 4, 5), None, None, None, given)
    found = table.sample(np.zeros(3)).rows["observation"]
    assert found.tolist() == [[1, 2], [3, 4], [4, 5]]


@KINDS
def test_each_stream_keeps_its_share(kind: str) -> None:
    table = make(kind, Table(Transitions(1), 4), ROW, 2)
    both = {name: np.repeat(x, 2, axis=1) for name, x in steps(1, 2).items()}
    table.insert(both)
    for value in range(3, 9):
        table.insert(steps(value), envs=(1, 2))
    sample = table.sample((np.arange(3) + 0.5) / 3)
    assert sample.rows["observation"].tolist() == [[1, 2], [6, 7], [7, 8]]


@KINDS
def test_a_budget_of_bytes_keeps_fewer_items(kind: str) -> None:
    row = {"observation": np.zeros(250, np.int32)}
    made = make(kind, Table(Transitions(1), 1000, max_bytes=50_000), row, 1)
    for value in range(200):
        made.insert({"observation": np.full((1, 1, 250), value, np.int32)})
    assert 30 <= made.size <= 50
    assert made.sample(np.array([0.0])).rows["observation"][0, 0, 0] == 199 - made.size
