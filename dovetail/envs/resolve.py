"""From what the user wrote to an environment: ids, Python objects, classes in files.

A bare id is looked up in the back ends in order: JAX's first when the environment is to be traced
into a compiled program, Gymnasium's first otherwise. `backend:` in front of the name decides.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from dovetail.envs.interface import EnvSpec, HostEnv, JaxEnv, SplitHostEnv
from dovetail.envs.names import EnvId, missing_extra, parse, suggestion
from dovetail.envs.registry import BACK_ENDS, load, looked_up
from dovetail.errors import UserError, nearest


@dataclass(frozen=True)
class Env:
    """An environment that can be made as often as a plan needs: traced, or on the host."""

    spec: EnvSpec
    jax: JaxEnv | None
    """The pure functions, if it can be compiled with the algorithm."""
    host: Callable[[int], HostEnv] | None
    """Makes a batch of that many environments, if it lives outside JAX."""
    single: Callable[..., Any] | None = None
    """Makes one bare `gymnasium.Env` for pictures: see `render_env`."""
    process: Callable[..., SplitHostEnv] | None = None
    """Called as (num_envs, bell=None, first=0, patience=30), makes a batch in a process of its own,
    which releases the semaphore `bell` after each step and may take `patience` seconds for it; its
    environments are called `first` … in messages. None if that cannot be, or is needless because
    threads step it side by side."""


def resolve(env: Any, *, traced: bool | None = None) -> Env:
    """The environment that an id, a `JaxEnv`, a class, a factory or an `Env` stands for.

    `traced` says whether it will be compiled with the algorithm; it only decides between back
    ends, so an environment that cannot be traced is still returned.
    """
    if isinstance(env, Env):
        return env
    if not isinstance(env, str):
        from dovetail.envs.own import from_object

        return from_object(env, {}, f"python:{getattr(env, '__name__', type(env).__name__)}")
    found = parse(env)
    if found.backend == "file":
        from dovetail.envs.own import from_file

        return from_file(found.path, found.name, found.options, env)
    backend = found.backend or _backend_of(found, traced)
    return _from_backend(backend, found)


def backends() -> list[tuple[str, str, bool]]:
    """(name, one line about it, whether it is installed) of every back end."""
    return [(name, row.about, row.installed) for name, row in BACK_ENDS.items()]


def names(backend: str) -> list[str]:
    """The environments that a back end has; empty if it is not installed."""
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
        return "gymnasium"  # which says what to install
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
    made = load(row.make)(found.name, found.options, env_id)
    single = partial(_single, row.single, found.name, found.options)
    if row.traced:
        return Env(made.spec, made, None, single)
    spec, host, process = made
    return Env(spec, None, host, single, process)


def _single(function: str, name: str, options: Mapping[str, Any], **more: Any) -> Any:
    """One bare Gymnasium environment that shows what this one shows, where there is one."""
    from dovetail.envs.render import make_single

    return make_single(function, name, options, **more)
