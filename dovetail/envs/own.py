"""A user's own environments: from a Python object, or from a class or factory in a file.

Whatever is given must be something that can be made many times: a class, a factory, or a
`JaxEnv`, which is pure functions.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dovetail.envs.interface import EnvSpec, HostEnv, JaxEnv
from dovetail.envs.resolve import Env
from dovetail.errors import UserError
from dovetail.loading import load_object


def from_file(path: str, name: str, options: Mapping[str, Any], env_id: str) -> Env:
    """The environment called `name` in the user's file."""
    found = _named(path, name)
    build = partial(_build_named, path, name) if callable(found) else found
    return from_object(found, options, env_id, build)


def from_object(found: Any, options: Mapping[str, Any], env_id: str, build: Any = None) -> Env:
    """The environment that a class, factory or `JaxEnv` stands for.

    `build` makes what calling `found` makes; it is what other processes are sent.
    """
    import gymnasium

    build = found if build is None else build
    if isinstance(found, type):
        if issubclass(found, gymnasium.vector.VectorEnv):
            return _hosted(partial(_from_vector, build, dict(options), env_id))
        if issubclass(found, gymnasium.Env):
            return _single(build, options, env_id)
        if hasattr(found, "close") and hasattr(found, "step"):
            return _hosted(partial(_from_host, build, dict(options), env_id))
        return _traced(_called(build, options, env_id), env_id)
    if isinstance(found, gymnasium.Env | gymnasium.vector.VectorEnv | HostEnv):
        raise UserError(
            f"{env_id} is one {type(found).__name__}, and Dovetail makes as many as a plan needs: "
            "give its class, or a function that makes one."
        )
    if isinstance(found, JaxEnv) or not callable(found):
        if options:
            raise UserError(f"{env_id} is an object already made: it takes no options.")
        return _traced(found, env_id)
    return _from_factory(found, build, options, env_id)


def _from_factory(
    found: Callable[..., Any], build: Callable[..., Any], options: Mapping[str, Any], env_id: str
) -> Env:
    """A function: `(num_envs) -> HostEnv or VectorEnv`, or `() -> gymnasium.Env or JaxEnv`."""
    import gymnasium

    if "num_envs" in inspect.signature(found).parameters:
        return _hosted(partial(_from_host, build, dict(options), env_id))
    own = {k: v for k, v in options.items() if k not in ("vectorization", "autoreset")}
    own.pop("max_episode_steps", None)
    made = _called(build, own, env_id)
    if isinstance(made, gymnasium.Env):
        made.close()
        return _single(build, options, env_id)
    return _traced(made, env_id)


def _single(build: Any, options: Mapping[str, Any], env_id: str) -> Env:
    from dovetail.envs.gymnasium import from_class

    spec, host, one = from_class(build, options, env_id)
    return Env(spec, None, host, one)


def _traced(env: Any, env_id: str) -> Env:
    if not isinstance(getattr(env, "spec", None), EnvSpec) or not isinstance(env, JaxEnv):
        raise UserError(
            f"{env_id} is a {type(env).__name__}, which is no environment: it needs spec (an "
            "EnvSpec), reset(key) and step(state, action, key), or be a gymnasium.Env class."
        )
    return Env(env.spec, env, None)


def _hosted(factory: Callable[[int], HostEnv]) -> Env:
    host = factory(1)
    host.close()
    return Env(host.spec, None, factory)


def _from_vector(
    build: Callable[..., Any], options: dict[str, Any], env_id: str, num_envs: int
) -> HostEnv:
    from dovetail.envs.vector import VectorHost

    return VectorHost(_called(build, {"num_envs": num_envs, **options}, env_id), env_id)


def _from_host(
    build: Callable[..., Any], options: dict[str, Any], env_id: str, num_envs: int
) -> HostEnv:
    import gymnasium

    from dovetail.envs.vector import VectorHost

    made = _called(build, {"num_envs": num_envs, **options}, env_id)
    if isinstance(made, gymnasium.vector.VectorEnv):
        return VectorHost(made, env_id)
    if not isinstance(made, HostEnv):
        raise UserError(
            f"{env_id} made a {type(made).__name__}: a factory of num_envs environments must "
            "return a HostEnv or a gymnasium.vector.VectorEnv."
        )
    return made


def _called(build: Callable[..., Any], options: Mapping[str, Any], env_id: str) -> Any:
    try:
        return build(**options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{env_id} could not be made: {type(error).__name__}: {error}") from error


def _build_named(path: str, name: str, **options: Any) -> Any:
    """Calls `name` of the file at `path`; can be sent to another process, unlike the class."""
    return _named(path, name)(**options)


def _named(path: str, name: str) -> Any:
    return load_object(f"{Path(path).expanduser()}:{name}", "environment")
