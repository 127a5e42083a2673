"""Every runtime is one that the training loop can drive."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from dovetail.runtime.interface import Runtime
from dovetail.runtime.local import LocalRuntime

if TYPE_CHECKING:  # the type checker compares them with the protocol
    from dovetail.hosts.ray.runtime import ClusterRuntime

    def local_runtime(runtime: LocalRuntime) -> Runtime:
        return runtime

    def cluster_runtime(runtime: ClusterRuntime) -> Runtime:
        return runtime


def methods(kind: type) -> dict[str, list[tuple[str, object]]]:
    """The parameters of its public methods."""
    found = inspect.getmembers(kind, inspect.isfunction)
    return {
        name: [(p.name, p.kind) for p in inspect.signature(method).parameters.values()]
        for name, method in found
        if not name.startswith("_")
    }


def cluster() -> type:
    pytest.importorskip("ray")
    from dovetail.hosts.ray.runtime import ClusterRuntime

    return ClusterRuntime


@pytest.mark.parametrize("kind", [lambda: LocalRuntime, cluster], ids=["local", "cluster"])
def test_a_runtime_takes_what_the_loop_gives(kind: Callable[[], type]) -> None:
    wanted, found = methods(Runtime), methods(kind())
    assert len(wanted) == 7
    assert {name: found.get(name) for name in wanted} == wanted
