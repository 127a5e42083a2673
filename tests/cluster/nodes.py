"""A Ray cluster of three nodes on this machine, and runtimes on it."""

import os
import secrets
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from small import STEPS, Started

from dovetail.algorithm import Algorithm, Task
from dovetail.envs.resolve import resolve
from dovetail.hosts.deployment import Deployment
from dovetail.run.settings import Settings
from dovetail.strategies.interface import Strategy
from dovetail.training import cluster as clustering
from dovetail.training.planning import plan_for
from dovetail.training.start import enable_compile_cache, first_state

MARK = f"{os.getpid()}-{secrets.token_hex(8)}"
os.environ["DOVETAIL_TESTS"] = MARK  # every process that these tests start inherits it
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))


class Nodes:
    """The cluster; `address` is where it is joined."""

    def __init__(self) -> None:
        clustering.import_ray()
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 200_000_000}
        with _starting_programs():
            self.ray = Cluster(initialize_head=True, head_node_args=head)
        self.address = str(self.ray.address)
        for _ in range(2):
            self.add()

    def add(self, **more: Any) -> Any:
        """One more node of two CPUs."""
        options: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 200_000_000, **more}
        with _starting_programs():
            return self.ray.add_node(**options)

    def remove(self, node: Any) -> None:
        """Ends a node at once, as if its machine had lost power."""
        self.ray.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """Ends every node."""
        self.ray.shutdown()


@contextmanager
def _starting_programs() -> Generator[None]:
    """Ray forks to start other programs, which share nothing with JAX's threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
        yield


class OnCluster(Started):
    """As `Started`, on a cluster."""

    def __init__(
        self,
        algorithm: Algorithm,
        env: Any,
        strategy: Strategy,
        deployment: Deployment,
        *,
        seed: int = 0,
        patience: float = 30.0,
    ) -> None:
        found = resolve(env, traced=strategy.traced_envs)
        recipe = clustering.Recipe(algorithm, env, strategy, STEPS, enable_compile_cache)
        user_files = clustering.UserFiles.of(recipe, deployment)
        connection, resources = clustering.join(deployment, user_files)
        self.told: list[str] = []
        try:
            planned = plan_for(algorithm, found, strategy, STEPS, resources)
            self.plan, self.graph = planned.plan, planned.graph
            settings = Settings(patience=patience)
            self.cluster: Any = clustering.cluster_runtime(
                recipe, planned, deployment, connection, settings, self.told.append
            )
            self.runtime = self.cluster
        except BaseException:
            connection.close()
            raise
        plan = planned.plan
        task = Task(found.spec, plan.update_envs, STEPS, plan.num_envs, plan.shards)
        bound = algorithm.bind(task)
        try:
            start = first_state(bound, found.jax, plan.num_envs, seed)
            self.state: Any = start[0]
            self.actor: Any = self.runtime.load(*start)
        except BaseException:
            self.runtime.close()
            raise


def processes_of(title: str) -> list[int]:
    """The processes of these tests whose title begins so: Ray calls a process by its class."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            own = f"DOVETAIL_TESTS={MARK}".encode() in (folder / "environ").read_bytes()
        except OSError:
            continue
        if own and line.startswith(title):
            found.append(int(folder.name))
    return found


@contextmanager
def fresh_nodes() -> Generator[Nodes]:
    """A cluster for one test, which may break it."""
    nodes = Nodes()
    try:
        yield nodes
    finally:
        nodes.close()
