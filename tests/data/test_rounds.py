"""Recorded data for a learner: all of it on the device, or round after round in bounded memory."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorded_episodes import plain_dataset

from dovetail.data import Reader
from dovetail.data.rounds import Feed, Rounds
from dovetail.replay.data import Data, DataSpec, data_leaves, with_data, without_data

LENGTHS = [5, 3, 7, 1, 4] * 4
SIX = {1: 754, 3: 1337}
"""Bytes for which six steps are a round, by their window: seven eighths are for three rounds of
6 * (1 + window) rows of 13 bytes and 6 * 8 bytes more."""


def seen(rows: Any) -> Any:
    return {"observation": rows.observation, "reward": rows.reward, "terminated": rows.terminated}


@pytest.fixture
def reader(tmp_path: Path) -> Any:
    with Reader(plain_dataset(tmp_path / "data", LENGTHS)) as found:
        yield found


def steps(data: Data) -> set[tuple[int, int]]:
    """(episode, step) of every step that is held."""
    first = data.rows["observation"][data.begins[: int(data.size)]]
    return {(int(e), int(t)) for e, t in first}


EVERY = {(e, t) for e, length in enumerate(LENGTHS) for t in range(length)}


def test_what_fits_is_one_round(reader: Reader) -> None:
    rounds = Rounds(reader, seen, memory=1 << 20)
    assert rounds.spec == DataSpec(steps=80, held=80, rows=100) and rounds.count == 1
    found = rounds.read(0)
    assert int(found.size) == 80 and steps(found) == EVERY
    feed = Feed(rounds, draws=4)
    assert feed.due(0) and feed.left(10**9) > 10**9
    feed.take(0)
    assert not feed.due(10**9)
    feed.close()


@pytest.mark.parametrize("window", [1, 3])
def test_an_epoch_has_every_step_once(reader: Reader, window: int) -> None:
    rounds = Rounds(reader, seen, window=window, memory=SIX[window])
    assert rounds.spec.held == 6 and rounds.count == 14
    epochs = [[rounds.read(14 * epoch + i) for i in range(14)] for epoch in range(2)]
    for epoch in epochs:
        assert sum(int(data.size) for data in epoch) == 80
        assert set().union(*map(steps, epoch)) == EVERY
        assert all(len(data.rows["reward"]) == rounds.spec.rows for data in epoch)
    assert [steps(data) for data in epochs[0]] != [steps(data) for data in epochs[1]]
    again = Rounds(reader, seen, window=window, memory=SIX[window]).read(15)
    jax.tree.map(np.testing.assert_array_equal, again, epochs[1][1])
    other = Rounds(reader, seen, window=window, memory=SIX[window], seed=1).read(15)
    assert steps(other) != steps(again)


@pytest.mark.parametrize("memory", [1 << 20, SIX[3]])
def test_a_window_is_cut_where_its_episode_ends(reader: Reader, memory: int) -> None:
    data = jax.device_put(Rounds(reader, seen, window=3, memory=memory).read(1))
    draws = jnp.arange(40, dtype=jnp.uint32).reshape(2, 20)
    found = jax.jit(Data.sample)(data, draws)
    assert found.mask.shape == (2, 20, 4) and found.rows["observation"].shape == (2, 20, 4, 2)
    for at in np.ndindex(2, 20):
        rows, mask = found.rows["observation"][at], np.asarray(found.mask[at])
        episode, step = (int(x) for x in rows[0])
        left = LENGTHS[episode] - step
        assert mask.tolist() == [i < min(left, 3) for i in range(4)]
        behind = min(left, 3)  # what was seen after the last step
        assert rows[behind].tolist() == [episode, step + behind]
        assert found.rows["reward"][at][0] == step
    assert float(found.probabilities[0, 0]) == pytest.approx(1 / int(data.size))
    assert int(found.size[1, 3]) == int(data.size)


def test_rounds_change_by_the_number_of_the_update(reader: Reader) -> None:
    rounds = Rounds(reader, seen, memory=SIX[1])
    feed = Feed(rounds, draws=2)  # three updates draw as many steps as a round has
    assert [feed.left(update) for update in range(5)] == [3, 2, 1, 3, 2]
    given = []
    for update in range(13):
        if feed.due(update):
            given.append((update, steps(feed.take(update))))
    assert [update for update, _ in given] == [0, 3, 6, 9, 12]
    assert [found for _, found in given] == [steps(rounds.read(i)) for i in range(5)]
    feed.close()
    resumed = Feed(rounds, draws=2)
    assert steps(resumed.take(7)) == given[2][1] and resumed.number == 2
    resumed.close()


def test_a_state_without_its_data_knows_where_they_were(reader: Reader) -> None:
    data = Rounds(reader, seen, memory=1 << 20).read(0)
    state = {"a": np.ones(2), "data": data, "z": np.zeros(1)}
    assert data_leaves(state) == (1, 2, 3, 4, 5, 6)
    bare = without_data(state)
    assert len(jax.tree.leaves(bare)) == 2 and data_leaves(bare) == ()
    back = with_data(bare, data)
    assert back["data"] is data and back["a"] is state["a"]
