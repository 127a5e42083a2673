"""Episodes that end within an unroll, and the totals of those that go on."""

from typing import Any

import numpy as np

from dovetail.algorithm import Trajectory
from dovetail.graph.unroll import ActorState
from dovetail.runtime.host_unroll import _count_episodes


def test_episodes_are_counted_per_environment() -> None:
    """One that goes on, one that ends twice, one that ends with the last row."""
    fields: dict[str, Any] = dict.fromkeys(Trajectory._fields)
    fields["reward"] = np.array([[1, 2, 4], [1, 2, 4], [1, 2, 4], [1, 2, 4]], np.float32)
    fields["terminated"] = np.array([[0, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]], np.bool_)
    fields["truncated"] = np.array([[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1]], np.bool_)
    fields["valid"] = np.array([[1, 1, 1], [1, 0, 1], [1, 1, 1], [1, 0, 1]], np.bool_)
    before: dict[str, Any] = dict.fromkeys(ActorState._fields)
    before["episode_return"] = np.array([10, 20, 30], np.float32)
    before["episode_length"] = np.array([5, 6, 7], np.int32)

    rows: Any = Trajectory(**fields)
    episodes, after = _count_episodes(rows, ActorState(**before))
    *sums, info = episodes
    assert [np.asarray(x).tolist() for x in sums] == [[0, 2, 1], [0, 26, 46], [0, 8, 11]]
    assert [x.dtype for x in sums] == [np.int32, np.float32, np.int32]
    assert info == ()
    assert after.episode_return.tolist() == [14, 2, 0] and after.episode_return.dtype == np.float32
    assert after.episode_length.tolist() == [9, 0, 0] and after.episode_length.dtype == np.int32
    assert before["episode_return"].tolist() == [10, 20, 30]
