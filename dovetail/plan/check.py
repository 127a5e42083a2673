"""Whether a plan is sound: each check only rejects, with a sentence.

A policy is a user's own code as often as ours, so its plan is not trusted: what the runtime relies
on is checked here, in one ordered list.
"""

from collections import Counter
from collections.abc import Callable

from dovetail.errors import UserError, nearest
from dovetail.graph.ir import Fragment, Graph
from dovetail.plan.ir import LinkKind, Plan

STATE = "state"
"""The source of what the learner's state sends before any fragment has run."""


def check(plan: Plan, graph: Graph, devices: int | None = None) -> None:
    """Refuses a plan that the runtime could not run; `devices` is how many the machine has."""
    for one_check in CHECKS:
        one_check(plan, graph)
    if devices is not None:
        _devices_exist(plan, devices)


def _sizes_are_positive(plan: Plan, graph: Graph) -> None:
    if plan.num_envs < 1 or plan.replicas < 1:
        raise _refusal(
            plan,
            f"has {plan.num_envs} environments and {plan.replicas} replicas; "
            "it needs at least 1 of each",
        )


def _environments_divide(plan: Plan, graph: Graph) -> None:
    if plan.num_envs != plan.replicas * graph.num_envs:
        raise _refusal(
            plan,
            f"has {plan.num_envs} environments on {plan.replicas} replicas, but the graph was "
            f"traced with {graph.num_envs} on each; choose a multiple of {plan.replicas} "
            "environments",
        )


def _workers_have_devices(plan: Plan, graph: Graph) -> None:
    idle = next((worker.name for worker in plan.workers if not worker.devices), None)
    if idle is not None or not plan.workers:
        who = f"worker {idle!r}" if idle is not None else "its one process"
        raise _refusal(plan, f"gives {who} no device; every worker needs at least 1")


def _names_differ(plan: Plan, graph: Graph) -> None:
    for name, times in Counter(worker.name for worker in plan.workers).items():
        if times > 1:
            raise _refusal(plan, f"has {times} workers of the name {name!r}; names must differ")


def _devices_are_used_once(plan: Plan, graph: Graph) -> None:
    for device, times in Counter(d for w in plan.workers for d in w.devices).items():
        if times > 1:
            raise _refusal(plan, f"uses device {device} {times} times; use each once")


def _instances_exist(plan: Plan, graph: Graph) -> None:
    fragments, workers = graph.fragments, {worker.name for worker in plan.workers}
    for instance in plan.instances:
        if instance.fragment not in fragments:
            hint = nearest(instance.fragment, fragments)
            raise _refusal(plan, f"places {instance.fragment!r}, which is no fragment; {hint}")
        if instance.worker not in workers:
            what = f"places {instance.fragment!r} on {instance.worker!r}, which is no worker"
            raise _refusal(plan, f"{what}; {nearest(instance.worker, workers)}")


def _fragments_are_placed(plan: Plan, graph: Graph) -> None:
    devices = {worker.name: len(worker.devices) for worker in plan.workers}
    placed = Counter[str]()
    for instance in plan.instances:
        placed[instance.fragment] += devices[instance.worker]
    for fragment in graph.fragments:
        if placed[fragment] != plan.replicas:
            raise _refusal(
                plan,
                f"places {fragment!r} on {placed[fragment]} devices; with {plan.replicas} replicas "
                f"it must be on {plan.replicas}, once for each",
            )


def _links_join_instances(plan: Plan, graph: Graph) -> None:
    ends = [*graph.fragments, STATE]
    for link in plan.links:
        for end in (link.source, link.target):
            if end not in ends:
                raise _refusal(
                    plan,
                    f"links {link.boundary} to {end!r}, which is not placed; {nearest(end, ends)}",
                )


def _edges_are_carried(plan: Plan, graph: Graph) -> None:
    wanted = Counter[tuple[str, str, str]]()
    acting = {unroll.name: f"{unroll.name}.act" for unroll in graph.unrolls}
    for edge in graph.edges:
        for target in edge.targets:
            ends = acting.get(edge.source, edge.source), acting.get(target, target)
            wanted[edge.boundary, *ends] += 1
    for unroll in graph.unrolls:
        act, step = f"{unroll.name}.act", f"{unroll.name}.step"
        wanted["action", act, step] += 1
        wanted["observation", step, act] += 1
    carried = Counter((link.boundary, link.source, link.target) for link in plan.links)
    for boundary, source, target in {**wanted, **carried}:
        want, have = wanted[boundary, source, target], carried[boundary, source, target]
        if want != have:
            raise _refusal(
                plan,
                f"carries {boundary} from {source!r} to {target!r} by {have} links; "
                f"the graph has {want} such edges, each for one link",
            )


def _fused_links_stay_home(plan: Plan, graph: Graph) -> None:
    workers: dict[str, set[str]] = {}
    for instance in plan.instances:
        workers.setdefault(instance.fragment, set()).add(instance.worker)
        node = next((n for n in graph.nodes if n.name == instance.fragment), None)
        if isinstance(node, Fragment) and node.side == "learner":
            workers.setdefault(STATE, set()).add(instance.worker)
    for link in plan.links:
        source, target = workers.get(link.source), workers.get(link.target)
        if link.kind is LinkKind.FUSED and source and target and source != target:
            raise _refusal(
                plan,
                f"fuses {link.boundary} from {link.source!r} on {_names(source)} to "
                f"{link.target!r} on {_names(target)}; a fused link stays within one worker",
            )


def _replicas_are_joined(plan: Plan, graph: Graph) -> None:
    means = sum(node.means for node in graph.nodes if isinstance(node, Fragment))
    if plan.replicas > 1 and means == 0:
        raise _refusal(
            plan,
            f"has {plan.replicas} learner replicas, but {graph.algorithm} never calls rl.mean, so "
            "they would drift apart; average its gradients with rl.mean, or use 1 replica",
        )


def _devices_exist(plan: Plan, devices: int) -> None:
    highest = max(device for worker in plan.workers for device in worker.devices)
    if highest >= devices:
        raise _refusal(
            plan,
            f"uses device {highest}, but this machine has {devices}, numbered from 0; lower "
            "--devices, or on a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={highest + 1}",
        )


CHECKS: tuple[Callable[[Plan, Graph], None], ...] = (
    _sizes_are_positive,  # everything below divides and counts by them
    _environments_divide,
    _workers_have_devices,
    _names_differ,  # instances name their workers
    _devices_are_used_once,
    _instances_exist,
    _fragments_are_placed,
    _links_join_instances,
    _edges_are_carried,
    _fused_links_stay_home,  # needs every link's ends placed
    _replicas_are_joined,
)
"""In this order: a check may rely on those before it."""


def _names(workers: set[str]) -> str:
    return ", ".join(sorted(workers))


def _refusal(plan: Plan, found: str) -> UserError:
    stop = "" if found.endswith("?") else "."
    return UserError(f"The plan of policy {plan.policy!r} {found}{stop}")
