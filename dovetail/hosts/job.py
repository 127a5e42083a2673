"""What a process needs to build its part of a run, and what it must have in common with others."""

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from dovetail.envs.resolve import Env
from dovetail.errors import UserError
from dovetail.graph.ir import Graph
from dovetail.plan.ir import Plan

DEVICES = "--xla_force_host_platform_device_count"
ALIKE = ("dovetail", "jax", "jaxlib", "numpy", "optax", "gymnasium", "gymnax", "ray")
"""Packages that must be of one version everywhere: they decide what is computed."""


@dataclass(frozen=True)
class Job:
    """One run, as its processes are told of it."""

    build: Callable[[Plan], tuple[Graph, Env]]
    """Traces the algorithm once more: a graph is cheaper to make than to send."""
    plan: Plan
    patience: float
    seeds: int
    devices: int
    """Of one learner process."""
    asynchronous: bool
    """Whether compiled calls return before they are done: for environments in JAX."""


def versions() -> dict[str, str]:
    """Of Python and the packages that must be alike."""
    found = {"Python": platform.python_version()}
    for package in ALIKE:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def refuse_other_versions(wanted: Mapping[str, str], node: str) -> None:
    """Refuses to work where other versions are installed than on the driver."""
    here = versions()
    for name, ours in wanted.items():
        theirs = here.get(name, "missing")
        if theirs != ours:
            raise UserError(
                f"Node {node} has {name} {theirs}, but the driver has {ours}: install the same "
                f"versions everywhere."
            )


def prepare(job: Job, gpus: float) -> None:
    """Sets JAX up in a process, before it starts."""
    import jax

    flags = os.environ.get("XLA_FLAGS", "").split()
    others = [flag for flag in flags if not flag.startswith(DEVICES)]
    os.environ["XLA_FLAGS"] = " ".join(others)  # the driver's devices are not ours
    if not gpus:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", job.devices)
    if not job.asynchronous:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
