"""Where a run's processes go on a cluster: a deployment, from the command line or a TOML file.

It says which cluster, how many devices a learner process has, and what a learner's and an actor's
process take of their nodes. No algorithm and no strategy knows it.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.errors import UserError, nearest


@dataclass(frozen=True)
class ProcessShare:
    """What one process takes of its node, and where it may be."""

    cpus: float = 1.0
    """CPUs of each; a process that steps environments in further processes takes so many for each
    of those."""
    gpus: float = 0.0
    """GPUs of each."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Resources that the cluster's owner named, and how much of each."""
    nodes: tuple[str, ...] = ()
    """Names, addresses or ids of the nodes it may be on; any unless given."""
    per_node: int | None = None
    """At most so many on one node."""


@dataclass(frozen=True)
class Deployment:
    """A cluster, and what the processes on it are given."""

    cluster: str = "auto"
    """local starts one on this machine, auto joins the one that runs here, host:port another."""
    learner: ProcessShare = ProcessShare()
    """Of each learner process."""
    actor: ProcessShare = ProcessShare()
    """Of each actor process."""
    learner_devices: int = 1
    """Devices of one learner process."""

    @classmethod
    def load(cls, path: str | Path) -> "Deployment":
        """The deployment that a TOML file describes."""
        found = _read(path)
        _refuse_unknown(path, found, ("cluster", "learner", "actor"), "")
        learner = dict(_table(path, found, "learner"))
        devices = learner.pop("devices", 1)
        if not isinstance(devices, int) or devices < 1:
            raise UserError(f"{path}: [learner] devices is {devices!r}; it must be 1 or more.")
        cluster = found.get("cluster", "auto")
        if not isinstance(cluster, str):
            raise UserError(f"{path}: cluster is {cluster!r}; write local, auto or host:port.")
        actor = _share(path, _table(path, found, "actor"), "actor")
        return cls(cluster, _share(path, learner, "learner"), actor, devices)


def _read(path: str | Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError as error:
        raise UserError(f"There is no deployment file {path}: check the path.") from error
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"The deployment file {path} cannot be read: {error}.") from error


def rebuilt(found: dict[str, Any] | None) -> Deployment | None:
    """The deployment that a run's config kept, as `dataclasses.asdict` made it."""
    if found is None:
        return None
    return Deployment(
        found["cluster"],
        _share_again(found["learner"]),
        _share_again(found["actor"]),
        found["learner_devices"],
    )


def _share_again(found: dict[str, Any]) -> ProcessShare:
    fields: dict[str, Any] = {**found, "nodes": tuple(found["nodes"])}
    return ProcessShare(**fields)


def _table(path: str | Path, found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = found.get(name, {})
    if not isinstance(table, Mapping):
        raise UserError(f"{path}: {name} is {table!r}; write it as a table, [{name}].")
    return table


def _share(path: str | Path, table: Mapping[str, Any], name: str) -> ProcessShare:
    known = [f.name for f in dataclasses.fields(ProcessShare)]
    _refuse_unknown(path, table, [*known, "devices"] if name == "learner" else known, f"[{name}] ")
    for key in ("cpus", "gpus"):
        amount = table.get(key, 0)
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
    rebuilt: dict[str, Any] = {**table, "nodes": tuple(nodes), "resources": dict(resources)}
    return ProcessShare(**rebuilt)


def _refuse_unknown(path: str | Path, table: Mapping[str, Any], known: Any, where: str) -> None:
    unknown = next((key for key in table if key not in known), None)
    if unknown is not None:
        raise UserError(f"{path}: {where}has no key {unknown!r}: {nearest(unknown, known)}")
