"""Recorded datasets of mixed quality: some of a controller that can, some of one that cannot."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.algorithm import Algorithm, Task
from dovetail.data import merge, record
from dovetail.data.episode import Source
from dovetail.envs.resolve import resolve
from dovetail.evaluation.evaluate import evaluate

PENDULUM, CARTPOLE = "gymnax:Pendulum-v1", "dovetail:CartPole-v1"


@dataclass(frozen=True)
class Controller(Algorithm):
    """Acts by hand-written rules, if it is good."""

    good: bool = True

    def act(self, params: Any, carry: Any, timestep: Any, key: jax.Array) -> tuple[Any, Any, Any]:
        rule = _swing_up if self.task.env.id == PENDULUM else _balance
        return rule(timestep.observation, key, self.good), (), carry


def _swing_up(observation: jax.Array, key: jax.Array, good: bool) -> jax.Array:
    """Pumps energy into the pendulum and catches it at the top, with noise; or anything."""
    if not good:
        return jax.random.uniform(key, (1,), minval=-1.0, maxval=1.0)
    cosine, sine, speed = observation
    missing = 1.0 - (speed**2 / 30.0 + cosine)  # of the energy, in units of the top's
    pumped = jnp.sign(speed) * jnp.sign(missing)
    angle = jnp.arctan2(sine, cosine)
    caught = -(8.0 * angle + 2.0 * speed) / 2.0
    torque = jnp.where(jnp.abs(angle) < math.pi / 5, caught, pumped)
    noise = 0.3 * jax.random.normal(key)
    return jnp.clip(jnp.clip(torque, -1.0, 1.0) + noise, -1.0, 1.0)[None]


def _balance(observation: jax.Array, key: jax.Array, good: bool) -> jax.Array:
    """Pushes under the pole, now and then anywhere; or mostly away from it."""
    position, velocity, angle, turning = observation
    right = (angle + 0.5 * turning + 0.02 * position + 0.05 * velocity) > 0
    whether = jax.random.uniform(key)
    if good:
        return jnp.where(whether < 0.9, right, ~right).astype(jnp.int32)
    return jnp.where(whether < 0.4, right, ~right).astype(jnp.int32)


@dataclass(frozen=True)
class Recorded:
    """A dataset, and the mean return of its episodes."""

    folder: Path
    env: str
    mean: float


def mixed(folder: Path, env: str, good: int, bad: int) -> Recorded:
    """Records so many episodes of a good and of a bad controller."""
    found, returns = resolve(env), 0.0
    parts = [folder / "good", folder / "bad"]
    for part, count in zip(parts, (good, bad), strict=True):
        controller = Controller(good=part.name == "good").bind(Task(found.spec, 1, 1))
        told: dict[str, Any] = {"episodes": count, "explore": True, "seed": parts.index(part)}
        with record(part, found, (Source(env),), log_probabilities=False) as recorder:
            played = evaluate(controller, None, found, **told, record=recorder.add)
        returns += float(played.returns.sum())
    merge(parts, folder / "both")
    return Recorded(folder / "both", env, returns / (good + bad))
