"""Gymnasium's registry, and any `gymnasium.Env` class, as host environments.

An environment with its own vector entry point is stepped by it. Any other is vectorized here, in
turn (`sync`) or in one process each (`async`); either can be split among several processes
(`processes`). Finished episodes are reset in the same step unless the entry point does otherwise or
the user asks for another autoreset mode.
"""

import contextlib
import importlib
import inspect
import os
import signal
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import resource_tracker
from typing import Any, NamedTuple

import gymnasium
from gymnasium.envs.registration import EnvSpec as Registered
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from dovetail.envs.ale import seed_array
from dovetail.envs.batches import Batches, HostFactory, ProcessFactory, created
from dovetail.envs.child import ENDING
from dovetail.envs.interface import EnvSpec
from dovetail.envs.makers import Maker, by_entry_point, limited, one_or_many, synchronous
from dovetail.envs.names import missing_extra, unknown_env, unknown_option
from dovetail.envs.spaces import space_map
from dovetail.envs.wrapping import Wrap, split_wraps, wrapped
from dovetail.errors import UserError

THRESHOLDS = {"Pendulum-v1": -200.0}
"""Conventional thresholds that are missing in Gymnasium's registry."""

VECTORIZATIONS = ("sync", "async", "vector_entry_point", "processes")
AUTORESETS = {
    "next_step": AutoresetMode.NEXT_STEP,
    "same_step": AutoresetMode.SAME_STEP,
    "disabled": AutoresetMode.DISABLED,
}
_CARTPOLE = "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"

Factories = tuple[EnvSpec, HostFactory, ProcessFactory | None]


class Options(NamedTuple):
    """Options parsed from an id."""

    vectorization: str | None
    autoreset: str | None
    own: dict[str, Any]
    """The environment's own options."""
    processes: int
    patience: float | None
    wraps: tuple[Wrap, ...] = ()


def names() -> list[str]:
    """The ids in Gymnasium's registry, with ALE's games if they are installed."""
    with contextlib.suppress(ImportError):
        importlib.import_module("ale_py")
    return sorted(name for name, entry in gymnasium.registry.items() if not _is_old(name, entry))


def _is_old(name: str, entry: Registered) -> bool:
    """Whether it is one of the many names of an Atari game that ALE/NAME-v5 replaces."""
    return str(entry.entry_point).startswith("ale_py") and not name.startswith("ALE/")


def has(name: str) -> bool:
    """Whether Gymnasium knows `name`; "module:name" imports the module first, Atari's ale-py."""
    module, _, bare = name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        elif name.startswith("ALE/") or "NoFrameskip-v" in name:
            importlib.import_module("ale_py")
    except ImportError:
        return False
    return bare in gymnasium.registry


def make(name: str, options: Mapping[str, Any], env_id: str) -> Factories:
    """The spec, host factory and process factory of a registered environment."""
    registered = find(name)
    asked = split_options(options, env_id)
    threshold = registered.reward_threshold
    threshold = THRESHOLDS.get(registered.id) if threshold is None else float(threshold)
    threshold = None if asked.own or asked.wraps else threshold  # these change the task
    one = _in_wraps(maker(registered, asked.own), asked, env_id)
    creator = _entry_point(registered, asked, env_id)
    if creator is None:
        return _from_single(one, asked, env_id, threshold)
    own = dict(asked.own)
    wanted = None if asked.autoreset is None else AUTORESETS[asked.autoreset]
    if wanted is not None and "autoreset_mode" in inspect.signature(creator).parameters:
        own["autoreset_mode"] = wanted
    build: Any = partial(by_entry_point, registered, creator, own)
    if registered.vector_entry_point == _CARTPOLE:
        build = partial(one_or_many, one, build)
    batches = Batches(
        build,
        env_id,
        threshold,
        _seeding(creator),
        threads=creator.__module__.startswith("ale_py"),
        autoreset=wanted,
        patience=asked.patience,
    )
    # Made once to learn its spaces.
    host = batches.here(1)
    host.close()
    return factories(host.spec, batches, asked)


def single(name: str, options: Mapping[str, Any], **more: Any) -> gymnasium.Env[Any, Any]:
    """One registered environment; Atari games are preprocessed as in ALE's vector environment."""
    from dovetail.envs.ale import game_of
    from dovetail.envs.render import atari, is_atari

    if is_atari(name, options):
        return atari(game_of(name), **more)
    return maker(find(name), split_options(options, name).own)(**more)


def find(name: str) -> Registered:
    """The registry's entry for `name`."""
    if not has(name):
        if name.startswith("ALE/"):
            raise missing_extra("gymnasium:" + name, "ale-py", "atari")
        raise unknown_env(name, "Gymnasium", names())
    registered = gymnasium.registry[name.rpartition(":")[2]]
    if "box2d" in str(registered.entry_point):
        with warnings.catch_warnings(), contextlib.suppress(ImportError):
            # Its generated code warns while loading, and crashes if warnings are errors.
            warnings.simplefilter("ignore", DeprecationWarning)
            importlib.import_module("Box2D")
    return registered


def maker(registered: Registered, kwargs: Mapping[str, Any]) -> Maker:
    """A factory of one bare registered environment."""
    # Dovetail checks the results itself, so Gymnasium's checker would be redundant.
    # The partial refers to nothing in Dovetail, so worker processes need not import JAX.
    return partial(gymnasium.make, registered, disable_env_checker=True, **kwargs)


def from_class(
    build: Maker, options: Mapping[str, Any], env_id: str
) -> tuple[EnvSpec, HostFactory, ProcessFactory | None, Maker]:
    """(spec, host factory, process factory, factory of one) of a user's class or factory."""
    asked = split_options(options, env_id)
    if asked.vectorization == "vector_entry_point":
        raise UserError(
            f"{env_id} is a single environment without a vector entry point: use "
            "vectorization=sync, async or processes."
        )
    limit = asked.own.pop("max_episode_steps", None)
    one = partial(build, **asked.own)
    one = one if limit is None else partial(limited, build, limit, asked.own)
    one = _in_wraps(one, asked, env_id)
    return (*_from_single(one, asked, env_id, None), one)


def _in_wraps(one: Maker, asked: Options, env_id: str) -> Maker:
    """The factory with the requested wrappers."""
    return partial(wrapped, one, asked.wraps, env_id) if asked.wraps else one


def _from_single(one: Maker, asked: Options, env_id: str, threshold: float | None) -> Factories:
    """Single environments, vectorized here."""
    env = created(one, env_id)
    mapped = space_map(env.observation_space, env.action_space, env_id)
    env.close()
    spec = EnvSpec(
        env_id,
        mapped.observation,
        mapped.action,
        threshold,
        threads=False,
        bounds=mapped.bounds,
        spaces=mapped.spaces,
    )
    resets = AUTORESETS[asked.autoreset or "same_step"]
    build = partial(synchronous, one, resets)
    if asked.vectorization == "async":
        return spec, Batches(partial(_asynchronous, one, resets), env_id, threshold).here, None
    return factories(spec, Batches(build, env_id, threshold, patience=asked.patience), asked)


def factories(spec: EnvSpec, batches: Batches, asked: Options) -> Factories:
    """The spec and the factories for the requested vectorization."""
    if asked.vectorization == "processes":
        return spec, partial(batches.apart, processes=asked.processes), batches.process()
    return spec, batches.here, batches.process()


def _asynchronous(one: Maker, autoreset: AutoresetMode, num_envs: int) -> "_Async":
    # Spawn: forking a process in which JAX runs threads may deadlock.
    return _Async([one] * num_envs, context="spawn", copy=False, autoreset_mode=autoreset)


class _Async(AsyncVectorEnv):
    """AsyncVectorEnv that reports a worker's exception once, by raising it.

    Its processes ignore Ctrl-C and SIGTERM, which may be sent to the whole group: their owner ends
    them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        resource_tracker.ensure_running()  # starting it later would unblock the signal
        # Processes inherit it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *ENDING})
        try:
            super().__init__(*args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ends the processes, whatever their state, even if some have already ended."""
        for process in self.processes:
            process.kill()
        for pipe in self.parent_pipes:
            if pipe is not None:
                pipe.close()
        for process in self.processes:
            process.join()

    def _raise_if_errors(self, successes: list[bool] | tuple[bool]) -> None:
        if not all(successes):
            with warnings.catch_warnings():  # Gymnasium's logger emits warnings
                warnings.simplefilter("ignore")
                super()._raise_if_errors(successes)


def split_options(options: Mapping[str, Any], env_id: str) -> Options:
    """Splits an id's options into Dovetail's and the environment's own."""
    wraps, own = split_wraps(options)
    mode, autoreset = own.pop("vectorization", None), own.pop("autoreset", None)
    if mode not in (None, *VECTORIZATIONS):
        raise unknown_option(env_id, "vectorization", mode, VECTORIZATIONS)
    if autoreset not in (None, *AUTORESETS):
        raise unknown_option(env_id, "autoreset", autoreset, AUTORESETS)
    patience = own.pop("patience", None)
    if patience is not None and (type(patience) not in (int, float) or not patience > 0):
        raise UserError(f"{env_id} was given patience={patience}: give seconds, more than 0.")
    if mode != "processes":
        if "processes" in own:
            raise UserError(
                f"{env_id} was given processes={own['processes']} without "
                "vectorization=processes: add it, or leave processes out."
            )
        return Options(mode, autoreset, own, 1, patience, wraps)
    processes = own.pop("processes", os.cpu_count() or 1)
    if type(processes) is not int or processes < 1:
        raise UserError(f"{env_id} was given processes={processes}: give 1 or more.")
    return Options(mode, autoreset, own, processes, patience, wraps)


def _entry_point(registered: Registered, asked: Options, env_id: str) -> Callable[..., Any] | None:
    """The registry's vector entry point, if it is wanted and supports the options."""
    if asked.vectorization in ("sync", "async"):
        return None
    wanted = asked.vectorization == "vector_entry_point"
    if asked.wraps:  # a vector entry point steps all environments at once
        if wanted:
            raise UserError(
                f"{env_id} wraps single environments, which a vector entry point does not have: "
                "use vectorization=sync, async or processes."
            )
        return None
    if registered.vector_entry_point is None:
        if not wanted:
            return None
        raise UserError(
            f"{env_id} has no vector entry point: use vectorization=sync, async or processes."
        )
    creator = _creator(registered)
    if not wanted and not _can(creator, asked.autoreset, asked.own):
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


def _seeding(creator: Any) -> Callable[[list[int]], Any] | None:
    """How an entry point takes per-environment seeds, if it can."""
    if creator.__module__ == "dovetail.envs.gymnasium_cartpole":
        return list
    if creator.__module__.startswith("ale_py"):
        return seed_array
    return None
