"""The physical plan as text: workers, the programs they run, and the links between them."""

from dovetail.graph.ir import Graph
from dovetail.graph.show import Row, count, flops, quantity, table
from dovetail.plan.ir import Link, Plan, Worker


def text(plan: Plan, graph: Graph) -> str:
    """The plan; `graph` is the one it was made of."""
    share = plan.num_envs // plan.replicas
    each = f", {share} on each" if plan.replicas > 1 else ""
    head = (
        f"plan  {plan.policy}: {count(plan.num_envs, 'environment')}, "
        f"{count(plan.replicas, 'learner replica')}{each}"
    )
    lines = [head]
    for worker in plan.workers:
        lines += ["", f"  worker {worker.name} on {devices(worker)}"]
        rows: list[Row] = [("program", "fragments", "compute")]
        for number, fragments in enumerate(plan.programs(worker.name), start=1):
            rows.append((str(number), " + ".join(fragments), program_flops(graph, fragments)))
        lines += [f"  {line}" for line in table(rows)]
    links: list[Row] = [("boundary", "from → to", "link", "bytes × transfers per iteration")]
    links += [_link_row(link) for link in plan.links]
    lines += ["", *table(links), ""]
    lines += [f"  note: {note}" for note in plan.notes]
    return "\n".join(lines).rstrip() + "\n"


def fragment_flops(graph: Graph, fragment: str) -> int | None:
    """Operations per iteration; None for an environment on the host."""
    for unroll in graph.unrolls:
        for inner in (unroll.act, unroll.step):
            if fragment == f"{unroll.name}.{inner.name}":
                return None if inner.program is None else unroll.length * inner.flops
    return graph.node(fragment).flops


def program_flops(graph: Graph, fragments: tuple[str, ...]) -> str:
    """Operations per iteration of fragments that are compiled together."""
    known = [fragment_flops(graph, fragment) for fragment in fragments]
    if None in known:
        return "on the host"
    return flops(sum(number for number in known if number is not None))


def devices(worker: Worker) -> str:
    """Its devices in words."""
    numbers = ", ".join(map(str, worker.devices))
    return f"device{'s' if len(worker.devices) > 1 else ''} {numbers}"


def _link_row(link: Link) -> Row:
    size = f"{quantity(link.nbytes, 'B')} × {link.transfers:,}"
    return (link.boundary, f"{link.source} → {link.target}", link.kind, size)
