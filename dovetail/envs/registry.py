"""The back ends that provide environments, one row each.

To add one, write a module with `make` and `names`, and a row here. Ids, `dovetail list`, the doctor
and the errors for unknown or missing back ends all read this table. Functions are named as
"module:function" and imported when needed.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BackEnd:
    """A provider of environments, and the functions that make them."""

    make: str
    """(name, options, env_id) → a `JaxEnv` if `traced`; otherwise (spec, a factory of batches by
    size, a factory of batches in a separate process or None)."""
    names: str
    """() → the names of its environments."""
    about: str
    """One line for lists."""
    package: str
    """The package to import."""
    title: str
    """Display name of the package."""
    extra: str = ""
    """The extra of Dovetail that installs it; empty if it is a dependency."""
    traced: bool = False
    """Whether its environments are written in JAX and compiled with the algorithm."""
    wraps: bool = False
    """Whether `make` takes the option `wrap` and wraps single environments, if not `traced`."""
    bare: bool = False
    """Whether names without a back end are looked up here."""
    has: str = ""
    """(name) → whether it has that environment; by default, looks in `names`."""
    single: str = "dovetail.envs.render:of_same_name"
    """(name, options, **more) → one `gymnasium.Env` that renders the environment."""

    @property
    def installed(self) -> bool:
        """Whether its package is installed."""
        return importlib.util.find_spec(self.package) is not None

    def knows(self, name: str) -> bool:
        """Whether it is installed and has an environment of that name."""
        if not self.installed:
            return False
        return bool(load(self.has)(name)) if self.has else name in load(self.names)()


BACK_ENDS: dict[str, BackEnd] = {
    "gymnasium": BackEnd(
        make="dovetail.envs.gymnasium:make",
        names="dovetail.envs.gymnasium:names",
        about="Gymnasium's registry, stepped on the host",
        package="gymnasium",
        title="Gymnasium",
        wraps=True,
        bare=True,
        has="dovetail.envs.gymnasium:has",
        single="dovetail.envs.gymnasium:single",
    ),
    "dovetail": BackEnd(
        make="dovetail.envs.native:make",
        names="dovetail.envs.native:names",
        about="small JAX environments of our own, compiled with the algorithm",
        package="jax",
        title="JAX",
        traced=True,
        bare=True,
    ),
    "gymnax": BackEnd(
        make="dovetail.envs.gymnax:make",
        names="dovetail.envs.gymnax:names",
        about="Gymnax's JAX environments, compiled with the algorithm",
        package="gymnax",
        title="Gymnax",
        traced=True,
        bare=True,
    ),
    "envpool": BackEnd(
        make="dovetail.envs.envpool:make",
        names="dovetail.envs.envpool:names",
        about="EnvPool's C++ environments; pip install 'dovetail[envpool]'",
        package="envpool",
        title="EnvPool",
        extra="envpool",
        single="dovetail.envs.envpool:single",
    ),
    "ale": BackEnd(
        make="dovetail.envs.ale:make",
        names="dovetail.envs.ale:names",
        about="Atari games in ALE's native threads; pip install 'dovetail[atari]'",
        package="ale_py",
        title="ale-py",
        extra="atari",
        single="dovetail.envs.ale:single",
    ),
}
"""Keyed by the prefix before the colon of an id. Bare names are looked up in this order, except
that JAX environments come first when the environment is to be compiled."""


def load(reference: str) -> Any:
    """The function named by "module:function"."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def looked_up(traced: bool | None) -> list[str]:
    """The back ends that are searched for a bare name, in order."""
    found = [name for name, row in BACK_ENDS.items() if row.bare]
    return sorted(found, key=lambda name: not BACK_ENDS[name].traced) if traced else found
