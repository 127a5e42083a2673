"""Streams give every step, mixed and in bounded memory; tables hold what datasets hold."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from recorded_episodes import plain_dataset, plain_episode, plain_metadata

from dovetail.data import Reader, Rows, Stream, Writer, load, merge
from dovetail.data.blocks import Blocks, whole_episodes
from dovetail.errors import UserError
from dovetail.replay import Fifo, Lifo, Prioritized, Table, Transitions

LENGTHS = [4, 2, 6, 1, 3, 8, 5]
STEPS = sum(LENGTHS)


@pytest.fixture(params=["minari", "parquet", "by h5py"])
def reader(request: Any, tmp_path: Path) -> Any:
    folder = plain_dataset(tmp_path / "d", LENGTHS)
    if request.param == "parquet":
        merge([folder], tmp_path / "p", format="parquet")
        folder = tmp_path / "p"
    elif request.param == "by h5py":
        (folder / "data" / "index.npz").unlink()
    with Reader(folder) as reader:
        yield reader


class Row(NamedTuple):
    observation: Any
    reward: Any
    terminated: Any


def row(rows: Rows) -> Row:
    return Row(rows.observation, rows.reward, rows.terminated)


def expected(episode: int, step: int, steps: int) -> tuple[list[Any], list[bool]]:
    """(observations, mask) of a window."""
    left = min(LENGTHS[episode] - step, steps)
    return (
        [[episode, step + min(k, LENGTHS[episode] - step)] for k in range(steps + 1)],
        [k < left for k in range(steps + 1)],
    )


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("memory", [1, 1000, 1 << 28])
def test_a_stream_gives_every_step_with_what_follows(
    reader: Reader, steps: int, memory: int
) -> None:
    given: list[tuple[int, int]] = []
    with Stream(reader, 1, steps=steps, row=row, memory=memory) as stream:
        for _ in range(STEPS):
            sample = next(stream)
            episode, step = map(int, sample.rows.observation[0, 0])
            observations, mask = expected(episode, step, steps)
            assert sample.rows.observation[0].tolist() == observations
            assert sample.mask[0].tolist() == mask
            assert sample.rows.reward[0, 0] == step
            ends = sample.mask[0].sum() - 1
            assert sample.rows.terminated[0, ends] == (
                episode % 2 == 0 and step + ends == LENGTHS[episode] - 1
            )
            given.append((episode, step))
    assert sorted(given) == [(e, t) for e, n in enumerate(LENGTHS) for t in range(n)]
    assert given != sorted(given)


def test_a_stream_depends_on_seed_and_position_alone(reader: Reader) -> None:
    def steps(count: int, **options: Any) -> list[list[int]]:
        with Stream(reader, 4, memory=1500, **options) as stream:
            return [next(stream).keys.slot.tolist() for _ in range(count)]

    whole = steps(20)
    assert steps(20) == whole
    assert steps(20, seed=1) != whole
    for start in (1, 6, 7, 13):
        assert steps(20 - start, start=start) == whole[start:]
    first, second = whole[:7], whole[7:14]
    assert first != second


def test_a_batch_may_be_larger_than_the_dataset(reader: Reader) -> None:
    with Stream(reader, 100) as stream:
        sample = next(stream)
    assert sorted(np.bincount(sample.keys.slot).tolist()) == [3] * 16 + [4] * 13


def test_steps_are_mixed_evenly(tmp_path: Path) -> None:
    """The mean place of a step in an epoch does not depend on where it stands in the dataset."""
    with Reader(plain_dataset(tmp_path / "d", [50] * 40)) as reader:
        places = np.zeros(2000)
        with Stream(reader, 1, memory=40_000, ahead=100) as stream:
            for _ in range(8):
                for place in range(2000):
                    places[next(stream).keys.slot[0]] += place / 8
    halves = places.reshape(2, 1000).mean(axis=1)
    assert np.abs(halves - 1000).max() < 150
    assert places.std() < 400  # of one epoch it would be 577


def test_a_stream_ends_its_threads_and_tells_errors(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    bad = plain_episode(1, 5)
    bad.rewards[2] = np.inf
    with Writer(tmp_path / "d", plain_metadata()) as writer:
        writer.write(plain_episode(0, 4))
        writer.write(bad)
    with (
        Reader(tmp_path / "d") as reader,
        Stream(reader, 2) as stream,
        pytest.raises(UserError, match="has inf in rewards of episode 1, step 2"),
    ):
        next(stream)
    assert not set(threading.enumerate()) - before
    with pytest.raises(UserError, match="--batch is 0: give 1 or more"):
        Stream(reader, 0)


def test_blocks_cover_every_step_once() -> None:
    lengths = np.array(LENGTHS)
    for size in (1, 3, 7, 100):
        blocks = Blocks(lengths, size, behind=2)
        found = [blocks.get(np.array([number])) for number in range(len(blocks))]
        assert np.concatenate([block.steps for block in found]).tolist() == list(range(STEPS))
        assert [blocks.size(number) for number in range(len(blocks))] == [
            len(block.begins) for block in found
        ]
        for block in found:
            for piece in block.pieces:
                assert 0 <= piece.start < piece.stop <= LENGTHS[piece.episode] + 1
    runs = list(whole_episodes(lengths, 7))
    assert [number for run in runs for number in run] == list(range(7))
    assert list(whole_episodes(lengths, 10**6)) == [range(7)]


# Tables.


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("sampler", [None, Prioritized()])
def test_a_table_holds_every_step(reader: Reader, num_envs: int, sampler: Any) -> None:
    table = Table(Transitions(2), **({} if sampler is None else {"sampler": sampler}))
    replay = load(reader, table, row, num_envs=num_envs)
    assert int(replay.size) == STEPS
    draws = jax.random.uniform(jax.random.key(0), (40, STEPS))
    sample = jax.jit(lambda draws: replay.sample(draws)[1])(draws)  # 40 batches
    seen: set[tuple[int, int]] = set()
    rows = sample.rows.observation.astype(int).reshape(-1, 3, 2).tolist()
    masks = sample.mask.reshape(-1, 3).tolist()
    for window, mask in zip(rows, masks, strict=True):
        episode, step = window[0]
        observations, wanted = expected(episode, step, 2)
        count = sum(wanted)
        assert mask == wanted
        assert window[: count + 1] == observations[: count + 1]
        seen.add((episode, step))
    assert seen == {(e, t) for e, n in enumerate(LENGTHS) for t in range(n)}


def test_a_table_in_small_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.data.loading.CHUNK", 8)
    with Reader(plain_dataset(tmp_path / "d", LENGTHS)) as reader:
        assert int(load(reader, Table(), row, num_envs=2).size) == STEPS


def test_a_table_that_cannot_be(tmp_path: Path) -> None:
    with Reader(plain_dataset(tmp_path / "d", LENGTHS)) as reader:
        with pytest.raises(UserError, match="MB as a replay table, .* stream it from the disk"):
            load(reader, Table(), row, max_bytes=100)
        with pytest.raises(UserError, match="has 7 episodes, but the table has 8 environments"):
            load(reader, Table(), row, num_envs=8)
        with pytest.raises(UserError, match="Transitions with the Fifo remover"):
            load(reader, replace(Table(), remover=Lifo()), row)
        assert isinstance(load(reader, Table(), row).table.remover, Fifo)
