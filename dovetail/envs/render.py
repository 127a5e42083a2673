"""One environment to render, for videos or a window on the screen.

JAX and native back ends do not render, so their pictures come from the Gymnasium environment of the
same name, if its observations and actions match those of the training environment.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from dovetail.envs.interface import EnvSpec, Observation
from dovetail.envs.registry import load
from dovetail.envs.resolve import Env
from dovetail.envs.spaces import space_map


class Watched(gymnasium.Wrapper[Any, Any, Any, Any]):
    """One Gymnasium environment as algorithms see it (see spaces.py)."""

    def __init__(self, env: gymnasium.Env[Any, Any], env_id: str) -> None:
        """Uses the same mapping as the environment's host adapter, without a batch axis."""
        super().__init__(env)
        self.mapped = space_map(
            env.observation_space, env.action_space, env_id, xp=np, batched=False
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts a new episode."""
        raw, info = self.env.reset(seed=seed, options=options)
        return self.mapped.encode(raw), info

    def step(self, action: Any) -> tuple[Observation, Any, bool, bool, dict[str, Any]]:
        """One transition."""
        raw, reward, terminated, truncated, info = self.env.step(
            self.mapped.decode(np.asarray(action))[()]
        )
        return self.mapped.encode(raw), reward, terminated, truncated, info


def render_env(env: Env, mode: str = "rgb_array") -> Watched | None:
    """One environment that renders itself ("rgb_array" or "human"), or None if it cannot."""
    if env.single is None:
        return None
    try:
        watched = Watched(env.single(render_mode=mode), env.spec.id)
        if mode == "rgb_array":
            watched.reset(seed=0)
            drawn = isinstance(watched.render(), np.ndarray)
        else:
            drawn = mode in (watched.metadata or {}).get("render_modes", [])
    except Exception:  # rendering is optional: training continues without pictures
        return None
    return watched if drawn and _same(watched, env.spec) else None


def _same(watched: Watched, spec: EnvSpec) -> bool:
    return (watched.mapped.observation, watched.mapped.action) == (spec.observation, spec.action)


def make_single(
    function: str, name: str, options: Mapping[str, Any], **more: Any
) -> gymnasium.Env[Any, Any]:
    """The Gymnasium environment that renders `name`, made by the back end's function."""
    _without_screen()
    return load(function)(name, options, **more)


def of_same_name(name: str, options: Mapping[str, Any], **more: Any) -> gymnasium.Env[Any, Any]:
    """Gymnasium's environment of that name, with the same options."""
    from dovetail.envs.gymnasium import find, maker

    renamed = {"limit": "max_episode_steps"}
    # Our CartPole calls its time limit `limit`.
    kwargs = {renamed.get(key, key): value for key, value in options.items() if key != "wrap"}
    return maker(find(name), kwargs)(**more)


def is_atari(name: str, options: Mapping[str, Any]) -> bool:
    """Whether it is an Atari game with preprocessed frames (raw in wrappers, `sync` or `async`)."""
    game = name.startswith("ALE/") or f"ALE/{name}" in gymnasium.registry
    return game and "wrap" not in options and options.get("vectorization") not in ("sync", "async")


def atari(game: str, **more: Any) -> gymnasium.Env[Any, Any]:
    """A game with standard preprocessing: frame skip 4, grayscale, 84 × 84, stacks of four."""
    from ale_py.env import AtariEnv
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    env = AtariEnv(game, frameskip=1, repeat_action_probability=0.0, **more)
    return FrameStackObservation(AtariPreprocessing(env), 4)


def _without_screen() -> None:
    """Silences pygame's greeting and sound, and lets MuJoCo render without a display."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ):
        os.environ.setdefault("MUJOCO_GL", "egl")
