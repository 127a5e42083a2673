"""Atari games stepped in native threads by ALE's vector environment.

`ale:pong` shows the usual 84 × 84 grayscale frames, four at a time, as uint8[4, 84, 84]. Options
are those of `ale_py.vector_env.AtariVectorEnv`, and `autoreset`.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from dovetail.envs.interface import EnvSpec
from dovetail.envs.names import unknown_env, unknown_option
from dovetail.errors import UserError

_AUTORESETS = ("same_step", "next_step")


def names() -> list[str]:
    """The games bundled with ale-py."""
    from ale_py import roms

    return sorted(roms.get_all_rom_ids())


def game_of(name: str) -> str:
    """The ROM name of a game written as "Pong", "MsPacman-v5" or "ms_pacman"."""
    # "MsPacmanNoFrameskip-v4" → "MsPacman" → "ms_pacman".
    bare = re.sub(r"(NoFrameskip)?-v\d+$", "", name.removeprefix("ALE/"))
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare).lower()


def make(name: str, options: Mapping[str, Any], env_id: str) -> tuple[EnvSpec, Any, None]:
    """The spec and host factory of a game; processes are unnecessary."""
    game = game_of(name)
    if game not in names():
        raise unknown_env(name, "ALE", names())
    kwargs = dict(options)
    autoreset = kwargs.pop("autoreset", "same_step")
    if autoreset not in _AUTORESETS:
        raise unknown_option(env_id, "autoreset", autoreset, _AUTORESETS)
    if "batch_size" in kwargs:
        raise UserError(f"{env_id} steps all its environments together: leave batch_size out.")
    factory = partial(_build, game, autoreset, kwargs, env_id)
    host = factory(1)
    host.close()
    return host.spec, factory, None


def single(name: str, options: Mapping[str, Any], **more: Any) -> Any:
    """One game that renders itself."""
    from dovetail.envs.render import atari

    return atari(game_of(name), **more)


def _build(
    game: str,
    autoreset: str,
    kwargs: Mapping[str, Any],
    env_id: str,
    num_envs: int,
    info: tuple[str, ...] = (),
) -> Any:
    from ale_py.vector_env import AtariVectorEnv

    from dovetail.envs.batches import created
    from dovetail.envs.gymnasium import AUTORESETS
    from dovetail.envs.vector import VectorHost

    mode = AUTORESETS[autoreset]
    venv = created(partial(AtariVectorEnv, game, num_envs, autoreset_mode=mode, **kwargs), env_id)
    return VectorHost(venv, env_id, seeding=seed_array, threads=True, info=info)


def seed_array(seeds: list[int]) -> np.ndarray:
    """Seeds in ALE's format: 31 bits each."""
    return np.array([seed & 0x7FFFFFFF for seed in seeds])
