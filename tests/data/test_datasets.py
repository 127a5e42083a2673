"""Datasets hold what was written, in both formats, and say what is wrong with them."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import pytest
from gymnasium import spaces
from recorded_episodes import (
    MIXED,
    WHEEL,
    assert_same,
    mixed_episode,
    mixed_metadata,
    plain_dataset,
    plain_episode,
    plain_metadata,
    stacked,
)

from dovetail.data import Episode, Metadata, Reader, Source, Writer, check_fits, info, merge, repair
from dovetail.data.hdf5 import Piece
from dovetail.data.spaces import Codec, from_json, spaces_of, to_json
from dovetail.envs.interface import Continuous, Discrete, EnvSpec
from dovetail.envs.resolve import resolve
from dovetail.errors import UserError

FORMATS = ("minari", "parquet")


@pytest.fixture(params=FORMATS)
def mixed(request: Any, tmp_path: Path) -> tuple[Path, list[Episode]]:
    """A dataset of spaces of every kind, and what was written to it."""
    episodes = [mixed_episode(steps, seed) for seed, steps in enumerate([3, 1, 5, 2])]
    with Writer(tmp_path / "first", mixed_metadata()) as writer:
        for episode in episodes:
            writer.write(episode)
    if request.param == "parquet":
        merge([tmp_path / "first"], tmp_path / "second", format="parquet")
        return tmp_path / "second", episodes
    return tmp_path / "first", episodes


def test_what_was_written_is_read(mixed: tuple[Path, list[Episode]]) -> None:
    folder, episodes = mixed
    with Reader(folder) as reader:
        assert (reader.num_episodes, reader.num_steps) == (4, 11)
        assert reader.episodes.lengths.tolist() == [3, 1, 5, 2]
        for number in (2, 0, 3, 1):
            assert_same(reader.episode(number), episodes[number])
            assert reader.episode(number).infos["version"].tolist() == list(
                range(len(episodes[number]))
            )
        assert reader.metadata.sources == (
            Source("test:Env-v0", "training", "runs/x", "DQN", 3, None),
        )


def test_rows_are_what_algorithms_see(mixed: tuple[Path, list[Episode]]) -> None:
    folder, episodes = mixed
    with Reader(folder) as reader:
        rows = reader.rows(0, 2)
        assert rows.last.tolist() == [False, False, False, True, False, True]
        assert rows.observation["camera"].dtype == np.uint8
        # gear (4) + pair (2 + 3, 3) + speed (3), by name
        assert rows.observation["vector"].shape == (6, 15)
        own = reader.codec.own_observations(rows.observation)
        both = jax.tree.map(lambda *x: np.concatenate(x), *(e.observations for e in episodes[:2]))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), own, both)
        assert np.abs(rows.action).max() <= 1
        np.testing.assert_allclose(
            reader.codec.own_actions(rows.action[:3]), episodes[0].actions, rtol=1e-5, atol=1e-6
        )
        assert rows.log_probability[:3].tolist() == [-1, -1, -1]


def test_any_steps_of_any_episode(tmp_path: Path) -> None:
    with Reader(plain_dataset(tmp_path / "d", [4, 2, 6])) as reader:
        rows = reader.pieces([Piece(2, 3, 5), Piece(0, 2, 5)])
        assert rows.observation.tolist() == [[2, 3], [2, 4], [0, 2], [0, 3], [0, 4]]
        assert rows.last.tolist() == [False, False, False, False, True]
        assert rows.reward.tolist() == [3, 4, 2, 3, 0]
        found, after = reader.transitions(np.array([11, 0, 5]))
        assert found.observation.tolist() == [[2, 5], [0, 0], [1, 1]]
        assert after.tolist() == [[2, 6], [0, 1], [1, 2]]
        assert found.truncated.tolist() == [False, False, True]
        assert found.terminated.tolist() == [True, False, False]


# Minari.


def test_minari_loads_what_is_written_here(tmp_path: Path) -> None:
    minari: Any = pytest.importorskip("minari")
    episodes = [mixed_episode(steps, seed) for seed, steps in enumerate([3, 1, 5])]
    with Writer(tmp_path / "drive", mixed_metadata()) as writer:
        for episode in episodes:
            writer.write(episode)
    found = minari.MinariDataset(tmp_path / "drive" / "data")
    assert (found.total_episodes, found.total_steps) == (3, 9)
    assert found.id == "drive-v0"
    assert found.observation_space == MIXED and found.action_space == WHEEL
    for one, written in zip(found.iterate_episodes(), episodes, strict=True):
        assert_same(one, written)
    assert found[1].infos["log_probability"].tolist() == [-1]


def test_minari_finds_a_folder_that_has_a_version_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minari: Any = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    plain_dataset(tmp_path / "first-v0", [4, 2])
    found = minari.load_dataset("first-v0")
    assert (found.id, found.total_steps) == ("first-v0", 6)
    assert_same(found[1], plain_episode(1, 2))
    assert list(minari.list_local_datasets()) == ["first-v0"]
    plain_dataset(tmp_path / "second", [3])
    assert minari.load_dataset("second").id == "second-v0"


@pytest.mark.parametrize("jpeg", [False, True])
def test_what_minari_writes_is_read_here(tmp_path: Path, jpeg: bool) -> None:
    minari: Any = pytest.importorskip("minari")
    from minari.dataset.minari_storage import MinariStorage

    episodes = [mixed_episode(steps, seed) for seed, steps in enumerate([3, 1, 5])]
    storage = MinariStorage.new(tmp_path / "data", MIXED, WHEEL, jpeg_encoding=jpeg)
    for episode in episodes:
        names = ("observations", "actions", "rewards", "terminations", "truncations")
        storage.update_episodes(
            [minari.data_collector.EpisodeBuffer(**{n: getattr(episode, n) for n in names})]
        )
    with Reader(tmp_path) as reader:
        assert reader.num_steps == 9
        for number, written in enumerate(episodes):
            found = reader.episode(number)
            if jpeg:  # which loses a little
                assert found.observations["camera"].shape == written.observations["camera"].shape
                found.observations["camera"] = written.observations["camera"]
            assert_same(found, written)
    # rewritten here, it is read in any order, and Minari still reads it
    merge([tmp_path], tmp_path / "ours")
    if not jpeg:
        again = minari.MinariDataset(tmp_path / "ours" / "data")
        assert_same(again[2], episodes[2])


def test_a_picture_that_is_none_is_named(tmp_path: Path) -> None:
    minari: Any = pytest.importorskip("minari")
    from minari.dataset.minari_storage import MinariStorage

    storage = MinariStorage.new(tmp_path / "data", MIXED, WHEEL, jpeg_encoding=True)
    names = ("observations", "actions", "rewards", "terminations", "truncations")
    for seed in range(2):
        whole = {name: getattr(mixed_episode(3, seed), name) for name in names}
        storage.update_episodes([minari.data_collector.EpisodeBuffer(**whole)])
    file = tmp_path / "data" / "main_data.hdf5"
    with h5py.File(file, "a") as opened:
        frames: Any = opened["episode_1/observations/camera"]
        frames[2] = frames[2][:20]
    with Reader(tmp_path) as reader:
        reader.rows(0, 1)
    with pytest.raises(UserError) as raised:
        info(tmp_path, check=True)
    assert str(raised.value).startswith(
        f"{file} is damaged or half-written (episode 1, observations/camera: "
    )


def test_what_minari_added_is_read_here(tmp_path: Path) -> None:
    minari: Any = pytest.importorskip("minari")
    folder = plain_dataset(tmp_path / "d", [4, 2])
    extra = plain_episode(7, 3)
    names = ("observations", "actions", "rewards", "terminations", "truncations")
    minari.MinariDataset(folder / "data").storage.update_episodes(
        [minari.data_collector.EpisodeBuffer(**{n: getattr(extra, n) for n in names})]
    )
    with Reader(folder) as reader:
        assert reader.episodes.lengths.tolist() == [4, 2, 3]
        assert_same(reader.episode(1), plain_episode(1, 2))
        assert_same(reader.episode(2), extra)
        assert reader.episode(2).infos["version"].tolist() == [-1, -1, -1]


def test_an_episode_that_minari_left_without_an_end_is_cut(tmp_path: Path) -> None:
    folder = plain_dataset(tmp_path / "d", [4])
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        terminations: Any = file["episode_0/terminations"]
        terminations[:] = False
    (folder / "data" / "index.npz").unlink()
    with Reader(folder) as reader:
        assert reader.episode(0).truncations.tolist() == [False, False, False, True]
        assert reader.episode(0).cut


@pytest.mark.parametrize("space", [MIXED, WHEEL, spaces.MultiBinary((2, 3)), spaces.Discrete(3)])
def test_spaces_as_minari_writes_them(space: Any) -> None:
    serialization: Any = pytest.importorskip("minari.serialization")
    assert to_json(space) == json.loads(serialization.serialize_space(space))
    assert from_json(to_json(space)) == space


# Mistakes.


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as raised:
        Reader(folder).rows(0, 1)
    return str(raised.value)


def test_what_is_no_dataset(tmp_path: Path) -> None:
    assert refused(tmp_path / "no") == (
        f"There is no dataset {tmp_path / 'no'}: give the folder of a dataset."
    )
    assert "is no dataset, it has no data/metadata.json" in refused(tmp_path)
    folder = plain_dataset(tmp_path / "d", [4])
    assert f"give {folder} instead" in refused(folder / "data")
    with pytest.raises(UserError, match="is not empty, and a dataset never overwrites anything"):
        Writer(folder, plain_metadata())


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    folder = plain_dataset(tmp_path / "d", [400, 200])
    file = folder / "data" / "main_data.hdf5"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert refused(folder).startswith(f"{file} is cut short: it has {len(whole) - 100:,} bytes of ")
    spot = whole.index(np.array([0, 7], np.float32).tobytes())  # an observation
    file.write_bytes(whole[:spot] + b"\x01" + whole[spot + 1 :])
    assert refused(folder) == (
        f"{file} is damaged: episode 0 is not what was written; take it from a copy of the dataset."
    )
    file.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    (folder / "data" / "index.npz").write_bytes(b"nothing")
    assert refused(folder).startswith(f"{folder / 'data' / 'index.npz'} is damaged")
    (folder / "data" / "index.npz").unlink()
    assert refused(folder).startswith(f"{file} is damaged or half-written")
    file.unlink()
    assert refused(folder) == f"{file} is missing: take it from a copy of the dataset."


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    merge([plain_dataset(tmp_path / "d", [400, 200])], tmp_path / "p", format="parquet")
    file = tmp_path / "p" / "data" / "part-00000.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert refused(tmp_path / "p").startswith(f"{file} is damaged: it has {len(whole) - 1:,} bytes")
    file.write_bytes(whole[:200] + bytes(100) + whole[300:])
    assert refused(tmp_path / "p").startswith(f"{file} is damaged (")
    file.unlink()
    assert refused(tmp_path / "p") == f"{file} is missing: take it from a copy of the dataset."


def test_damaged_metadata_are_named(tmp_path: Path) -> None:
    folder = plain_dataset(tmp_path / "d", [4])
    place = folder / "data" / "metadata.json"
    record = json.loads(place.read_text())
    place.write_text(json.dumps(record)[:-9])
    assert refused(folder).startswith(f"{place} is damaged (")
    place.write_text(json.dumps(record | {"data_format": "arrow"}))
    assert "is in Minari's format 'arrow', which is not read here" in refused(folder)
    place.write_text(json.dumps(record | {"dovetail": {"format": 9}}))
    assert "has format 9, but this Dovetail reads format 1" in refused(folder)
    place.write_text(json.dumps(record | {"total_episodes": 0}))
    assert refused(folder) == f"The dataset {folder} is empty: it has no episode."


@pytest.mark.parametrize("what", ["observations", "rewards"])
def test_numbers_that_are_none_are_named(tmp_path: Path, what: str) -> None:
    bad = plain_episode(1, 5)
    getattr(bad, what)[3] = np.nan
    with Writer(tmp_path / "d", plain_metadata()) as writer:
        for episode in (plain_episode(0, 4), bad, plain_episode(2, 3)):
            writer.write(episode)
    with Reader(tmp_path / "d") as reader:
        assert reader.rows(2, 3).reward.tolist() == [0, 1, 2, 0]
        with pytest.raises(UserError) as raised:
            reader.pieces([Piece(0, 1, 3), Piece(1, 2, 6)])
    assert str(raised.value).startswith(
        f"The dataset {tmp_path / 'd'} has nan in {what} of episode 1, step 3: leave such"
    )
    info(tmp_path / "d")
    with pytest.raises(UserError, match="episode 1, step 3"):
        info(tmp_path / "d", check=True)
    made = merge([tmp_path / "d"], tmp_path / "clean", drop_invalid=True)
    assert (made.dropped, made.metadata.episodes) == (1, 2)
    assert info(tmp_path / "clean", check=True).checked


CHOICES = spaces.Dict(
    {
        "gear": spaces.Discrete(4, start=1),
        "lamps": spaces.MultiBinary(3),
        "pair": spaces.MultiDiscrete([2, 3], start=[0, 5]),
    }
)
PEDAL = spaces.Discrete(3, start=5)


def choices_dataset(folder: Path, path: str, value: int) -> Path:
    """Three episodes of four steps; `value` is in the second one's step 2, at `path`."""
    CHOICES.seed(0)
    end = np.arange(4) == 3
    with Writer(folder, Metadata(CHOICES, PEDAL, sources=(Source("e"),))) as writer:
        for number in range(3):
            seen = stacked([dict(CHOICES.sample()) for _ in range(5)])
            actions = np.array([5, 6, 7, 5])
            if number == 1:
                place = actions if path == "actions" else seen[path.partition("/")[2]]
                place.reshape(len(place), -1)[2, -1] = value
            writer.write(Episode(seen, actions, np.ones(4), end, ~end & False))
    return folder


@pytest.mark.parametrize(
    "path, value, space",
    [
        ("observations/gear", 5, "Discrete(4, start=1)"),
        ("observations/gear", 0, "Discrete(4, start=1)"),
        ("observations/pair", 8, str(CHOICES["pair"])),
        ("observations/lamps", 2, "MultiBinary(3)"),
        ("actions", 8, "Discrete(3, start=5)"),
        ("actions", 0, "Discrete(3, start=5)"),
    ],
)
@pytest.mark.parametrize("format", FORMATS)
def test_choices_that_their_space_does_not_have_are_named(
    tmp_path: Path, path: str, value: int, space: str, format: str
) -> None:
    choices_dataset(tmp_path / "written", path, value)
    folder = tmp_path / "d"
    merge([tmp_path / "written"], folder, format=format)
    with Reader(folder) as reader:
        assert reader.rows(2, 3).action[:4].tolist() == [0, 1, 2, 0]
        with pytest.raises(UserError) as raised:
            reader.rows(0, 3)
    assert str(raised.value) == (
        f"The dataset {folder} has {value} in {path} of episode 1, step 2, which is outside of "
        f"{space}: leave such episodes out with dovetail data merge {folder} --drop-invalid --out "
        "NEW."
    )
    with pytest.raises(UserError, match="episode 1, step 2, which is outside of"):
        info(folder, check=True)
    made = merge([folder], tmp_path / "clean", drop_invalid=True)
    assert (made.dropped, made.metadata.episodes) == (1, 2)
    assert info(tmp_path / "clean", check=True).checked


@pytest.mark.parametrize(
    "spec, sentence",
    [
        (
            EnvSpec("a:B", jax.ShapeDtypeStruct((3,), np.float32), Discrete(3)),
            "has observations float32[2], but a:B shows float32[3]",
        ),
        (
            EnvSpec("a:B", jax.ShapeDtypeStruct((2,), np.float32), Continuous(1, True)),
            "has actions Discrete(n=3), but a:B takes Continuous(size=1, bounded=True)",
        ),
    ],
)
def test_spaces_that_do_not_fit(tmp_path: Path, spec: EnvSpec, sentence: str) -> None:
    with Reader(plain_dataset(tmp_path / "d", [4])) as reader:
        with pytest.raises(UserError, match=re.escape(sentence)):
            check_fits(reader, spec)
        check_fits(reader, reader.spec)


def test_actions_of_other_bounds_do_not_fit(tmp_path: Path) -> None:
    """Else 1 would stand for a whole turn of the wheel in one, and for half of one in the other."""
    with Writer(tmp_path / "d", mixed_metadata()) as writer:
        writer.write(mixed_episode(3))
    with Reader(tmp_path / "d") as reader:
        spec = reader.spec
        assert spec.bounds == ((-2, 0), (2, 1))
        with pytest.raises(UserError) as raised:
            check_fits(reader, replace(spec, id="a:B", bounds=((-2, -1), (2, 1))))
        assert str(raised.value) == (
            f"The dataset {tmp_path / 'd'} has actions from 0 to 1 (entry 1), but a:B takes them "
            "from -1 to 1: give a dataset of this environment, or an environment with the "
            "dataset's bounds."
        )
        for bounds in (spec.bounds, None, ((-np.inf, 0), (2.000001, np.inf))):
            check_fits(reader, replace(spec, bounds=bounds))


@pytest.mark.parametrize("name", ["gymnasium:Pendulum-v1", "gymnax:Pendulum-v1"])
def test_bounds_of_actions_are_the_environments_own(name: str) -> None:
    found = resolve(name)
    assert found.spec.bounds == ((-2,), (2,))
    if found.host is not None:
        with closing(found.host(1)) as host:
            assert host.spec.bounds == found.spec.bounds
    _, action = spaces_of(found.spec)
    assert action == spaces.Box(-2, 2, (1,), np.float32)
    assert resolve("CartPole-v1").spec.bounds is None


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"rewards": np.zeros(3)}, "An episode of 3 steps has 5 observations: give 4"),
        ({"truncations": np.zeros(3)}, "An episode of 4 steps has 3 truncations: give 4."),
        ({"terminations": np.zeros(4, bool)}, "neither terminates nor is truncated at its last"),
        ({"truncations": np.array([0, 1, 0, 0])}, "ends at step 1 already"),
        ({"observations": np.zeros((5, 3))}, "observations of shape (3,), but the dataset's space"),
        ({"source": 2}, "names source 2, but the dataset has 1"),
    ],
)
def test_episodes_that_do_not_fit(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    with (
        pytest.raises(UserError, match=re.escape(sentence)),
        Writer(tmp_path / "d", plain_metadata()) as writer,
    ):
        writer.write(replace(plain_episode(0, 4), **change))


def test_a_space_that_cannot_be_stored(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot hold elements of the space Text"):
        Writer(tmp_path / "d", Metadata(spaces.Text(3), spaces.Discrete(2)))


def test_a_package_that_is_missing_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UserError) as raised:
        Writer(tmp_path / "d", plain_metadata())
    assert str(raised.value) == (
        "Datasets need h5py, which is not installed: pip install 'dovetail[data]'"
    )
    assert not (tmp_path / "d").exists()


def test_nothing_written_is_no_dataset(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "d", plain_metadata())
    with pytest.raises(UserError, match="No episode was written to .*: it would be empty"):
        writer.close()
    assert not (tmp_path / "d").exists()


# Killed.


def test_what_a_killed_process_wrote_is_named_and_repaired(tmp_path: Path) -> None:
    program = """
import sys, os, signal
sys.path.insert(0, sys.argv[2])
from recorded_episodes import plain_metadata, plain_episode
from dovetail.data import Writer
writer = Writer(sys.argv[1], plain_metadata())
for number in range(5):
    writer.write(plain_episode(number, 4))
os.kill(os.getpid(), signal.SIGKILL)
"""
    folder = tmp_path / "d"
    words = [sys.executable, "-c", program, str(folder), str(Path(__file__).parent)]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": root}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert refused(folder) == (
        f"{folder} is half-written: its recording was not closed ({folder / 'recording.part'} is "
        f"still there). Finish it with: dovetail data repair {folder}"
    )
    journal = folder / "recording.part"
    os.truncate(journal, journal.stat().st_size - 7)
    metadata, lost = repair(folder)
    assert metadata.episodes == 4
    assert lost is not None and "of recording.part is cut short" in lost
    with Reader(folder) as reader:
        assert_same(reader.episode(3), plain_episode(3, 4))
    with pytest.raises(UserError, match="has no recording.part: there is nothing to repair"):
        repair(folder)


def test_a_recording_without_a_whole_episode_is_not_repaired(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "d", plain_metadata())  # as if it were killed here
    with pytest.raises(UserError, match="holds no whole episode"):
        repair(tmp_path / "d")
    writer.abandon()
    assert not (tmp_path / "d").exists()


def test_a_copy_that_was_interrupted_is_named(tmp_path: Path) -> None:
    (tmp_path / "d" / "data").mkdir(parents=True)
    (tmp_path / "d" / "data" / "main_data.hdf5.part").write_bytes(b"some")
    assert "is half-written: what made it was interrupted" in refused(tmp_path / "d")


# What algorithms see.


def test_actions_there_and_back() -> None:
    low, high = np.array([[-2, 0, -np.inf], [2, 5, 1]], np.float32)
    box = spaces.Box(low, high)
    codec = Codec(MIXED, box, "test")
    own = np.array([[-2, 2.5, -7], [1, 5, 0.5]], np.float32)
    assert codec.actions(own).tolist() == [[-1, 0, -7], [0.5, 1, 0.5]]
    np.testing.assert_allclose(codec.own_actions(codec.actions(own)), own)
    codec = Codec(MIXED, spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])), "test")
    own = np.array([[[1, 2], [3, 4]]])
    assert codec.actions(own).tolist() == [[1, 2, 3, 4]]
    assert codec.own_actions(codec.actions(own)).tolist() == own.tolist()
    codec = Codec(MIXED, spaces.Discrete(3, start=5), "test")
    assert codec.actions(np.array([5, 7])).tolist() == [0, 2]
    codec = Codec(MIXED, spaces.MultiBinary(2), "test")
    assert codec.actions(np.array([[1, 0]], np.int8)).tolist() == [[1, 0]]
