"""The deployment of a run on a cluster, from the command line or a TOML file.

It states the cluster, the devices per learner process, and the resources of learner and actor
processes. Algorithms and strategies do not depend on it.
"""

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict

from dovetail.errors import UserError, nearest


@dataclass(frozen=True)
class ProcessShare:
    """The resources that one process reserves, and the nodes it may run on."""

    cpus: float = 1.0
    """CPUs per process; with environment processes, CPUs for each of these instead."""
    gpus: float = 0.0
    """GPUs per process."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources of the cluster: name → amount."""
    nodes: tuple[str, ...] = ()
    """Names, addresses or ids of the allowed nodes; any unless given."""
    per_node: int | None = None
    """Maximum number of such processes per node."""


@dataclass(frozen=True)
class Deployment:
    """A cluster, and the resources of the processes on it."""

    cluster: str = "auto"
    """local starts one on this machine, auto joins the one running here, host:port another."""
    learner: ProcessShare = ProcessShare()
    """Resources of each learner process."""
    actor: ProcessShare = ProcessShare()
    """Resources of each actor process."""
    learner_devices: int = 1
    """Devices per learner process."""

    @classmethod
    def load(cls, path: str | Path) -> "Deployment":
        """Reads a deployment from a TOML file."""
        found = _read(path)
        _refuse_unknown(path, found, ("cluster", "learner", "actor"), "")
        # In the file `devices` is a key of [learner]; here it is a field of the deployment.
        learner = dict(_table(path, found, "learner"))
        devices = learner.pop("devices", 1)
        if not isinstance(devices, int) or devices < 1:
            raise UserError(f"{path}: [learner] devices is {devices!r}; it must be 1 or more.")
        cluster = found.get("cluster", "auto")
        if not isinstance(cluster, str):
            raise UserError(f"{path}: cluster is {cluster!r}; write local, auto or host:port.")
        actor = _share(path, _table(path, found, "actor"), "actor")
        return cls(cluster, _share(path, learner, "learner"), actor, devices)


class SavedShare(TypedDict):
    """A `ProcessShare` in a run's config."""

    cpus: float
    gpus: float
    resources: dict[str, float]
    nodes: list[str]
    per_node: int | None


class Saved(TypedDict):
    """A `Deployment` in a run's config."""

    cluster: str
    learner: SavedShare
    actor: SavedShare
    learner_devices: int


def _read(path: str | Path) -> Mapping[str, object]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError as error:
        raise UserError(f"There is no deployment file {path}: check the path.") from error
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"The deployment file {path} cannot be read: {error}.") from error


def rebuilt(found: Saved | None) -> Deployment | None:
    """Rebuilds a deployment from a run's config, as written by `dataclasses.asdict`."""
    if found is None:
        return None
    return Deployment(
        found["cluster"],
        _share_again(found["learner"]),
        _share_again(found["actor"]),
        found["learner_devices"],
    )


def _share_again(found: SavedShare) -> ProcessShare:
    return ProcessShare(
        found["cpus"], found["gpus"], found["resources"], tuple(found["nodes"]), found["per_node"]
    )


def _table(path: str | Path, found: Mapping[str, object], name: str) -> Mapping[str, object]:
    table = found.get(name, {})
    if not isinstance(table, Mapping):
        raise UserError(f"{path}: {name} is {table!r}; write it as a table, [{name}].")
    return table


def _share(path: str | Path, table: Mapping[str, object], name: str) -> ProcessShare:
    """The resources in a table of the file; raises `UserError` at the first wrong entry."""
    known = [f.name for f in dataclasses.fields(ProcessShare)]
    _refuse_unknown(path, table, [*known, "devices"] if name == "learner" else known, f"[{name}] ")
    for key in ("cpus", "gpus"):
        amount = table.get(key, 0)
        # In Python a boolean is an integer.
        if isinstance(amount, bool) or not isinstance(amount, int | float) or amount < 0:
            raise UserError(f"{path}: [{name}] {key} is {amount!r}; it must be 0 or more.")
    most = table.get("per_node", 1)
    if not isinstance(most, int) or most < 1:
        raise UserError(f"{path}: [{name}] per_node is {most!r}; it must be 1 or more.")
    nodes = table.get("nodes", [])
    if not isinstance(nodes, list) or not all(isinstance(node, str) for node in nodes):
        raise UserError(f"{path}: [{name}] nodes is {nodes!r}; it must be a list of names.")
    resources = table.get("resources", {})
    if not isinstance(resources, Mapping) or not all(
        isinstance(amount, int | float) and amount > 0 for amount in resources.values()
    ):
        raise UserError(f"{path}: [{name}] resources is {resources!r}; give each an amount over 0.")
    given = {**table, "nodes": tuple(nodes), "resources": dict(resources)}
    return replace(ProcessShare(), **given)


def _refuse_unknown(
    path: str | Path, table: Mapping[str, object], known: Sequence[str], where: str
) -> None:
    unknown = next((key for key in table if key not in known), None)
    if unknown is not None:
        raise UserError(f"{path}: {where}has no key {unknown!r}: {nearest(unknown, known)}")
