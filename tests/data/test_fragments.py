"""What was not recorded from its first step to its last is known as a fragment wherever it goes."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from recorded_episodes import assert_same, plain_episode, plain_metadata

from dovetail.cli.main import main
from dovetail.data import Reader, Writer, info, merge, repair, split

CUT = [False, True, False, True, False]
BEGUN = [True, True, False, False, True]


def write(folder: Path) -> Writer:
    """Five episodes, number e of e + 1 steps; not closed."""
    writer = Writer(folder, plain_metadata())
    for number, (cut, begun) in enumerate(zip(CUT, BEGUN, strict=True)):
        episode = plain_episode(number, number + 1)
        end = np.arange(number + 1) == number
        ends = {"terminations": end & False, "truncations": end} if cut else {}
        writer.write(replace(episode, cut=cut, begun=begun, **ends))
    return writer


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    write(tmp_path / "d").close()
    yield tmp_path / "d"


def flags(folder: Path) -> tuple[list[bool], list[bool]]:
    with Reader(folder) as reader:
        return reader.episodes.cut.tolist(), reader.episodes.begun.tolist()


@pytest.mark.parametrize("format", ["minari", "parquet"])
def test_they_stay_so_in_other_datasets(folder: Path, tmp_path: Path, format: str) -> None:
    merge([folder, folder], tmp_path / "merged", format=format)
    assert flags(tmp_path / "merged") == (CUT * 2, BEGUN * 2)
    split(tmp_path / "merged", [tmp_path / "a", tmp_path / "b"], [0.5, 0.5])
    a, b = flags(tmp_path / "a"), flags(tmp_path / "b")
    both = [*zip(*a, strict=True), *zip(*b, strict=True)]
    assert sorted(both) == sorted(zip(CUT * 2, BEGUN * 2, strict=True))


def test_they_stay_so_when_a_recording_is_repaired(tmp_path: Path) -> None:
    write(tmp_path / "d").abandon()
    repair(tmp_path / "d")
    assert flags(tmp_path / "d") == (CUT, BEGUN)


def test_they_stay_so_without_the_index(folder: Path) -> None:
    (folder / "data" / "index.npz").unlink()
    assert flags(folder) == (CUT, BEGUN)


def test_they_stay_so_when_minari_adds_to_them(folder: Path) -> None:
    minari: Any = pytest.importorskip("minari")
    names = ("observations", "actions", "rewards", "terminations", "truncations")
    extra = plain_episode(7, 3)
    found = minari.MinariDataset(folder / "data")
    found.storage.update_episodes(
        [minari.data_collector.EpisodeBuffer(**{n: getattr(extra, n) for n in names})]
    )
    assert flags(folder) == ([*CUT, False], [*BEGUN, True])
    assert_same(minari.MinariDataset(folder / "data")[0], plain_episode(0, 1))


def test_what_does_not_say_is_whole(folder: Path, tmp_path: Path) -> None:
    index = folder / "data" / "index.npz"
    with np.load(index) as found:
        older = {name: found[name] for name in found.files if name != "begun"}
    held = io.BytesIO()
    np.savez(held, **older)
    index.write_bytes(held.getvalue())
    assert flags(folder) == (CUT, [True] * 5)
    index.unlink()
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        for number in range(5):
            del file[f"episode_{number}"].attrs["begun"]
    assert flags(folder)[1] == [True] * 5
    pq: Any = pytest.importorskip("pyarrow.parquet")
    merge([folder], tmp_path / "tables", format="parquet")
    part = tmp_path / "tables" / "data" / "part-00000.parquet"
    metadata = part.parent / "metadata.json"
    before = part.stat().st_size
    pq.write_table(pq.read_table(part).drop_columns("begun"), part)
    told = metadata.read_text().replace(f": {before}", f": {part.stat().st_size}")
    metadata.write_text(told)
    assert flags(tmp_path / "tables")[1] == [True] * 5


def test_their_returns_are_not_shown(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = info(folder)
    assert (found.cut, found.not_begun, found.fragments) == (2, 2, 3)
    assert found.returns is not None
    assert (found.returns.low, found.returns.high) == (0, 10)  # of the first and the last
    assert (found.lengths.low, found.lengths.high) == (1, 5)
    assert main(["data", "info", str(folder)]) == 0
    assert (
        "from 0 to 10 (3 not recorded from first step to last left out)" in capsys.readouterr().out
    )
    with Writer(tmp_path / "e", plain_metadata()) as writer:
        writer.write(replace(plain_episode(0, 3), begun=False))
    assert info(tmp_path / "e").returns is None
    assert main(["data", "info", str(tmp_path / "e")]) == 0
    assert "returns        not known: no episode was" in capsys.readouterr().out
