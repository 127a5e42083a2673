"""The back ends that environments come from: one row each.

To add one, write a module with `make` and `names`, and its row here. Ids, `dovetail list`, the
doctor and the sentences for what is unknown or not installed all read this table. Functions are
named as "module:function" and imported when they are needed.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BackEnd:
    """Where environments come from, and how they are made."""

    make: str
    """(name, options, env_id) → a `JaxEnv` if `traced`; else (spec, what makes a batch of so many,
    what makes one in a process of its own or None)."""
    names: str
    """() → the environments that it has."""
    about: str
    """One line for lists."""
    package: str
    """What is imported for it."""
    title: str
    """What that package is called."""
    extra: str = ""
    """The extra of Dovetail that brings it; empty if it is a dependency."""
    traced: bool = False
    """Whether its environments are in JAX, and compiled with the algorithm."""
    bare: bool = False
    """Whether a name without a back end is looked up here."""
    has: str = ""
    """(name) → whether it has that one; by its names unless given."""
    single: str = "dovetail.envs.render:of_same_name"
    """(name, options, **more) → one `gymnasium.Env` that draws what the environment shows."""

    @property
    def installed(self) -> bool:
        """Whether its package is there."""
        return importlib.util.find_spec(self.package) is not None

    def knows(self, name: str) -> bool:
        """Whether it has an environment of that name."""
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
"""By the name that stands before the colon of an id. Bare names are looked up in this order, but in
JAX environments first where these are compiled."""


def load(reference: str) -> Any:
    """The function that "module:function" names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def looked_up(traced: bool | None) -> list[str]:
    """The back ends in which a bare name is looked up, in that order."""
    found = [name for name, row in BACK_ENDS.items() if row.bare]
    return sorted(found, key=lambda name: not BACK_ENDS[name].traced) if traced else found
