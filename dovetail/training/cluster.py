"""Clusters and spawned processes: their resources, and the runtime of a plan on them."""

import inspect
import math
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.envs.info import with_info
from dovetail.envs.resolve import Env, resolve
from dovetail.envs.wrapping import WrappedObject, files_of, objects_of, relocated
from dovetail.errors import UserError
from dovetail.graph.ir import Graph
from dovetail.graph.taps import Wanted
from dovetail.hosts.deployment import Deployment, ProcessShare
from dovetail.loading import USER_MODULE, keep, load_object, reference
from dovetail.plan.ir import Cluster, Needs, Node, Plan, Resources, WorkerKind
from dovetail.replay.data import DataSpec
from dovetail.replay.service.remote import Served
from dovetail.run.settings import Settings
from dovetail.training.planning import Planned, graphs_of

if TYPE_CHECKING:
    from dovetail.hosts.interface import Processes
    from dovetail.runtime.interface import Runtime

HERE = "this machine"
PACKAGE = Path(__file__).resolve().parent.parent
LEFT_OUT = (".git/", ".venv/", "venv/", "runs/", "**/__pycache__/", "node_modules/")
"""Patterns in a user's folder that are not sent to the workers."""


def resources_of(deployment: Deployment, nodes: tuple[Node, ...] | None = None) -> Resources:
    """The resources for a plan: the cluster's nodes, or this machine for a local cluster."""
    cores = os.cpu_count() or 1
    found = nodes or (Node(HERE, "", math.inf),)
    cpus = sum(node.cpus for node in found)
    gpus = sum(node.gpus for node in found)
    devices = int(gpus) if deployment.learner.gpus else max(2, int(min(cpus, cores)))
    if nodes is not None and not deployment.learner.gpus:
        devices = max(1, int(cpus)) * deployment.learner_devices
    cluster = Cluster(
        found,
        _needs(deployment.learner),
        _needs(deployment.actor),
        deployment.learner_devices,
    )
    return Resources(devices, cores if nodes is None else int(cpus), cluster)


def _needs(share: ProcessShare) -> Needs:
    others = tuple(sorted(share.resources.items()))
    return Needs(share.cpus, share.gpus, others, share.nodes, share.per_node)


def connect(
    deployment: Deployment, plan: Plan | None = None, user_files: "UserFiles | None" = None
) -> Any:
    """Joins the deployment's cluster; starts a local one with enough CPUs for `plan`."""
    from dovetail.hosts.ray.connection import RayConnection

    if deployment.cluster != "local":
        return RayConnection(deployment.cluster, files=user_files.files() if user_files else None)
    wanted = sum(process.cpus for process in plan.processes) if plan is not None else 0
    return RayConnection("local", max(os.cpu_count() or 1, math.ceil(wanted)))


def join(deployment: Deployment, user_files: "UserFiles | None" = None) -> tuple[Any, Resources]:
    """Joins a cluster; returns (connection, its resources).

    The connection is None for a local cluster, which is started once the plan is known.
    `user_files` are sent to the cluster.
    """
    if deployment.cluster == "local":
        import_ray()
        return None, resources_of(deployment)
    connection = connect(deployment, user_files=user_files)
    return connection, resources_of(deployment, connection.nodes())


def import_ray() -> None:
    """Raises a `UserError` if Ray is not installed."""
    from dovetail.hosts.ray.connection import import_ray

    import_ray()


@dataclass(frozen=True)
class Recipe:
    """Rebuilds the graph and the environment of a run in another process.

    Only the inputs of tracing are sent; each process traces the graph again.
    """

    algorithm: Any
    env: Any
    """The environment as the user gave it."""
    strategy: Any
    steps: int
    prepare: Callable[[], None]
    """Called first, in every process."""
    wanted: Wanted | None = None
    """Selects the part of trajectories to tap."""
    served: Served | None = None
    """The servers that hold the replay."""
    data: DataSpec | None = None
    """The recorded steps to learn from, if any."""
    online: bool = True
    """Whether the run acts."""
    objects: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The objects that `env` refers to and only the driver has, by their references."""
    info: tuple[str, ...] = ()
    """Keys of the environments' `info` to log."""

    def __call__(self, plan: Plan) -> tuple[Graph, Env]:
        """Loads the user's files in this process and traces for the plan's copies."""
        self.prepare()
        keep(self.objects)
        algorithm, strategy = _made(self.algorithm), _made(self.strategy)
        env = with_info(resolve(_made(self.env), traced=strategy.traced_envs), self.info)
        env = env if self.online else replace(env, jax=None)
        graphs = graphs_of(
            *(algorithm, env, self.steps, self.data, self.online),
            wanted=self.wanted,
            served=self.served,
            devices=strategy.devices_wanted,
        )
        return graphs.at(plan.traced_copies, plan.update_envs, plan.batch or None), env


@dataclass(frozen=True)
class Named:
    """An object of a class in a user's file, sent by name; the receiving process loads the file."""

    target: str
    options: dict[str, Any]

    def make(self) -> Any:
        """Creates the object; relative paths refer to the worker's copy of the user's folder."""
        return load_object(self.target, "class")(**self.options)


def _made(thing: Any) -> Any:
    return thing.make() if isinstance(thing, Named) else thing


def cluster_runtime(
    recipe: Recipe,
    planned: Planned,
    deployment: Deployment,
    connection: Any,
    settings: Settings,
    tell: Callable[[str], None],
) -> "Runtime":
    """Creates the runtime of a plan on a cluster; its processes build the run from `recipe`."""
    from dovetail.hosts.job import Job
    from dovetail.hosts.ray.runtime import ClusterRuntime

    job = Job(
        build=UserFiles.of(recipe, deployment).pack(recipe),
        plan=planned.plan,
        patience=settings.patience,
        seeds=settings.seeds,
        devices=deployment.learner_devices,
        asynchronous=recipe.strategy.traced_envs,
    )
    return ClusterRuntime(planned.graph, job, connection, tell)


def apart_in(plan: Plan) -> list[str]:
    """The process workers of a single-machine plan, except those that only step environments."""
    steps = {i.worker for i in plan.instances if i.fragment.endswith(".step")}
    kinds = [worker for worker in plan.workers if worker.kind is WorkerKind.PROCESS]
    return [worker.name for worker in kinds if worker.name not in steps]


def spawned_processes(
    recipe: Recipe, plan: Plan, settings: Settings, tell: Callable[[str], None]
) -> "Processes | None":
    """Spawns the processes for sides of a plan on this machine; None if there are none."""
    apart = apart_in(plan)
    if not apart:
        return None
    from dovetail.hosts.interface import Processes
    from dovetail.hosts.job import Job
    from dovetail.hosts.processes import SpawnedHost

    deployment = Deployment("local")
    job = Job(
        build=UserFiles.of(recipe, deployment).pack(recipe),
        plan=plan,
        patience=settings.patience,
        seeds=1,
        devices=1,
        asynchronous=recipe.strategy.traced_envs,
    )
    groups = {name: (name,) for name in apart}
    return Processes(SpawnedHost(job, groups), groups, settings.patience, tell)


@dataclass(frozen=True)
class UserFiles:
    """The user's own files that the workers need."""

    root: Path | None
    """The common folder to send; None if the workers see the same files."""

    @classmethod
    def of(cls, recipe: Recipe, deployment: Deployment) -> "UserFiles":
        """Finds the files that a recipe refers to."""
        env = recipe.env
        files = [*_user_files(type(recipe.algorithm)), *_user_files(type(recipe.strategy))]
        files += _option_files(recipe.algorithm)
        files += [_absolute(path) for path in files_of(env)]
        if not isinstance(env, str):
            env = env.env if isinstance(env, WrappedObject) else env
            files += _user_files(env if isinstance(env, type) or callable(env) else type(env))
        if not files or deployment.cluster == "local":
            return cls(None)
        root = Path(os.path.commonpath([_project(file) for file in files]))
        if root in (Path(root.anchor), Path.home()):
            names = ", ".join(str(file) for file in files)
            raise UserError(
                f"The files of this run ({names}) have no folder in common but {root}, which is "
                f"too much to send to the workers: put them into one folder."
            )
        return cls(root)

    def pack(self, recipe: Recipe) -> Recipe:
        """Returns the recipe in a form that a worker can load."""
        return replace(
            recipe,
            algorithm=self._thing(recipe.algorithm),
            env=relocated(recipe.env, lambda path: self._place(_absolute(path))),
            strategy=self._thing(recipe.strategy),
            objects=objects_of(recipe.env),
        )

    def _thing(self, thing: Any) -> Any:
        """An algorithm or a strategy to send: by name if its class comes from a loaded file."""
        kind: type[Any] = type(thing)
        given = {f.name: getattr(thing, f.name) for f in fields(kind)} if is_dataclass(kind) else {}
        options = {name: self._option(value) for name, value in given.items()}
        if not kind.__module__.startswith(USER_MODULE):
            return replace(thing, **options) if options != given else thing
        return Named(f"{self._place(Path(inspect.getfile(kind)))}:{kind.__qualname__}", options)

    def _option(self, value: Any) -> Any:
        """An option to send: a class or text that refers to a user's file names its place there."""
        if isinstance(value, type) and value.__module__.startswith(USER_MODULE):
            value = reference(value)
        path, colon, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
        return f"{self._place(_absolute(path))}:{name}" if colon and path.endswith(".py") else value

    def files(self) -> dict[str, Any]:
        """Ray's runtime environment, which makes the folder the workers' working directory."""
        if self.root is None:
            return {}
        return {"working_dir": str(self.root), "excludes": list(LEFT_OUT)}

    def _place(self, file: Path) -> str:
        return str(file) if self.root is None else str(file.relative_to(self.root))


def _user_files(kind: Any) -> Iterator[Path]:
    """The file of a class or function, unless it belongs to an installed package."""
    module = sys.modules.get(getattr(kind, "__module__", ""), None)
    file = getattr(module, "__file__", None)
    if file is None or module is sys.modules["__main__"]:
        return
    path = Path(file).resolve()
    kinds = ("stdlib", "purelib", "platlib")
    installed = [Path(sysconfig.get_path(kind)).resolve() for kind in kinds]
    if not any(path.is_relative_to(place) for place in (*installed, PACKAGE)):
        yield path


def _options(thing: Any) -> dict[str, Any]:
    """The options of an algorithm or a strategy."""
    names = [one.name for one in fields(thing)] if is_dataclass(type(thing)) else []
    return {name: getattr(thing, name) for name in names}


def _option_files(thing: Any) -> Iterator[Path]:
    """The user's files that the options of an algorithm refer to: those of a network."""
    for value in _options(thing).values():
        if isinstance(value, str) and ".py:" in value:
            yield _absolute(value.rpartition(":")[0])
        elif isinstance(value, type):
            yield from _user_files(value)


def _absolute(path: str) -> Path:
    return Path(path).expanduser().resolve()


def _project(file: Path) -> Path:
    """The folder from which a file is imported: the parent of its top-level package."""
    folder = file.parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder
