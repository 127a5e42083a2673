"""The description of a run from which each process builds its part, and version checks."""

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
"""Packages whose versions must agree on all nodes, since they affect the results."""


@dataclass(frozen=True)
class Job:
    """A run, as sent to its processes."""

    build: Callable[[Plan], tuple[Graph, Env]]
    """Traces the algorithm again: building a graph is cheaper than sending it."""
    plan: Plan
    patience: float
    """Seconds without progress after which a worker counts as stuck."""
    seeds: int
    devices: int
    """Devices per learner process."""
    asynchronous: bool
    """Whether to dispatch compiled calls asynchronously, as for JAX environments."""


def versions() -> dict[str, str]:
    """The versions of Python and of the packages in `ALIKE`."""
    found = {"Python": platform.python_version()}
    for package in ALIKE:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def refuse_other_versions(wanted: Mapping[str, str], node: str) -> None:
    """Refuses a node whose versions differ from the driver's."""
    here = versions()
    for name, ours in wanted.items():
        theirs = here.get(name, "missing")
        if theirs != ours:
            raise UserError(
                f"Node {node} has {name} {theirs}, but the driver has {ours}: install the same "
                f"versions everywhere."
            )


def prepare(job: Job, gpus: float) -> None:
    """Configures JAX in a process, before it initializes its backends."""
    import jax

    flags = os.environ.get("XLA_FLAGS", "").split()
    others = [flag for flag in flags if not flag.startswith(DEVICES)]
    os.environ["XLA_FLAGS"] = " ".join(others)  # inherited from the driver, not for this process
    # JAX would otherwise find a GPU that another process has reserved.
    if not gpus:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", job.devices)
    if not job.asynchronous:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
