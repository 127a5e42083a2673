"""The logical graph as text and as JSON, like SQL's EXPLAIN.

The output depends only on the graph: it omits the folders of source files and the numbers of
values, so golden files stay valid.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from dovetail.graph.ir import Edge, Fragment, Graph, Inner, Node, Python, Unroll, Value

Row = tuple[str, ...]


def text(graph: Graph) -> str:
    """The graph as a table of nodes and a table of edges."""
    head = (
        f"graph  {graph.algorithm} on {graph.env}: {count(graph.num_envs, 'environment')}, "
        f"{steps(graph)} per iteration"
    )
    nodes: list[Row] = [("node", "side", "compute", "in", "out", "")]
    for node in graph.nodes:
        nodes += node_rows(node, graph)
    edges: list[Row] = [("boundary", "from → to", "bytes", "arrays", "where")]
    edges += [edge_row(edge) for edge in graph.edges]
    shown = ["", *table(edges)] if graph.edges else []
    return "\n".join([head, "", *table(nodes), *shown]) + "\n"


def steps(graph: Graph) -> str:
    """The number of steps per iteration, in words."""
    kind = "step" if graph.unrolls else "gradient step"
    return count(graph.steps_per_iteration, kind)


def to_json(graph: Graph) -> dict[str, Any]:
    """The graph as plain lists and dicts."""
    return {
        "algorithm": graph.algorithm,
        "env": graph.env,
        "num_envs": graph.num_envs,
        "corrects_with": graph.correction,
        "staleness": graph.staleness,
        "steps_per_iteration": graph.steps_per_iteration,
        "nodes": [_node_json(node) for node in graph.nodes],
        "edges": [_edge_json(edge) for edge in graph.edges],
        "metrics": [name for name, _ in graph.metrics],
    }


def node_rows(node: Node, graph: Graph) -> list[Row]:
    """The table row of a node; an unroll adds a row for each of its halves."""
    if isinstance(node, Fragment):
        means = f"mean ×{node.means}" if node.means else ""
        return [(node.name, node.side, flops(node.flops), *_in_out(node), means)]
    if isinstance(node, Python):
        function = getattr(node.function, "__name__", type(node.function).__name__)
        told = f"Python: {function}"
        if node.reach is not None:
            told = f"{'to' if node.reach.sends else 'from'} the {node.reach.side}"
        return [(node.name, node.side, "on the host", *_in_out(node), told)]
    size = f"{count(node.length, 'step')} × {count(graph.actor_envs, 'environment')}"
    actors = graph.num_envs // graph.actor_envs
    size += f" × {count(actors, 'actor')}" if actors > 1 else ""
    to_env, to_actor = (quantity(n, "B") for n in node.per_step_bytes)
    rows = [
        (node.name, node.side, flops(node.flops), *_in_out(node), size),
        ("├ act", node.act.side, flops(node.act.flops), to_actor, to_env, "each step"),
        ("└ step", node.step.side, inner_flops(node.step), to_env, to_actor, "each step"),
    ]
    if node.bootstrap is not None:
        value = node.bootstrap
        note = "where an unroll or an episode is cut"
        rows.insert(2, ("├ bootstrap", value.side, flops(value.flops), "", "", note))
    return rows


def edge_row(edge: Edge) -> Row:
    """The table row of an edge."""
    way = f"{edge.source} → {', '.join(edge.targets) or 'result'}"
    size = quantity(edge.nbytes, "B")
    return (edge.boundary, way, size, str(len(edge.values)), base_name(edge.where))


def recorded(unroll: Unroll) -> tuple[Value, ...]:
    """The leaves of the trajectory that are read, and so recorded."""
    pairs = zip(unroll.trajectory, unroll.live, strict=True)
    return tuple(value for value, is_live in pairs if is_live)


def inner_flops(inner: Inner) -> str:
    """FLOPs per step; unknown for a host environment."""
    return "on the host" if inner.program is None else flops(inner.flops)


def flops(number: int) -> str:
    """1234567 → "1.23 MFLOP"."""
    return quantity(number, "FLOP")


def quantity(number: float, unit: str) -> str:
    """Three significant digits and a decimal prefix: 1234 B → "1.23 kB"."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 0.9995 * 10**power:  # 999.6 kB prints as 1.00 MB
            return f"{number / 10**power:#.3g}".rstrip(".") + f" {prefix}{unit}"
    return f"{round(number)} {unit}"


def count(number: int, noun: str, plural: str = "") -> str:
    """1 step, 2 steps; 1 process, 2 processes."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def base_name(where: str) -> str:
    """The user's file and line, without folder and column."""
    return ":".join(os.path.basename(where).split(":")[:2])


def table(rows: Sequence[Row]) -> list[str]:
    """Formats rows with aligned columns, indented by two spaces."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return [f"  {line}".rstrip() for line in lines]


def _in_out(node: Node) -> tuple[str, str]:
    made = recorded(node) if isinstance(node, Unroll) else node.outputs
    return quantity(nbytes(node.inputs), "B"), quantity(nbytes(made), "B")


def nbytes(values: Iterable[Value]) -> int:
    """Total bytes of several values."""
    return sum(value.nbytes for value in values)


def _node_json(node: Node) -> dict[str, Any]:
    common: dict[str, Any] = {"name": node.name, "side": node.side, "flops": node.flops}
    common["inputs"] = _values_json(node.inputs)
    if isinstance(node, Fragment):
        return common | {"outputs": _values_json(node.outputs), "means": node.means}
    if isinstance(node, Python):
        reached = None if node.reach is None else node.reach.side
        found = {"outputs": _values_json(node.outputs), "host": True}
        return common | found | ({} if reached is None else {"reaches": reached})
    return common | {
        "outputs": _values_json(recorded(node)),
        "length": node.length,
        "act": _inner_json(node.act),
        "step": _inner_json(node.step),
        "bootstrap": None if node.bootstrap is None else _inner_json(node.bootstrap),
        "bytes_to_environment": node.per_step_bytes[0],
        "bytes_to_actor": node.per_step_bytes[1],
    }


def _inner_json(inner: Inner) -> dict[str, Any]:
    host = inner.program is None
    return {"side": inner.side, "host": host, "flops": None if host else inner.flops}


def _edge_json(edge: Edge) -> dict[str, Any]:
    return {
        "boundary": edge.boundary,
        "source": edge.source,
        "targets": list(edge.targets),
        "how": edge.how.value,
        "from_side": edge.from_side,
        "to_side": edge.to_side,
        "values": _values_json(edge.values),
        "bytes": edge.nbytes,
        "where": base_name(edge.where),
    }


def _values_json(values: Iterable[Value]) -> list[dict[str, Any]]:
    return [{"shape": list(value.shape), "dtype": value.dtype.name} for value in values]
