"""No read of a dataset asks for more than it may, however long episodes and however large rows."""

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gymnasium import spaces

from dovetail.data import Episode, Metadata, Reader, Rows, Source, Stream, Writer, info, load, merge
from dovetail.data.blocks import fitting, grouped, most_rows
from dovetail.data.hdf5 import IndexedFile, Piece
from dovetail.data.reader import READ_BYTES
from dovetail.data.rounds import AT_ONCE, Rounds
from dovetail.errors import UserError
from dovetail.replay import Table

SCREEN = spaces.Box(0, 255, (512, 512), np.uint8)  # 2^18 bytes
LENGTHS = [3, 90, 1, 40, 2]
MEMORY = 1 << 23


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """36 MB, of which 24 are one episode."""
    found = tmp_path_factory.mktemp("data") / "screens"
    with Writer(found, Metadata(SCREEN, spaces.Discrete(2), sources=(Source("e"),))) as writer:
        for number, steps in enumerate(LENGTHS):
            screens = np.zeros((steps + 1, 512, 512), np.uint8)
            screens[:, 0, 0], screens[:, 0, 1] = number, np.arange(steps + 1)
            end = np.arange(steps) == steps - 1
            writer.write(Episode(screens, np.zeros(steps), np.ones(steps), end, ~end & False))
    return found


def seen(rows: Rows) -> Any:
    return rows.observation


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that each read asked for."""
    found: list[int] = []
    read = IndexedFile.read

    def noted(file: IndexedFile, pieces: Sequence[Piece], only: Sequence[str] = ()) -> Any:
        arrays = read(file, pieces, only)
        found.append(sum(array.nbytes for array in arrays.values()))
        return arrays

    monkeypatch.setattr(IndexedFile, "read", noted)
    return found


def test_what_reads_all_of_it_does_so_in_parts(folder: Path, asked: list[int]) -> None:
    found = info(folder, check=True)
    assert found.checked and len(asked) == 4
    assert max(asked) <= READ_BYTES
    assert (found.returns.high, found.returns.low, found.terminated) == (90, 1, 5)
    assert sum(asked) > 36_000_000
    del asked[:]
    assert info(folder).returns == found.returns
    assert sum(asked) < 10_000


def test_a_long_episode_that_is_damaged_is_named(folder: Path, tmp_path: Path) -> None:
    """Though it is never read as a whole."""
    merge([folder], tmp_path / "d")
    file = tmp_path / "d" / "data" / "main_data.hdf5"
    whole = bytearray(file.read_bytes())
    whole[whole.index(bytes([1, 70, 0, 0])) + 2] = 1
    file.write_bytes(whole)
    sentence = "is damaged: episode 1 is not what was written"
    with pytest.raises(UserError, match=sentence):
        info(tmp_path / "d", check=True)
    with Reader(tmp_path / "d") as reader:
        with pytest.raises(UserError, match=sentence):
            Rounds(reader, seen, memory=MEMORY).check()
        with pytest.raises(UserError, match=sentence):
            Rounds(reader, seen, memory=1 << 30).check()


@pytest.mark.parametrize("memory", [MEMORY, 1 << 30])
def test_rounds_are_read_in_parts(folder: Path, asked: list[int], memory: int) -> None:
    with Reader(folder) as reader:
        rounds = Rounds(reader, seen, memory=memory)
        assert (rounds.count == 1) == (memory > MEMORY)
        rounds.check()
        assert max(asked) <= min(memory, READ_BYTES)
        del asked[:]
        data = rounds.read(0)
        taken = sum(x.nbytes for x in jax.tree.leaves(data))
        if rounds.count > 1:
            assert max(asked) <= memory // 8
            assert AT_ONCE * taken + max(asked) <= memory
        first = data.rows[data.begins[: int(data.size)]]
        assert (np.diff(first[:, 0, 0].astype(int)) >= 0).all()


def test_a_stream_takes_the_memory_that_it_is_told(folder: Path, asked: list[int]) -> None:
    """With all batches that are made ahead, as many of a hundred as there is memory for."""
    with Reader(folder) as reader:
        tracemalloc.start()
        try:
            with Stream(reader, 1, row=seen, memory=MEMORY, ahead=100) as stream:
                for _ in range(150):
                    next(stream)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert max(asked) <= MEMORY // 8
    assert MEMORY / 2 < most <= MEMORY + 100_000  # for what is not rows


def test_a_table_is_filled_in_parts(folder: Path, asked: list[int]) -> None:
    with Reader(folder) as reader:
        assert int(load(reader, Table(), lambda rows: {"seen": rows.observation}).size) == 136
    assert max(asked) <= 2 * READ_BYTES


def test_pieces_in_groups() -> None:
    pieces = [Piece(0, 0, 4), Piece(1, 2, 5), Piece(2, 0, 9), Piece(3, 0, 1)]
    assert list(grouped(pieces, 7)) == [
        [Piece(0, 0, 4), Piece(1, 2, 5)],
        [Piece(2, 0, 7)],
        [Piece(2, 7, 9), Piece(3, 0, 1)],
    ]
    assert list(grouped(pieces, 100)) == [pieces]
    assert [len(group) for group in grouped(pieces, 1)] == [1] * 17


@pytest.mark.parametrize("room", [1, 500, 5_000, 50_000])
@pytest.mark.parametrize("window", [1, 5])
def test_as_many_steps_as_fit(room: int, window: int) -> None:
    lengths = np.array([1] * 100 + [50] * 20)
    block, count = fitting(lengths, window, 20, 8, room)
    needed = most_rows(lengths, block, count, window) * 20 + 8 * block * count
    assert needed <= room or block == count == 1
    assert needed > room / 2 or block * count in (1, 1100)
