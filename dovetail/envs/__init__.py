"""Environments: one interface, several back ends, a conformance kit.

Importing this package does not import JAX: environment processes use parts of it and run without.
"""

from typing import TYPE_CHECKING

from dovetail.envs.interface import (
    ActionSpace,
    Continuous,
    Discrete,
    EnvSpec,
    HostEnv,
    HostStep,
    JaxEnv,
    JaxStep,
    MultiDiscrete,
    Observation,
    SplitHostEnv,
)
from dovetail.envs.resolve import Env, backends, names, resolve
from dovetail.lazy import lazy_attributes

if TYPE_CHECKING:
    from dovetail.envs.conformance import check_host_env, check_jax_env

__all__ = [
    "ActionSpace",
    "Continuous",
    "Discrete",
    "Env",
    "EnvSpec",
    "HostEnv",
    "HostStep",
    "JaxEnv",
    "JaxStep",
    "MultiDiscrete",
    "Observation",
    "SplitHostEnv",
    "backends",
    "check_host_env",
    "check_jax_env",
    "names",
    "resolve",
]
__getattr__, _, _ = lazy_attributes(
    ["dovetail.envs.conformance:check_host_env", "dovetail.envs.conformance:check_jax_env"]
)


def __dir__() -> list[str]:
    return __all__
