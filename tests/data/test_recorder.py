"""Trajectories of several environments become episodes, whole and in order."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from dovetail.data import Reader, Recorder, Source, Writer, record, writer
from dovetail.data import recorder as recording
from dovetail.data.metadata import Metadata
from dovetail.data.recorder import Lanes, RecordedSteps, own_spaces
from dovetail.envs.resolve import resolve
from dovetail.errors import UserError

BOX = spaces.Box(-np.inf, np.inf, (1,), np.float32)


def trajectory(**columns: Any) -> RecordedSteps:
    """Steps of one number per place, [T, B]; an observation's next one is it plus 1."""
    first = np.asarray(columns["observation"], np.float32)
    none = np.zeros(first.shape, bool)
    given = {
        "action": none.astype(int),
        "reward": first,
        "terminated": none,
        "truncated": none,
        "first": none,
        "valid": ~none,
        "log_probability": None,
        **{name: np.asarray(x, bool) for name, x in columns.items() if name != "observation"},
    }
    return RecordedSteps(
        observation=first[..., None], next_observation=first[..., None] + 1, **given
    )


def read(folder: Path) -> list[tuple[list[float], bool, bool, bool]]:
    """(observations, terminated, truncated, cut) of every episode; each has begun."""
    with Reader(folder) as reader:
        assert reader.episodes.begun.all()
    return read_fragments(folder)


def read_fragments(folder: Path) -> list[tuple[list[float], bool, bool, bool]]:
    """The same, of episodes that need not have begun."""
    with Reader(folder) as reader:
        return [
            (
                episode.observations[:, 0].tolist(),
                bool(episode.terminations[-1]),
                bool(episode.truncations[-1]),
                episode.cut,
            )
            for episode in reader
        ]


def recorder(folder: Path) -> Recorder:
    metadata = Metadata(BOX, spaces.Discrete(2), "t:T", sources=(Source("t:T"),))
    return Recorder(Writer(folder, metadata))


def test_episodes_go_on_over_trajectories(tmp_path: Path) -> None:
    with recorder(tmp_path / "d") as found:
        found.add(
            trajectory(
                observation=[[0, 100], [1, 101], [2, 102]],
                terminated=[[0, 0], [0, 1], [0, 0]],
                first=[[1, 1], [0, 0], [0, 1]],
            ),
            version=1,
        )
        found.add(
            trajectory(
                observation=[[3, 103], [4, 104], [10, 105]],
                truncated=[[0, 0], [1, 0], [0, 0]],
                first=[[0, 0], [0, 0], [1, 0]],
            ),
            version=2,
        )
    assert read(tmp_path / "d") == [
        ([100, 101, 102], True, False, False),
        ([0, 1, 2, 3, 4, 5], False, True, False),
        ([10, 11], False, True, True),
        ([102, 103, 104, 105, 106], False, True, True),
    ]
    with Reader(tmp_path / "d") as reader:
        assert reader.episode(1).infos["version"].tolist() == [1, 1, 1, 2, 2]


def test_episodes_follow_their_environments_from_column_to_column(tmp_path: Path) -> None:
    """What the environments show is the same: only whose the columns are tells them apart."""
    same = trajectory(observation=[[0, 0], [1, 1]], first=[[1, 1], [0, 0]])
    more = trajectory(observation=[[2, 2], [3, 3]], terminated=[[0, 0], [0, 1]])
    with recorder(tmp_path / "d") as found:
        found.add(same, np.array([10, 20]), Lanes(np.array([7, 3]), np.array([0, 5])))
        found.add(more, np.array([21, 11]), Lanes(np.array([3, 7]), np.array([6, 1])))
    with Reader(tmp_path / "d") as reader:
        versions = [episode.infos["version"].tolist() for episode in reader]
        assert versions == [[10, 10, 11, 11], [20, 20, 21, 21]]
        assert [episode.cut for episode in reader] == [False, True]


def test_an_episode_ends_where_steps_are_missing(tmp_path: Path) -> None:
    one = np.zeros(1, np.int64)
    with recorder(tmp_path / "d") as found:
        found.add(trajectory(observation=[[0], [1]], first=[[1], [0]]), 0, Lanes(one, one))
        rest = trajectory(observation=[[2], [3]], terminated=[[0], [1]])
        found.add(rest, 2, Lanes(one, one + 2))
    with Reader(tmp_path / "d") as reader:
        seen = [episode.observations[:, 0].tolist() for episode in reader]
        assert seen == [[0, 1, 2], [2, 3, 4]]
        assert reader.episodes.begun.tolist() == [True, False]
        assert reader.episodes.cut.tolist() == [True, False]


def test_steps_that_only_reset_are_left_out(tmp_path: Path) -> None:
    with recorder(tmp_path / "d") as found:
        found.add(
            trajectory(
                observation=[[0], [1], [9], [20], [21]],
                terminated=[[0], [1], [0], [0], [1]],
                first=[[1], [0], [0], [1], [0]],
                valid=[[1], [1], [0], [1], [1]],
            )
        )
    assert read(tmp_path / "d") == [
        ([0, 1, 2], True, False, False),
        ([20, 21, 22], True, False, False),
    ]


def test_an_environment_that_was_set_up_anew_leaves_a_cut_episode(tmp_path: Path) -> None:
    with recorder(tmp_path / "d") as found:
        found.add(trajectory(observation=[[0], [1]], first=[[1], [0]]))
        found.add(trajectory(observation=[[50], [51]], first=[[1], [0]], terminated=[[0], [1]]))
    assert read(tmp_path / "d") == [
        ([0, 1, 2], False, True, True),
        ([50, 51, 52], True, False, False),
    ]


def test_what_is_open_can_be_left_out(tmp_path: Path) -> None:
    found = recorder(tmp_path / "d")
    found.add(
        trajectory(observation=[[0], [1], [2]], terminated=[[0], [1], [0]], first=[[1], [0], [1]])
    )
    found.close(cut=False)
    assert read(tmp_path / "d") == [([0, 1, 2], True, False, False)]


def test_what_was_under_way_when_the_recording_began_has_not_begun(tmp_path: Path) -> None:
    with recorder(tmp_path / "d") as found:
        found.add(trajectory(observation=[[5], [6]], terminated=[[0], [1]]))
        found.add(trajectory(observation=[[0], [1]], first=[[1], [0]]))
        found.add(trajectory(observation=[[70], [71]], truncated=[[0], [1]]))  # of another one
    assert read_fragments(tmp_path / "d") == [
        ([5, 6, 7], True, False, False),
        ([0, 1, 2], False, True, True),
        ([70, 71, 72], False, True, False),
    ]
    with Reader(tmp_path / "d") as reader:
        assert reader.episodes.begun.tolist() == [False, True, False]
        assert [episode.begun for episode in reader] == [False, True, False]
        assert not reader.episodes.whole.any()


def test_episodes_that_take_too_much_memory_are_written_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "OPEN_BYTES", 300)
    seen = []
    with recorder(tmp_path / "d") as found:
        for time in range(0, 60, 2):
            steps = np.array([[time], [time + 1]]) + np.array([0, 100])
            ends = [[0, time == 4], [0, 0]]
            found.add(trajectory(observation=steps, first=steps == [0, 105], terminated=ends), time)
            seen.append(found.writer.steps)
    assert all(written >= 2 * 2 * (n + 1) - 40 for n, written in enumerate(seen))
    with Reader(tmp_path / "d") as reader:
        assert reader.num_steps == 120 and reader.num_episodes > 4
        lines: dict[bool, list[Any]] = {False: [], True: []}
        for episode in reader:
            lines[bool(episode.observations[0, 0] >= 100)].append(episode)
        for begin, line in zip((0, 100), lines.values(), strict=True):
            rows = np.concatenate([episode.rewards for episode in line])
            assert rows.tolist() == list(range(begin, begin + 60))
        assert [one.begun for one in lines[False]] == [True] + [False] * (len(lines[False]) - 1)
        assert all(one.cut for one in lines[False])


def test_an_episode_that_no_journal_can_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MOST_BYTES", 8)
    with (
        pytest.raises(UserError, match="has 12 bytes of observations, and 8 are the most that can"),
        recorder(tmp_path / "d") as found,
    ):
        found.add(trajectory(observation=[[0], [1]], terminated=[[0], [1]]))


def test_nothing_is_left_of_a_recording_that_never_began(tmp_path: Path) -> None:
    with recorder(tmp_path / "d"):
        pass
    assert not (tmp_path / "d").exists()


def test_after_an_error_what_was_recorded_can_be_repaired(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), recorder(tmp_path / "d") as found:
        found.add(trajectory(observation=[[0]], terminated=[[1]]))
        raise ZeroDivisionError
    assert (tmp_path / "d" / "recording.part").exists()


@pytest.mark.parametrize("env", ["Pendulum-v1", "dovetail:CartPole-v1", "Acrobot-v1"])
def test_an_environments_own_spaces_are_recorded(env: str) -> None:
    import gymnasium

    found = resolve(env)
    single = gymnasium.make(env.removeprefix("dovetail:"))
    observation, action, described = own_spaces(found)
    assert (observation, action) == (single.observation_space, single.action_space)
    assert described is not None and env.removeprefix("dovetail:") in described


def test_an_environment_without_gymnasiums_spaces(tmp_path: Path) -> None:
    found = resolve("gymnax:Breakout-MinAtar")
    observation, action, described = own_spaces(found)
    assert described is None
    assert observation.shape == found.spec.observation.shape
    assert action == spaces.Discrete(found.spec.action.n)  # type: ignore[union-attr]


def test_clipped_actions_keep_what_the_policy_chose(tmp_path: Path) -> None:
    env = resolve("Pendulum-v1")
    with record(tmp_path / "d", env, (Source(env.spec.id),), log_probabilities=True) as found:
        seen = np.zeros((2, 1, 3), np.float32)
        none = np.zeros((2, 1), bool)
        steps = RecordedSteps(
            observation=seen,
            action=np.array([[[0.5]], [[3.0]]], np.float32),
            reward=none.astype(np.float32),
            terminated=none,
            truncated=np.array([[False], [True]]),
            first=none,
            valid=~none,
            next_observation=seen,
            log_probability=np.array([[-1.0], [-2.0]], np.float32),
        )
        found.add(steps, version=5)
    with Reader(tmp_path / "d") as reader:
        assert reader.episode(0).actions.tolist() == [[1.0], [2.0]]  # the torque, within its bounds
        rows = reader.rows(0, 1)
        assert rows.action[:2].tolist() == [[0.5], [3.0]]
        assert rows.log_probability[:2].tolist() == [-1, -2]
        assert rows.version[:2].tolist() == [5, 5]
