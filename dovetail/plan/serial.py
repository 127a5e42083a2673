"""Lossless conversion of a plan to JSON and back."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dovetail.errors import UserError
from dovetail.plan.ir import Instance, Link, LinkKind, Plan, Process, Worker, WorkerKind
from dovetail.run.legacy import with_present_copies, with_present_keys


def to_json(plan: Plan) -> dict[str, Any]:
    """Converts a plan to plain lists and dicts, as `json.loads` would return them.

    `plan.json` of a run has this form.
    """
    fields = asdict(plan)
    for worker in fields["workers"]:
        worker["devices"] = list(worker["devices"])
        worker["kind"] = worker["kind"].value
    for instance in fields["instances"]:
        instance["envs"] = None if instance["envs"] is None else list(instance["envs"])
    for link in fields["links"]:
        link["kind"] = link["kind"].value
    for process in fields["processes"]:
        process["workers"] = list(process["workers"])
        process["others"] = [list(pair) for pair in process["others"]]
    fields["copies"] = dict(plan.copies)
    return {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}


def from_json(fields: Mapping[str, Any]) -> Plan:
    """Inverse of `to_json`; raises `UserError` if the fields do not describe a plan."""
    try:
        # Plans in run folders of earlier versions have other names.
        fields = with_present_copies(with_present_keys(fields))
        rebuilt: dict[str, Any] = {
            **fields,
            "copies": tuple(fields["copies"].items()),
            "workers": tuple(_worker(worker) for worker in fields["workers"]),
            "instances": tuple(_instance(instance) for instance in fields["instances"]),
            "links": tuple(_link(link) for link in fields["links"]),
            "processes": tuple(_process(process) for process in fields["processes"]),
            "notes": tuple(fields["notes"]),
        }
        return Plan(**rebuilt)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"This is not a plan as Dovetail writes one ({error}): write it again with "
            f"`dovetail explain … --json`."
        ) from error


def _worker(fields: Mapping[str, Any]) -> Worker:
    # JSON has no tuples and no enums.
    kind, devices = WorkerKind(fields["kind"]), tuple(fields["devices"])
    return Worker(fields["name"], devices, kind, fields["fused"])


def _instance(fields: Mapping[str, Any]) -> Instance:
    envs = fields["envs"]
    served = None if envs is None else (envs[0], envs[1])
    return Instance(fields["fragment"], fields["worker"], served)


def _link(fields: Mapping[str, Any]) -> Link:
    rebuilt: dict[str, Any] = {**fields, "kind": LinkKind(fields["kind"])}
    return Link(**rebuilt)


def _process(fields: Mapping[str, Any]) -> Process:
    others = tuple((name, amount) for name, amount in fields["others"])
    rebuilt: dict[str, Any] = {**fields, "workers": tuple(fields["workers"]), "others": others}
    return Process(**rebuilt)
