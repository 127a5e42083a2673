"""A disk that is full when a recording closes, and one that loses what was not synced."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from recorded_episodes import assert_same, plain_dataset, plain_episode, plain_metadata

from dovetail.data import Reader, Writer, repair
from dovetail.data.metadata import HDF5, TABLE
from dovetail.errors import UserError

PROGRAM = """
import resource, sys
sys.path.insert(0, sys.argv[4])
from recorded_episodes import plain_metadata, plain_episode
from dovetail.data import Writer, merge
from dovetail.errors import UserError
what, kind, limit = sys.argv[2], sys.argv[3], (int(sys.argv[5]), resource.RLIM_INFINITY)
writer = Writer(sys.argv[1], plain_metadata(data_format=kind))
for number in range(50):
    writer.write(plain_episode(number, 1000))
try:
    if what == "close":
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        writer.close()
    else:
        writer.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        merge([sys.argv[1]], sys.argv[1] + "-merged")
except UserError as error:
    print(error)
"""


def run(folder: Path, what: str, kind: str, limit: int) -> str:
    """What is said where no file may have more bytes than this."""
    here = Path(__file__).parent
    words = [sys.executable, "-c", PROGRAM, str(folder), what, kind, str(here), str(limit)]
    env = {**os.environ, "PYTHONPATH": str(here.parents[1])}
    done = subprocess.run(words, env=env, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    ("kind", "limit"), [(HDF5, 10), (HDF5, 600_000), (HDF5, 1_400_000), (TABLE, 100_000)]
)
def test_a_recording_that_does_not_fit_is_kept(tmp_path: Path, kind: str, limit: int) -> None:
    folder = tmp_path / "d"
    assert run(folder, "close", kind, limit) == (
        f"{folder} could not be finished (File too large): all that was recorded is kept in "
        f"{folder / 'recording.part'}; make room and finish it with: dovetail data repair "
        f"{folder}\n"
    )
    assert [path.name for path in folder.iterdir()] == ["recording.part"]
    assert repair(folder)[0].episodes == 50
    with Reader(folder) as reader:
        assert_same(reader.episode(49), plain_episode(49, 1000))


def test_a_copy_that_does_not_fit_is_removed(tmp_path: Path) -> None:
    said = run(tmp_path / "d", "merge", HDF5, 600_000)
    assert said.startswith(f"Cannot write {tmp_path / 'd-merged'} (File too large): free some")
    assert not any((tmp_path / "d-merged").iterdir())


def test_room_that_was_not_needed_is_given_back(tmp_path: Path) -> None:
    folder = plain_dataset(tmp_path / "d", [1])
    assert (folder / "data" / "main_data.hdf5").stat().st_size < 10_000


@pytest.mark.parametrize("kind", [HDF5, TABLE])
def test_the_disk_has_all_before_the_journal_goes(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "d"
    synced: set[str] = set()
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        assert (folder / "recording.part").exists()
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(f"{folder}"))
        fsync(descriptor)

    writer = Writer(folder, plain_metadata(data_format=kind))
    writer.write(plain_episode(0, 4))
    monkeypatch.setattr(os, "fsync", watched)
    writer.close()
    own = {HDF5: {"/data/main_data.hdf5.part", "/data/index.npz"}, TABLE: {"/data/part.part"}}
    assert own[kind] | {"", "/data", "/recording.part"} <= synced
    assert not (folder / "recording.part").exists()


def test_a_journal_that_cannot_be_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    writer = Writer(tmp_path / "d", plain_metadata())
    writer.write(plain_episode(0, 4))
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"\(Permission denied\)"):
        patch.setattr(Path, "unlink", refused)
        writer.close()
    assert repair(tmp_path / "d")[0].episodes == 1
