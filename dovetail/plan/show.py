"""The physical plan as text: workers, the programs they run, and the links between them."""

from dovetail.boundaries import ACTOR, LEARNER, REPLAY
from dovetail.graph.ir import Graph, Python
from dovetail.graph.show import Row, count, flops, quantity, table
from dovetail.plan.ir import Link, Plan, Worker, WorkerKind


def text(plan: Plan, graph: Graph) -> str:
    """The plan as text; `graph` is the graph it was made from."""
    lines = [f"plan  {plan.strategy}: {_sizes(plan)}"]
    for workers in alike(plan):
        lines += ["", f"  {named(workers, plan)}"]
        rows: list[Row] = [("program", "fragments", "compute")]
        for number, fragments in enumerate(plan.programs(workers[0].name), start=1):
            rows.append((str(number), " + ".join(fragments), program_flops(graph, fragments)))
        lines += [f"  {line}" for line in table(rows)]
    lines += _processes(plan)
    links: list[Row] = [("boundary", "from → to", "link", "bytes × transfers per iteration")]
    links += [_link_row(link) for link in plan.links]
    lines += ["", *table(links), ""]
    lines += [f"  note: {note}" for note in plan.notes]
    return "\n".join(lines).rstrip() + "\n"


def _processes(plan: Plan) -> list[str]:
    """The table of processes and their nodes; empty without a cluster."""
    if not plan.processes:
        return []
    rows: list[Row] = [("process", "workers", "node", "takes")]
    for process in plan.processes:
        takes = [f"{process.cpus:g} CPUs"] if process.cpus != 1 else ["1 CPU"]
        takes += [f"{process.gpus:g} GPUs"] if process.gpus else []
        takes += [f"{amount:g} {name}" for name, amount in process.others]
        node = process.node or "when there is room"
        rows.append((process.name, ", ".join(process.workers), node, ", ".join(takes)))
    return ["", *table(rows)]


def _sizes(plan: Plan) -> str:
    """Numbers of environments, replicas and actors, and the staleness, in words."""
    parts = [count(plan.num_envs, "environment"), count(plan.replicas, "learner replica")]
    if plan.actors > 1:
        parts.append(f"{count(plan.actors, 'actor')} with {plan.num_envs // plan.actors} each")
    parts += [
        f"{copies} copies of {side}"
        for side, copies in plan.copies
        if copies > 1 and side not in (LEARNER, ACTOR, REPLAY)
    ]
    if plan.joined < plan.actors:
        parts.append("an update for each unroll")
    if plan.batch:
        parts.append(f"acting in batches of {plan.batch}")
    parts.append(f"staleness {plan.staleness}")
    return ", ".join(parts)


def alike(plan: Plan) -> list[list[Worker]]:
    """Groups workers that differ only in their number and environments, in order."""
    groups: list[list[Worker]] = []
    for worker in plan.workers:
        for group in groups:
            if _likeness(plan, worker) == _likeness(plan, group[0]):
                group.append(worker)
                break
        else:
            groups.append([worker])
    return groups


def _likeness(plan: Plan, worker: Worker) -> tuple[object, ...]:
    stem = worker.name.rstrip("0123456789")
    return stem, worker.kind, worker.devices, worker.fused, tuple(plan.programs(worker.name))


def named(workers: list[Worker], plan: Plan) -> str:
    """One line for a group of similar workers: names, devices, kind and environments."""
    first, last = workers[0], workers[-1]
    names = f"worker {first.name}" if len(workers) == 1 else f"workers {first.name} … {last.name}"
    place = f" on {devices(first)}" if first.devices else ""
    each = ", each a" if len(workers) > 1 else ", a"
    kind = f"{each} process" if first.kind is WorkerKind.PROCESS else ""
    return names + place + kind + _environments(plan, workers)


def _environments(plan: Plan, workers: list[Worker]) -> str:
    """The number of environments per worker; empty if they are not split."""
    served = [i.envs for i in plan.instances if i.worker == workers[0].name and i.envs is not None]
    if not served or len(plan.workers) == 1:
        return ""
    size = max(last for _, last in served) - min(first for first, _ in served)
    return f", {count(size, 'environment')}{' each' if len(workers) > 1 else ''}"


def fragment_flops(graph: Graph, fragment: str) -> int | None:
    """FLOPs per iteration; None for a host environment or plain Python."""
    for unroll in graph.unrolls:
        for inner in (unroll.act, unroll.step):
            if fragment == f"{unroll.name}.{inner.name}":
                return None if inner.program is None else unroll.length * inner.flops
    node = graph.node(fragment)
    return None if isinstance(node, Python) else node.flops


def program_flops(graph: Graph, fragments: tuple[str, ...]) -> str:
    """FLOPs per iteration of fragments compiled together, in words."""
    known = [fragment_flops(graph, fragment) for fragment in fragments]
    if None in known:
        return "on the host"
    return flops(sum(number for number in known if number is not None))


def devices(worker: Worker) -> str:
    """The devices of a worker, in words."""
    numbers = ", ".join(map(str, worker.devices))
    return f"device{'s' if len(worker.devices) > 1 else ''} {numbers}"


def _link_row(link: Link) -> Row:
    size = f"{quantity(link.nbytes, 'B')} × {link.transfers:,}"
    return (link.boundary, f"{link.source} → {link.target}", link.kind, size)
