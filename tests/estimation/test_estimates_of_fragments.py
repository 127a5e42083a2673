"""Estimates count whole episodes, and the states that these begin in."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from dovetail.algorithm import Algorithm, Task, Timestep
from dovetail.data import Episode, Metadata, Reader, Source, Writer
from dovetail.errors import UserError
from dovetail.estimation import FittedQ, estimate_policy
from dovetail.estimation.target import Target

QUICK = FittedQ(updates=600, batch=64, hidden_sizes=(), learning_rate=0.05, members=3)


@dataclass(frozen=True)
class First(Algorithm):
    """Always takes the first action."""

    def greedy(self, params: Any, carry: Any, timestep: Timestep) -> tuple[Any, Any]:
        return jnp.int32(params), carry


def dataset(folder: Path, begun: int, fragments: int) -> Path:
    """Episodes of one step: from state 0 they return 1, those that have not begun 100 from 1."""
    two, infos = spaces.Discrete(2), ("version", "log_probability")
    metadata = Metadata(two, two, "test:Two", sources=(Source("test:Two"),), infos=infos)
    end = np.array([True])
    with Writer(folder, metadata) as writer:
        for number in range(begun + fragments):
            whole = number < begun
            writer.write(
                Episode(
                    observations=np.full(2, 0 if whole else 1),
                    actions=np.array([0]),
                    rewards=np.array([1.0 if whole else 100.0]),
                    terminations=end,
                    truncations=~end,
                    infos={"log_probability": np.zeros(1)},
                    begun=whole,
                )
            )
    return folder


def target(reader: Reader) -> Target:
    return Target(First().bind(Task(reader.spec, 1, 1)), np.int32(0), 0.0)


def test_what_has_not_begun_does_not_count(tmp_path: Path) -> None:
    with Reader(dataset(tmp_path / "d", 30, 30)) as reader:
        found = estimate_policy(reader, target(reader), (), 0.9, QUICK)
    for one in found:
        assert abs(one.value - 1) < 3, one  # with the fragments it is about 50
    assert found[0].effective_episodes == pytest.approx(30)


def test_a_dataset_of_fragments_is_refused(tmp_path: Path) -> None:
    with (
        Reader(dataset(tmp_path / "d", 0, 3)) as reader,
        pytest.raises(UserError, match="No episode of .* was recorded from its first step, and"),
    ):
        estimate_policy(reader, target(reader), ("fqe",), 0.9, QUICK)
