"""Resolves ids, Python objects and classes in files to environments.

A bare id is looked up in the back ends in order: JAX's first when the environment is to be traced
into a compiled program, Gymnasium's first otherwise. A `backend:` prefix overrides this.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dovetail.envs.interface import EnvSpec, HostEnv, JaxEnv, SplitHostEnv
from dovetail.envs.names import EnvId, missing_extra, parse, suggestion
from dovetail.envs.notes import atari_alias, note
from dovetail.envs.registry import BACK_ENDS, load, looked_up
from dovetail.envs.wrapping import Wrap, WrappedObject, split_wraps, with_wraps, wrapped
from dovetail.errors import UserError, nearest


@dataclass(frozen=True)
class Env:
    """An environment that a plan can instantiate any number of times: traced, or on the host."""

    spec: EnvSpec
    jax: JaxEnv | None
    """The pure functions, if it can be compiled with the algorithm."""
    host: Callable[[int], HostEnv] | None
    """Makes a batch of the given number of environments, if it lives outside JAX."""
    single: Callable[..., Any] | None = None
    """Makes one bare `gymnasium.Env` for rendering: see `render_env`."""
    process: Callable[..., SplitHostEnv] | None = None
    """Called as (num_envs, bell=None, first=0, patience=30), makes a batch in a separate process.
    It releases the semaphore `bell` after each step and may take up to `patience` seconds per step;
    messages number its environments from `first`. None if that is impossible, or unnecessary
    because threads can step it in parallel."""
    note: str = ""
    """One line that users of the environment should know; empty if there is none."""


def resolve(env: Any, *, traced: bool | None = None) -> Env:
    """The environment given by an id, a `JaxEnv`, a class, a factory or an `Env`.

    `traced` says whether it will be compiled with the algorithm. It only decides between back ends,
    so an environment that cannot be traced is still returned.
    """
    if isinstance(env, Env):
        return env
    if not isinstance(env, str):
        from dovetail.envs.own import from_object

        env, wrap = (env.env, env.wrap) if isinstance(env, WrappedObject) else (env, "")
        env_id = f"python:{getattr(env, '__name__', type(env).__name__)}"
        return from_object(env, {"wrap": wrap} if wrap else {}, with_wraps(env_id, wrap))
    found = parse(env)
    if found.backend == "file":
        from dovetail.envs.own import from_file

        return from_file(found.path, found.name, found.options, env)
    meant = atari_alias(found) or found
    backend = meant.backend or _backend_of(meant, traced)
    return replace(_from_backend(backend, meant), note=note(found, backend))


def backends() -> list[tuple[str, str, bool]]:
    """(name, one-line description, whether it is installed) of every back end."""
    return [(name, row.about, row.installed) for name, row in BACK_ENDS.items()]


def names(backend: str) -> list[str]:
    """The environments of a back end; empty if it is not installed."""
    if backend not in BACK_ENDS:
        raise UserError(f"There is no back end {backend!r}: {nearest(backend, BACK_ENDS)}")
    row = BACK_ENDS[backend]
    return load(row.names)() if row.installed else []


def _backend_of(found: EnvId, traced: bool | None) -> str:
    """The first back end that knows a bare id."""
    for backend in looked_up(traced):
        if BACK_ENDS[backend].knows(found.name):
            return backend
    if found.name.startswith("ALE/"):
        return "gymnasium"  # its error says what to install
    prefix, colon, _ = found.name.partition(":")
    if colon:
        raise UserError(
            f"There is no back end or module {prefix!r} for the environment {found.name!r}: "
            f"{nearest(prefix, BACK_ENDS)}"
        )
    known = [
        name if row.bare else f"{backend}:{name}"
        for backend, row in BACK_ENDS.items()
        for name in names(backend)
    ]
    raise UserError(f"There is no environment {found.name!r}: {suggestion(found.name, known)}")


def _from_backend(backend: str, found: EnvId) -> Env:
    row, env_id = BACK_ENDS[backend], f"{backend}:{found.name}{found.query}"
    if not row.installed:
        raise missing_extra(env_id, row.title, row.extra)
    wraps, options = split_wraps(found.options)
    single = partial(_single, row.single, found.name, found.options, env_id)
    if row.traced:
        env = in_jax_wrappers(load(row.make)(found.name, options, env_id), wraps, env_id)
        return Env(env.spec, env, None, single)
    if wraps and not row.wraps:
        raise UserError(
            f"The environments of {backend} are stepped as a batch in native code, so {env_id} "
            "cannot be wrapped one by one: wrap the environment of the back end gymnasium instead."
        )
    spec, host, process = load(row.make)(found.name, found.options, env_id)
    return Env(spec, None, host, single, process)


def in_jax_wrappers(env: JaxEnv, wraps: tuple[Wrap, ...], env_id: str) -> JaxEnv:
    """A JAX environment in its wrappers; without any, Gymnasium is not imported."""
    if not wraps:
        return env
    from dovetail.envs.jax_wrappers import jax_wrapped

    return jax_wrapped(env, wraps, env_id)


def _single(function: str, name: str, options: Mapping[str, Any], env_id: str, **more: Any) -> Any:
    """One Gymnasium environment that renders this one, in its wrappers, if there is one."""
    from dovetail.envs.render import make_single

    wraps, _ = split_wraps(options)
    return wrapped(partial(make_single, function, name, options), wraps, env_id, **more)
