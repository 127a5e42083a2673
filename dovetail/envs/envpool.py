"""EnvPool's environments, stepped in native threads.

EnvPool fixes the seeds when a pool is created, so `reset` creates a new pool. Finished episodes are
reset by the next step, whose action is ignored.
"""

import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dovetail.envs.interface import EnvSpec, HostStep, Observation
from dovetail.envs.names import unknown_env, unknown_option
from dovetail.envs.spaces import space_map
from dovetail.envs.vector import VectorHost
from dovetail.errors import UserError


def names() -> list[str]:
    """The environments in this build of EnvPool."""
    return sorted(_envpool().list_all_envs())


def make(
    name: str, options: Mapping[str, Any], env_id: str
) -> tuple[EnvSpec, Callable[[int], "EnvPoolHost"], None]:
    """The spec and host factory of one of EnvPool's environments; processes are unnecessary."""
    if name not in names():
        raise unknown_env(name, "EnvPool", names())
    kwargs = dict(options)
    autoreset = kwargs.pop("autoreset", "next_step")
    if autoreset != "next_step":
        raise unknown_option(env_id, "autoreset", autoreset, ["next_step"])
    for option in {"batch_size", "num_envs", "seed", "env_type"} & set(kwargs):
        raise UserError(f"{env_id} cannot take the option {option}: Dovetail sets it.")
    spec = _spec(name, kwargs, env_id)
    return spec, partial(EnvPoolHost, name, kwargs, spec), None


def single(name: str, options: Mapping[str, Any], **more: Any) -> Any:
    """The Gymnasium environment of the same name; Atari games are preprocessed as in EnvPool."""
    from dovetail.envs.ale import game_of
    from dovetail.envs.render import atari, is_atari, of_same_name

    if is_atari(name, options):
        return atari(game_of(name), **more)
    return of_same_name(name, options, **more)


class EnvPoolHost:
    """A pool of environments behind Dovetail's interface."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        spec: EnvSpec,
        num_envs: int,
        info: tuple[str, ...] = (),
    ) -> None:
        """`options` go to `envpool.make`; `info` are keys to report."""
        self.spec, self.num_envs = replace(spec, info=info), num_envs
        self._name, self._options = name, dict(options)
        self._host: VectorHost | None = None

    def reset(self, seeds: list[int]) -> Observation:
        """Creates the pool with these seeds and starts an episode in every environment."""
        self.close()
        # EnvPool's seeds are signed 32-bit integers.
        seeds = [int(seed) & 0x7FFFFFFF for seed in seeds]
        build = partial(_envpool().make, self._name, env_type="gymnasium", **self._options)

        def host() -> VectorHost:
            pool, spec = build(num_envs=self.num_envs, seed=seeds), self.spec
            return VectorHost(pool, spec.id, spec.threshold, seeding=_already, info=spec.info)

        made: VectorHost = _quietly(host, self.spec.id)
        self._host = made
        return made.reset(seeds)

    def step(self, action: np.ndarray) -> HostStep:
        """One transition in every environment."""
        if self._host is None:
            raise UserError(f"{self.spec.id} was stepped before it was reset.")
        return self._host.step(action)

    def close(self) -> None:
        """Releases the pool; safe to call twice."""
        if self._host is not None:
            self._host.close()
            self._host = None


def _envpool() -> Any:
    return importlib.import_module("envpool")


def _already(seeds: list[int]) -> None:
    """No seeds: the pool was created with them."""


def _spec(name: str, options: Mapping[str, Any], env_id: str) -> EnvSpec:
    """The spec, read without creating a pool."""

    def read() -> EnvSpec:
        found = _envpool().make_spec(name, **options)
        mapped = space_map(found.gymnasium_observation_space, found.gymnasium_action_space, env_id)
        threshold = None if options else found.reward_threshold
        return EnvSpec(
            env_id,
            mapped.observation,
            mapped.action,
            threshold,
            bounds=mapped.bounds,
            spaces=mapped.spaces,
        )

    return _quietly(read, env_id)


def _quietly(build: Callable[[], Any], env_id: str) -> Any:
    """The result of `build`, without the warnings that EnvPool's 64-bit bounds are cast to 32."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting.*")
        try:
            return build()
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{env_id} could not be made: {type(error).__name__}: {error}"
            ) from error
