"""Gymnasium's registry, and any `gymnasium.Env` class, as host environments.

An environment with a vector entry point of its own is stepped by it; any other is vectorised here,
in one process (`sync`) or one process each (`async`). Episodes that end are reset in the same
step unless the entry point does otherwise or the user asks for another autoreset mode.
"""

import contextlib
import copy
import importlib
import inspect
import signal
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec as Registered
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TimeLimit

from dovetail.envs.ale import seed_array
from dovetail.envs.interface import EnvSpec, HostEnv
from dovetail.envs.names import missing_extra, unknown_env, unknown_option
from dovetail.envs.spaces import space_map
from dovetail.envs.vector import VectorHost, autoreset_mode
from dovetail.errors import UserError

THRESHOLDS = {"Pendulum-v1": -200.0}
"""Where the field agrees on a threshold and Gymnasium's registry has none."""

VECTORIZATIONS = ("sync", "async", "vector_entry_point")
AUTORESETS = {
    "next_step": AutoresetMode.NEXT_STEP,
    "same_step": AutoresetMode.SAME_STEP,
    "disabled": AutoresetMode.DISABLED,
}
_CARTPOLE = "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"
_EXTRAS = {"mujoco": "mujoco", "box2d": "box2d", "ale_py": "atari"}

Maker = Callable[..., gymnasium.Env[Any, Any]]
"""Makes one environment from its options."""
HostFactory = Callable[[int], HostEnv]


def names() -> list[str]:
    """The ids in Gymnasium's registry."""
    return sorted(gymnasium.registry)


def has(name: str) -> bool:
    """Whether Gymnasium knows `name`; "module:name" imports the module first, "ALE/…" ale-py."""
    module, _, bare = name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        elif name.startswith("ALE/"):
            importlib.import_module("ale_py")
    except ImportError:
        return False
    return bare in gymnasium.registry


def make(name: str, options: Mapping[str, Any], env_id: str) -> tuple[EnvSpec, HostFactory]:
    """The spec and the host factory of a registered environment."""
    registered = find(name)
    mode, autoreset, kwargs = split_options(options, env_id)
    threshold = registered.reward_threshold
    threshold = THRESHOLDS.get(registered.id) if threshold is None else float(threshold)
    threshold = None if kwargs else threshold  # another task than the field's
    entry_point = _entry_point(registered, mode, autoreset, kwargs, env_id)
    if entry_point is not None:
        factory = partial(_from_entry_point, registered, autoreset, kwargs, env_id, threshold)
    else:
        one = maker(registered, kwargs)
        factory = partial(vectorise, one, mode, autoreset, env_id, threshold)
    return probe(factory, maker(registered, kwargs), env_id, threshold, entry_point is not None)


def find(name: str) -> Registered:
    """The registry's entry for `name`."""
    if not has(name):
        if name.startswith("ALE/"):
            raise missing_extra("gymnasium:" + name, "ale-py", "atari")
        raise unknown_env(name, "Gymnasium", names())
    registered = gymnasium.registry[name.rpartition(":")[2]]
    if "box2d" in str(registered.entry_point):
        with warnings.catch_warnings(), contextlib.suppress(ImportError):
            # its generated code warns as it loads, and crashes if warnings are errors
            warnings.simplefilter("ignore", DeprecationWarning)
            importlib.import_module("Box2D")
    return registered


def maker(registered: Registered, kwargs: Mapping[str, Any]) -> Maker:
    """Makes one bare environment of a registered kind."""
    # Dovetail checks what environments return itself: Gymnasium's checker would be paid twice.
    # Nothing of Dovetail is in the partial, so that worker processes need not import JAX.
    return partial(gymnasium.make, registered, disable_env_checker=True, **kwargs)


def from_class(
    build: Maker, options: Mapping[str, Any], env_id: str
) -> tuple[EnvSpec, HostFactory, Maker]:
    """The spec, host factory and maker of a user's `gymnasium.Env` class or factory of one."""
    mode, autoreset, kwargs = split_options(options, env_id)
    if mode == "vector_entry_point":
        raise UserError(
            f"{env_id} is a single environment without a vector entry point: use "
            "vectorization=sync or vectorization=async."
        )
    limit = kwargs.pop("max_episode_steps", None)
    one = partial(build, **kwargs) if limit is None else partial(_limited, build, limit, kwargs)
    factory = partial(vectorise, one, mode, autoreset, env_id, None)
    return (*probe(factory, one, env_id, None, False), one)


def _limited(
    build: Maker, limit: int, kwargs: dict[str, Any], **more: Any
) -> gymnasium.Env[Any, Any]:
    return TimeLimit(build(**kwargs, **more), int(limit))


def probe(
    factory: HostFactory, one: Maker, env_id: str, threshold: float | None, vector: bool
) -> tuple[EnvSpec, HostFactory]:
    """The spec, read from a throw-away environment, with the factory."""
    if vector:
        host = factory(1)
        host.close()
        return host.spec, factory
    env = created(one, env_id)
    mapped = space_map(env.observation_space, env.action_space, env_id)
    env.close()
    return EnvSpec(env_id, mapped.observation, mapped.action, threshold), factory


def vectorise(
    one: Maker,
    mode: str | None,
    autoreset: str | None,
    env_id: str,
    threshold: float | None,
    num_envs: int,
) -> VectorHost:
    """`num_envs` single environments behind one host environment."""
    resets = AUTORESETS[autoreset or "same_step"]
    if mode == "async":
        # forking a process in which JAX runs its threads may hang: spawn
        many: Callable[[], VectorEnv[Any, Any, Any]] = partial(
            _Async, [one] * num_envs, context="spawn", copy=False, autoreset_mode=resets
        )
    else:
        many = partial(SyncVectorEnv, [one] * num_envs, copy=False, autoreset_mode=resets)
    return VectorHost(created(many, env_id), env_id, threshold)


class _Async(AsyncVectorEnv):
    """AsyncVectorEnv that reports a worker's exception once, by raising it.

    Its processes do not hear Ctrl-C, which a terminal sends to all: who made them ends them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        resource_tracker.ensure_running()  # its own start would unblock the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # processes inherit it
        try:
            super().__init__(*args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ends the processes, whatever they are at and whoever has ended some already."""
        for process in self.processes:
            process.terminate()
        for pipe in self.parent_pipes:
            if pipe is not None:
                pipe.close()
        for process in self.processes:
            process.join()

    def _raise_if_errors(self, successes: list[bool] | tuple[bool]) -> None:
        if not all(successes):
            with warnings.catch_warnings():  # its log goes through warnings
                warnings.simplefilter("ignore")
                super()._raise_if_errors(successes)


def created(build: Callable[[], Any], env_id: str) -> Any:
    """What `build` makes; whatever goes wrong in it becomes a sentence."""
    try:
        return build()
    except UserError:
        raise
    except gymnasium.error.DependencyNotInstalled as error:
        text = str(error)
        extra = next((extra for part, extra in _EXTRAS.items() if part in text.lower()), None)
        if extra is None:
            raise UserError(f"{env_id} needs a package that is not installed: {text}") from error
        raise missing_extra(env_id, extra, extra) from error
    except Exception as error:
        raise UserError(f"{env_id} could not be made: {type(error).__name__}: {error}") from error


def split_options(
    options: Mapping[str, Any], env_id: str
) -> tuple[str | None, str | None, dict[str, Any]]:
    """(vectorization, autoreset, the environment's own options)."""
    kwargs = dict(options)
    mode, autoreset = kwargs.pop("vectorization", None), kwargs.pop("autoreset", None)
    if mode not in (None, *VECTORIZATIONS):
        raise unknown_option(env_id, "vectorization", mode, VECTORIZATIONS)
    if autoreset not in (None, *AUTORESETS):
        raise unknown_option(env_id, "autoreset", autoreset, AUTORESETS)
    return mode, autoreset, kwargs


def _entry_point(
    registered: Registered,
    mode: str | None,
    autoreset: str | None,
    kwargs: Mapping[str, Any],
    env_id: str,
) -> Callable[..., Any] | None:
    """The registry's vector entry point, if it is wanted and can do what is asked."""
    if mode in ("sync", "async"):
        return None
    if registered.vector_entry_point is None:
        if mode is None:
            return None
        raise UserError(
            f"{env_id} has no vector entry point: use vectorization=sync or vectorization=async."
        )
    creator = _creator(registered)
    if mode is None and not _can(creator, autoreset, kwargs):
        return None
    return creator


def _creator(registered: Registered) -> Any:
    entry_point = registered.vector_entry_point
    if entry_point == _CARTPOLE:
        from dovetail.envs.gymnasium_cartpole import CartPoles

        return CartPoles
    return load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point


def _can(creator: Any, autoreset: str | None, kwargs: Mapping[str, Any]) -> bool:
    parameters = inspect.signature(creator).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not anything and set(kwargs) - set(parameters):
        return False
    if autoreset is None or "autoreset_mode" in parameters:
        return True
    return getattr(creator, "metadata", {}).get("autoreset_mode") == AUTORESETS[autoreset]


def _from_entry_point(
    registered: Registered,
    autoreset: str | None,
    kwargs: Mapping[str, Any],
    env_id: str,
    threshold: float | None,
    num_envs: int,
) -> VectorHost:
    creator = _creator(registered)
    kwargs = dict(kwargs)
    if autoreset is not None and "autoreset_mode" in inspect.signature(creator).parameters:
        kwargs["autoreset_mode"] = AUTORESETS[autoreset]
    entry = copy.copy(registered)
    entry.vector_entry_point = creator
    build = partial(
        gymnasium.make_vec,
        entry,
        num_envs=num_envs,
        vectorization_mode="vector_entry_point",
        **kwargs,
    )
    venv = created(build, env_id)
    if autoreset is not None and autoreset_mode(venv, env_id) != AUTORESETS[autoreset]:
        venv.close()
        raise UserError(
            f"{env_id} resets by {autoreset_mode(venv, env_id).name.lower()} when its vector entry "
            f"point steps it: use vectorization=sync with autoreset={autoreset}."
        )
    return VectorHost(venv, env_id, threshold, _seeding(creator))


def _seeding(creator: Any) -> Callable[[list[int]], Any] | None:
    """How an entry point takes a seed for each environment, where it can."""
    if creator.__module__ == "dovetail.envs.gymnasium_cartpole":
        return list
    if creator.__module__.startswith("ale_py"):
        return seed_array
    return None
