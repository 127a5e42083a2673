"""Small datasets of control tasks, and an algorithm that needs one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np

from dovetail.algorithms import TD3
from dovetail.data import Episode, Metadata, Source, Writer

OFFLINE: dict[str, Any] = {"gradient_steps": 4, "batch_size": 8, "hidden_sizes": (8,)}
"""Options of small updates."""


@dataclass(frozen=True)
class OfflineTD3(TD3):
    """TD3 that is made for recorded data."""

    needs_data: ClassVar[bool] = True


def record_random(folder: Path, name: str, episodes: int, steps: int, **more: Any) -> Path:
    """A dataset of random actions in a Gymnasium environment, episodes of at most `steps` steps."""
    env = gymnasium.make(name, max_episode_steps=steps)
    env.action_space.seed(0)
    source = Source(f"gymnasium:{name}", "other")
    told: dict[str, Any] = {"environment": f"gymnasium:{name}", "sources": (source,)}
    metadata = Metadata(env.observation_space, env.action_space, **told | more)
    with env, Writer(folder, metadata) as writer:
        for number in range(episodes):
            writer.write(_episode(env, number))
    return folder


def record_controls(folder: Path) -> tuple[Path, Path]:
    """Datasets of CartPole and of Pendulum, a few short episodes each."""
    return (
        record_random(folder / "cartpole", "CartPole-v1", 6, 9),
        record_random(folder / "pendulum", "Pendulum-v1", 4, 9),
    )


def _episode(env: Any, seed: int) -> Episode:
    seen, actions, rewards, ends = [env.reset(seed=seed)[0]], [], [], []
    while not ends or not any(ends[-1]):
        actions.append(env.action_space.sample())
        observation, reward, *end, _ = env.step(actions[-1])
        seen.append(observation)
        rewards.append(reward)
        ends.append(end)
    terminations, truncations = np.array(ends).T
    return Episode(
        observations=np.stack(seen),
        actions=np.stack(actions),
        rewards=np.array(rewards, np.float32),
        terminations=terminations,
        truncations=truncations,
    )
