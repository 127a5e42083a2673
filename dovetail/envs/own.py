"""User-defined environments, from a Python object or from a class or factory in a file.

Dovetail makes many instances, so it takes a class, a factory, or a `JaxEnv`, which is pure
functions.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dovetail.envs.interface import EnvSpec, HostEnv, JaxEnv
from dovetail.envs.resolve import Env, in_jax_wrappers
from dovetail.envs.wrapping import Wrap, split_wraps
from dovetail.errors import UserError, one_sentence
from dovetail.loading import call_named, load_object


def from_file(path: str, name: str, options: Mapping[str, Any], env_id: str) -> Env:
    """The environment called `name` in the user's file."""
    file = Path(path).expanduser()
    found = load_object(f"{file}:{name}", "environment")
    build = partial(call_named, str(file.resolve()), name) if callable(found) else found
    return from_object(found, options, env_id, build)


def from_object(found: Any, options: Mapping[str, Any], env_id: str, build: Any = None) -> Env:
    """The environment given by a class, factory or `JaxEnv`.

    `build` is a picklable equivalent of calling `found`, for other processes.
    """
    import gymnasium

    build = found if build is None else build
    if isinstance(found, type):
        if issubclass(found, gymnasium.vector.VectorEnv):
            return _vector(build, options, env_id)
        if issubclass(found, gymnasium.Env):
            return _single(build, options, env_id)
        if hasattr(found, "close") and hasattr(found, "step"):
            return _hosted(build, options, env_id)
        wraps, own = split_wraps(options)
        return _traced(_called(build, own, env_id), env_id, wraps)
    if isinstance(found, gymnasium.Env | gymnasium.vector.VectorEnv | HostEnv):
        raise UserError(
            f"{env_id} is one {type(found).__name__}, and Dovetail makes as many as a plan needs: "
            "give its class, or a function that makes one."
        )
    if isinstance(found, JaxEnv) or not callable(found):
        wraps, own = split_wraps(options)
        if own:
            raise UserError(f"{env_id} is an object already made: it takes no options.")
        return _traced(found, env_id, wraps)
    return _from_factory(found, build, options, env_id)


def _from_factory(
    found: Callable[..., Any], build: Callable[..., Any], options: Mapping[str, Any], env_id: str
) -> Env:
    """A function: `(num_envs) -> HostEnv or VectorEnv`, or `() -> gymnasium.Env or JaxEnv`."""
    import gymnasium

    from dovetail.envs.gymnasium import split_options

    if "num_envs" in inspect.signature(found).parameters:
        return _hosted(build, options, env_id)
    asked = split_options(options, env_id)
    own = asked.own
    # Applied as a wrapper later, not an argument of the factory.
    own.pop("max_episode_steps", None)
    made = _called(build, own, env_id)
    if isinstance(made, gymnasium.Env):
        made.close()
        return _single(build, options, env_id)
    return _traced(made, env_id, asked.wraps)


def _single(build: Any, options: Mapping[str, Any], env_id: str) -> Env:
    from dovetail.envs.gymnasium import from_class

    spec, host, process, one = from_class(build, options, env_id)
    return Env(spec, None, host, one, process)


def _traced(env: Any, env_id: str, wraps: tuple[Wrap, ...] = ()) -> Env:
    if not isinstance(getattr(env, "spec", None), EnvSpec) or not isinstance(env, JaxEnv):
        raise UserError(
            f"{env_id} is a {type(env).__name__}, which is no environment: it needs spec (an "
            "EnvSpec), reset(key) and step(state, action, key), or be a gymnasium.Env class."
        )
    env = in_jax_wrappers(env, wraps, env_id)
    return Env(env.spec, env, None)


def _vector(build: Callable[..., Any], options: Mapping[str, Any], env_id: str) -> Env:
    """A `gymnasium.vector.VectorEnv` class or factory."""
    from dovetail.envs.batches import Batches
    from dovetail.envs.gymnasium import Options, factories, split_options
    from dovetail.envs.makers import by_class

    _refuse_wraps(options, env_id)
    asked = Options(None, None, dict(options), 1, None)
    if options.get("vectorization") == "processes":  # without it, all options are the environment's
        asked = split_options(options, env_id)
    batches = Batches(partial(by_class, build, asked.own), env_id, patience=asked.patience)
    host = batches.here(1)
    host.close()
    spec, make, process = factories(host.spec, batches, asked)
    return Env(spec, None, make, None, process)


def _hosted(build: Callable[..., Any], options: Mapping[str, Any], env_id: str) -> Env:
    """A factory that makes a `HostEnv`, or a `VectorEnv`, of `num_envs` environments."""
    import gymnasium

    if options.get("vectorization") == "processes":
        return _vector(build, options, env_id)
    _refuse_wraps(options, env_id)
    factory = partial(_counted, build, dict(options), env_id)
    made = factory(1)
    if isinstance(made, gymnasium.vector.VectorEnv):
        made.close()
        return _vector(build, options, env_id)
    if not isinstance(made, HostEnv):
        raise UserError(
            f"{env_id} made a {type(made).__name__}: a factory of num_envs environments must "
            "return a HostEnv or a gymnasium.vector.VectorEnv."
        )
    made.close()
    return Env(made.spec, None, factory)


def _refuse_wraps(options: Mapping[str, Any], env_id: str) -> None:
    if "wrap" in options:
        raise UserError(
            f"{env_id} steps a whole batch, so its environments cannot be wrapped one by one: wrap "
            "them in its own code, or give a gymnasium.Env class."
        )


def _counted(
    build: Callable[..., Any], options: Mapping[str, Any], env_id: str, num_envs: int
) -> Any:
    return _called(build, {"num_envs": num_envs, **options}, env_id)


def _called(build: Callable[..., Any], options: Mapping[str, Any], env_id: str) -> Any:
    try:
        return build(**options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{env_id} could not be made: {one_sentence(error)}") from error
