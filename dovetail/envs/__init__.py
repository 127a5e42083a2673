"""Environments: one interface, several back ends, a conformance kit."""

from dovetail.envs.conformance import check_host_env, check_jax_env
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
)
from dovetail.envs.resolve import Env, backends, names, resolve

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
    "backends",
    "check_host_env",
    "check_jax_env",
    "names",
    "resolve",
]
