"""From what the user wrote to an environment: ids, Python objects, classes in files.

A bare id is looked up in the back ends in order: JAX's first when the environment is to be traced
into a compiled program, Gymnasium's first otherwise. `backend:` in front of the name decides.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from dovetail.envs.interface import EnvSpec, HostEnv, JaxEnv, SplitHostEnv
from dovetail.envs.names import BACKENDS, EnvId, parse, suggestion
from dovetail.errors import UserError, nearest

_ABOUT = {
    "gymnasium": ("gymnasium", "Gymnasium's registry, stepped on the host"),
    "dovetail": ("jax", "small JAX environments of our own, compiled with the algorithm"),
    "gymnax": ("gymnax", "Gymnax's JAX environments, compiled with the algorithm"),
    "envpool": ("envpool", "EnvPool's C++ environments; pip install 'dovetail[envpool]'"),
    "ale": ("ale_py", "Atari games in ALE's native threads; pip install 'dovetail[atari]'"),
}
_TRACED_FIRST = ("dovetail", "gymnax", "gymnasium")
_HOST_FIRST = ("gymnasium", "dovetail", "gymnax")


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
    return [
        (name, about, importlib.util.find_spec(package) is not None)
        for name, (package, about) in _ABOUT.items()
    ]


def names(backend: str) -> list[str]:
    """The environments that a back end has; empty if it is not installed."""
    if backend not in _ABOUT:
        raise UserError(f"There is no back end {backend!r}: {nearest(backend, BACKENDS)}")
    if importlib.util.find_spec(_ABOUT[backend][0]) is None:
        return []
    return _module(backend).names()


def _module(backend: str) -> Any:
    name = "native" if backend == "dovetail" else backend
    return importlib.import_module(f"dovetail.envs.{name}")


def _backend_of(found: EnvId, traced: bool | None) -> str:
    """The first back end that knows a bare id."""
    for backend in _TRACED_FIRST if traced else _HOST_FIRST:
        if _module(backend).has(found.name):
            return backend
    if found.name.startswith("ALE/"):
        return "gymnasium"  # which says what to install
    prefix, colon, _ = found.name.partition(":")
    if colon:
        raise UserError(
            f"There is no back end or module {prefix!r} for the environment {found.name!r}: "
            f"{nearest(prefix, BACKENDS)}"
        )
    known = [name for backend in _HOST_FIRST for name in names(backend)]
    known += [f"ale:{game}" for game in names("ale")]
    raise UserError(f"There is no environment {found.name!r}: {suggestion(found.name, known)}")


def _from_backend(backend: str, found: EnvId) -> Env:
    env_id = f"{backend}:{found.name}{found.query}"
    made = _module(backend).make(found.name, found.options, env_id)
    single = partial(_single, backend, found.name, found.options)
    if backend in ("dovetail", "gymnax"):
        return Env(made.spec, made, None, single)
    spec, host, process = made
    return Env(spec, None, host, single, process)


def _single(backend: str, name: str, options: Mapping[str, Any], **more: Any) -> Any:
    """One bare Gymnasium environment that shows what this one shows, where there is one."""
    from dovetail.envs.render import make_single

    return make_single(backend, name, options, **more)
