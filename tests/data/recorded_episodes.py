"""Episodes whose every number is known, in a space of every kind and in a plain one."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from gymnasium import spaces

from dovetail.data import Episode, Metadata, Source, Writer

MIXED = spaces.Dict(
    {
        "speed": spaces.Box(-1, 1, (3,), np.float64),
        "gear": spaces.Discrete(4, start=1),
        "camera": spaces.Box(0, 255, (32, 40, 3), np.uint8),
        "pair": spaces.Tuple([spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3)]),
    }
)
PLAIN = spaces.Box(-np.inf, np.inf, (2,), np.float32)
WHEEL = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 1], np.float32))
SOURCE = Source("test:Env-v0", "training", run="runs/x", algorithm="DQN", seed=3)


def stacked(samples: list[Any]) -> Any:
    return jax.tree.map(lambda *x: np.stack(x), *samples)


def mixed_episode(steps: int, seed: int = 0) -> Episode:
    """Of the spaces `MIXED` and `WHEEL`."""
    MIXED.seed(seed)
    WHEEL.seed(seed)
    end = np.arange(steps) == steps - 1
    return Episode(
        observations=stacked([dict(MIXED.sample()) for _ in range(steps + 1)]),
        actions=stacked([WHEEL.sample() for _ in range(steps)]),
        rewards=np.random.default_rng(seed).normal(size=steps).astype(np.float32),
        terminations=end & (seed % 2 == 0),
        truncations=end & (seed % 2 == 1),
        infos={"version": np.arange(steps), "log_probability": -np.ones(steps, np.float32)},
    )


def mixed_metadata() -> Metadata:
    infos = ("version", "log_probability")
    return Metadata(MIXED, WHEEL, "test:Env-v0", sources=(SOURCE,), infos=infos)


def plain_episode(number: int, steps: int) -> Episode:
    """Observation t of episode e is [e, t]; its reward is t, its action t modulo 3."""
    t = np.arange(steps + 1)
    end = t[:-1] == steps - 1
    return Episode(
        observations=np.stack([np.full_like(t, number), t], axis=-1).astype(np.float32),
        actions=t[:-1] % 3,
        rewards=t[:-1].astype(np.float32),
        terminations=end & (number % 2 == 0),
        truncations=end & (number % 2 == 1),
        infos={"version": np.full(steps, number)},
    )


def plain_metadata(**more: Any) -> Metadata:
    return Metadata(PLAIN, spaces.Discrete(3), "test:Plain-v0", sources=(SOURCE,), **more)


def plain_dataset(folder: Path, lengths: list[int], **more: Any) -> Path:
    with Writer(folder, plain_metadata(**more)) as writer:
        for number, steps in enumerate(lengths):
            writer.write(plain_episode(number, steps))
    return folder


def assert_same(found: Any, wanted: Any) -> None:
    """Two episodes, ours or Minari's, hold the same."""
    for name in ("observations", "actions", "rewards", "terminations", "truncations"):
        a, b = getattr(found, name), getattr(wanted, name)
        assert jax.tree.structure(a) == jax.tree.structure(b), name
        jax.tree.map(np.testing.assert_array_equal, a, b)
