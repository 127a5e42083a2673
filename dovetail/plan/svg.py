"""Draws the graph: a lane for each side, fragments as boxes, boundaries as labeled arrows.

Columns follow execution order. Arrows between lanes stay in the gaps between the lanes, so they
never cross a box. With a plan, boxes name their worker and program, and arrows their link.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from dovetail.boundaries import Reach, Side
from dovetail.graph.ir import Edge, Fragment, Graph, Python, Unroll, Value
from dovetail.graph.show import base_name, count, flops, inner_flops, quantity, steps
from dovetail.plan.canvas import FAINT, arrow, document, label, round_top, rounded, words
from dovetail.plan.ir import LinkKind, Plan
from dovetail.plan.show import alike, named

COLUMN, BOX_WIDTH, BOX_HEIGHT, BADGE = 236, 180, 74, 22
LANE_HEIGHT, LANE_GAP, LEFT, TOP = 132, 92, 128, 112
LABEL_WIDTH, LINE_HEIGHT = 132, 16
COLORS = (
    ("#4f46e5", "#eef2ff"),
    ("#047857", "#ecfdf5"),
    ("#c2410c", "#fff7ed"),
    ("#a21caf", "#fdf4ff"),
    ("#0369a1", "#f0f9ff"),
    ("#854d0e", "#fefce8"),
)
"""(line, tint) of the lanes, in rotation."""
PROGRAMS = ("#dbeafe", "#fde68a", "#fbcfe8", "#d9f99d", "#ddd6fe", "#fed7aa")
"""Tints of the programs, in rotation: boxes with the same tint are compiled together."""

Point = tuple[float, float]


@dataclass
class Box:
    """A fragment, or a pill for the state."""

    name: str
    lane: int
    column: int
    lines: list[str] = field(default_factory=list)
    badge: str = ""
    tint: str = "#ffffff"
    pill: bool = False

    @property
    def x(self) -> float:
        """The left edge."""
        return LEFT + self.column * COLUMN + (COLUMN - self.width) / 2

    @property
    def y(self) -> float:
        """The upper edge."""
        return _lane_top(self.lane) + (LANE_HEIGHT - self.height) / 2

    @property
    def width(self) -> float:
        """Pills are narrower."""
        return 112 if self.pill else BOX_WIDTH

    @property
    def height(self) -> float:
        """Pills are lower; a badge adds a strip at the bottom."""
        return 40 if self.pill else BOX_HEIGHT + (BADGE if self.badge else 0)

    @property
    def middle(self) -> float:
        """The horizontal center."""
        return self.x + self.width / 2


@dataclass(frozen=True)
class Arrow:
    """All edges between two boxes in different lanes, drawn as one arrow."""

    source: Box
    target: Box
    lines: tuple[str, ...]
    tip: str
    dashed: bool


def svg(graph: Graph, plan: Plan | None = None) -> str:
    """The drawing, as an SVG document."""
    boxes = _boxes(graph, plan)
    if plan is not None:
        _add_badges(boxes, plan)
    title = f"{graph.algorithm} on {graph.env}"
    width = LEFT + (1 + max(box.column for box in boxes.values())) * COLUMN + 24
    lanes = _sides(graph)
    bottom = _lane_top(len(lanes) - 1) + LANE_HEIGHT
    notes = _plan_notes(plan) if plan is not None else []
    parts = [
        words(24, 40, title, "title"),
        words(24, 62, _subtitle(graph, plan), "detail"),
        *_lanes(lanes, width),
        *_within_lanes(graph, boxes),
        *_loop(graph, boxes),
        *_curves(_crossings(graph, plan, boxes)),
        *_turns(graph, plan, boxes),
        *[part for box in boxes.values() for part in _draw(box)],
        *[words(24, bottom + 26 + 20 * i, line, "detail") for i, line in enumerate(notes)],
    ]
    return document(width, bottom + 28 + 20 * len(notes), title, parts)


def _boxes(graph: Graph, plan: Plan | None) -> dict[str, Box]:
    """Boxes by name, one column per node."""
    lanes = _sides(graph)
    boxes = {"state": Box("state", lanes.index(graph.home), 0, pill=True)}
    for column, node in enumerate(graph.nodes, start=1):
        if isinstance(node, Unroll):
            stepped = _stepped(plan, node) if plan is not None else ""
            stepped = stepped or count(graph.num_envs, "environment")
            boxes |= _unroll_boxes(node, lanes, column, stepped)
        else:
            boxes[node.name] = Box(node.name, lanes.index(node.side), column, _lines(node))
            if isinstance(node, Python) and node.reach is not None:
                side = node.reach.side
                boxes[side] = Box(side, lanes.index(side), column, [node.reach.place])
    return boxes


def _lines(node: Fragment | Python) -> list[str]:
    """The text below the name in a box."""
    if isinstance(node, Python):
        return ["on the host"]
    return [flops(node.flops)] + ([f"mean ×{node.means}"] if node.means else [])


def _sides(graph: Graph) -> list[Side]:
    """The side of each lane: home, acting sides, environments, then the others."""
    stepped = [unroll.step.side for unroll in graph.unrolls]
    reached = [node.reach.side for node in graph.reaching if node.reach is not None]
    return list(dict.fromkeys([graph.home, *graph.acting, *stepped, *graph.sides, *reached]))


def _stepped(plan: Plan, unroll: Unroll) -> str:
    """The number of environments per stepping instance, in words; all have the same number."""
    shares = [i.envs for i in plan.instances_of(f"{unroll.name}.step") if i.envs is not None]
    each = " each" if len(shares) > 1 else ""
    return count(shares[0][1] - shares[0][0], "environment") + each if shares else ""


def _unroll_boxes(unroll: Unroll, lanes: list[Side], column: int, stepped: str) -> dict[str, Box]:
    steps = count(unroll.length, "step")
    acting = [f"{flops(unroll.act.flops)} × {steps}"]
    if unroll.bootstrap is not None:
        acting.append(f"bootstrap {flops(unroll.bootstrap.flops)}")
    times = "" if unroll.step.program is None else f" × {steps}"
    stepping = [inner_flops(unroll.step) + times, stepped]
    act, step = f"{unroll.name}.act", f"{unroll.name}.step"
    return {
        act: Box(act, lanes.index(unroll.side), column, acting),
        step: Box(step, lanes.index(unroll.step.side), column, stepping),
    }


def _box_name(graph: Graph, node: str) -> str:
    """The box of a node; for an unroll, that of its acting half."""
    return f"{node}.act" if node in {unroll.name for unroll in graph.unrolls} else node


def _add_badges(boxes: dict[str, Box], plan: Plan) -> None:
    """Labels each box with its worker and program; similar workers share a label."""
    hosts: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    for worker in plan.workers:
        programs = plan.programs(worker.name)
        for number, fragments in enumerate(programs, start=1):
            told = 0 if len(programs) == len(fragments) == 1 else number
            hosts.setdefault((told, fragments), []).append(worker.name)
    for total, ((number, fragments), names) in enumerate(hosts.items()):
        stems = {name.rstrip("-0123456789") for name in names}
        who = f"{len(names)} × {stems.pop() if len(stems) == 1 else 'worker'}"
        who = names[0] if len(names) == 1 else who
        for name in fragments:
            boxes[name].badge = f"{who} · program {number}" if number else who
            boxes[name].tint = PROGRAMS[total % len(PROGRAMS)]


def _crossings(graph: Graph, plan: Plan | None, boxes: dict[str, Box]) -> list[Arrow]:
    edges: dict[tuple[str, str], list[Edge]] = {}
    for edge in graph.edges:
        source = _box_name(graph, edge.source)
        for name in edge.targets:
            edges.setdefault((source, _box_name(graph, name)), []).append(edge)
    found = [_crossing(alike, plan, boxes[s], boxes[t]) for (s, t), alike in edges.items()]
    found += [_reached(node, node.reach, boxes) for node in graph.reaching if node.reach]
    return [crossing for crossing in found if crossing.source.lane != crossing.target.lane]


def _crossing(edges: list[Edge], plan: Plan | None, source: Box, target: Box) -> Arrow:
    """An arrow with two lines of text for one edge, or one line for each of several."""
    kinds = [_kind(plan, edge.boundary, source, target) for edge in edges]
    firsts = [f"{e.boundary} · {k}" if k else e.boundary for e, k in zip(edges, kinds, strict=True)]
    sizes = [f"{quantity(e.nbytes, 'B')}, {count(len(e.values), 'array')}" for e in edges]
    places = [base_name(edge.where) for edge in edges]
    tip = "; ".join(map(", ".join, zip(firsts, sizes, places, strict=True)))
    lines = [f"{edge.boundary} {quantity(edge.nbytes, 'B')}" for edge in edges]
    if len(edges) == 1:
        lines = [firsts[0], sizes[0]]
    elif kinds[0]:
        lines.append(kinds[0])
    return Arrow(source, target, tuple(lines), tip, _is_dashed(kinds[0]))


def _reached(node: Python, reach: Reach, boxes: dict[str, Box]) -> Arrow:
    """The arrow between plain Python and the side it connects to."""
    ends = (boxes[node.name], boxes[reach.side])
    source, target = ends if reach.sends else ends[::-1]
    lines = (f"{node.name} · {LinkKind.SOCKET}", quantity(node.moved, "B"))
    return Arrow(source, target, lines, ", ".join(lines), True)


def _kind(plan: Plan | None, boundary: str, source: Box, target: Box) -> str:
    """The kind of link that carries an edge; empty without a plan."""
    for link in plan.links if plan is not None else ():
        if (link.boundary, link.source, link.target) == (boundary, source.name, target.name):
            return link.kind.value
    return ""


def _is_dashed(kind: str) -> bool:
    return kind not in ("", LinkKind.FUSED)


def _curves(crossings: list[Arrow]) -> Iterator[str]:
    """Curves between lanes, then their labels, so that no curve covers a label.

    Labels avoid each other.
    """
    taken: list[tuple[Point, float]] = []
    labels: list[str] = []
    for crossing in crossings:
        start, end = _ends(crossing)
        bend = (start[1] + end[1]) / 2
        shape = f"M {start[0]} {start[1]} C {start[0]} {bend} {end[0]} {bend} {end[0]} {end[1]}"
        yield arrow(shape, dashed=crossing.dashed, tip=crossing.tip)
        height = LINE_HEIGHT * len(crossing.lines)
        place = _label_place(start, end, height, taken)
        taken.append((place, height))
        labels += label(*place, crossing.lines)
    yield from labels


def _ends(crossing: Arrow) -> tuple[Point, Point]:
    """The endpoints of an arrow, on the facing edges of its boxes."""
    source, target = crossing.source, crossing.target
    lean = 36 if source.middle < target.middle else 0
    start_x = source.middle + (0 if source.pill else lean)
    end_x = target.middle - (0 if target.pill else lean)
    if source.lane < target.lane:
        return (start_x, source.y + source.height), (end_x, target.y - 3)
    return (start_x, source.y), (end_x, target.y + target.height + 3)


def _label_place(
    start: Point, end: Point, height: float, taken: list[tuple[Point, float]]
) -> Point:
    """The first of five candidate points on a curve where a label overlaps no other."""
    points: list[Point] = []
    for t in (0.5, 0.32, 0.68, 0.2, 0.8):
        across, along = 3 * t**2 - 2 * t**3, 1.5 * t * (1 - t) + t**3
        x = start[0] + (end[0] - start[0]) * across
        points.append((round(x, 1), round(start[1] + (end[1] - start[1]) * along, 1)))

    def is_free(point: Point) -> bool:
        return all(
            abs(point[0] - x) > LABEL_WIDTH or abs(point[1] - y) > (height + other) / 2
            for (x, y), other in taken
        )

    return next(filter(is_free, points), points[0])


def _turns(graph: Graph, plan: Plan | None, boxes: dict[str, Box]) -> Iterator[str]:
    """The arrows of an unroll: actions to the environments, observations back."""
    for unroll in graph.unrolls:
        act, step = boxes[f"{unroll.name}.act"], boxes[f"{unroll.name}.step"]
        upper, lower = act.y + act.height, step.y
        left, right = act.middle - 24, act.middle + 24
        sizes = [f"{quantity(size, 'B')} × {unroll.length}" for size in unroll.per_step_bytes]
        kinds = _kind(plan, "action", act, step), _kind(plan, "observation", step, act)
        yield arrow(f"M {left} {upper} L {left} {lower - 3}", dashed=_is_dashed(kinds[0]))
        yield arrow(f"M {right} {lower} L {right} {upper + 3}", dashed=_is_dashed(kinds[1]))
        for x, anchor, lines in (
            (left - 10, "end", ("action", sizes[0], kinds[0])),
            (right + 10, "start", ("observation", sizes[1], kinds[1])),
        ):
            for number, line in enumerate(lines):
                y = (upper + lower) / 2 - 4 + 15 * number
                yield words(x, y, line, "small" if number else "label", anchor)


def _within_lanes(graph: Graph, boxes: dict[str, Box]) -> Iterator[str]:
    """Thin arrows for values that stay on their side."""
    made: list[tuple[str, tuple[Value, ...]]] = [("state", graph.state.inputs)]
    made += [(_box_name(graph, node.name), node.outputs) for node in graph.nodes]
    for node in graph.nodes:
        kept = node.actor_inputs if isinstance(node, Unroll) else ()
        read = {value.id for value in node.inputs + kept}
        target = boxes[_box_name(graph, node.name)]
        for name, values in made:
            source = boxes[name]
            if source.lane == target.lane and any(value.id in read for value in values):
                between = range(source.column + 1, target.column)
                taken = any(b.lane == source.lane and b.column in between for b in boxes.values())
                yield _over(source, target) if taken else _straight(source, target)


def _straight(source: Box, target: Box) -> str:
    y = source.y + source.height / 2
    return arrow(f"M {source.x + source.width} {y} L {target.x - 3} {y}", FAINT)


def _over(source: Box, target: Box) -> str:
    """An arc over the boxes in between."""
    y, top = source.y + source.height / 2 - 14, _lane_top(source.lane) + 8
    start, end = source.x + source.width, target.x - 3
    up = f"M {start} {y} C {start + 40} {top} {start + 40} {top} {start + 80} {top}"
    down = f"L {end - 80} {top} C {end - 40} {top} {end - 40} {top} {end} {y}"
    return arrow(f"{up} {down}", FAINT)


def _loop(graph: Graph, boxes: dict[str, Box]) -> Iterator[str]:
    """The arrow that carries the new state to the next iteration."""
    new = {value.id for value in graph.state.outputs}
    makers = [node.name for node in graph.nodes if any(v.id in new for v in node.outputs)]
    last = boxes.get(makers[-1]) if makers else None
    if last is None:
        return
    state, top = boxes["state"], _lane_top(boxes["state"].lane) - 14
    left, right = state.middle, last.middle
    shape = (
        f"M {right} {last.y} L {right} {top + 10} Q {right} {top} {right - 10} {top} "
        f"L {left + 10} {top} Q {left} {top} {left} {top + 10} L {left} {state.y - 3}"
    )
    yield arrow(shape, FAINT, dashed=True)
    yield from label((left + right) / 2, top, ("next iteration",))


def _lanes(lanes: list[Side], width: float) -> Iterator[str]:
    for lane, side in enumerate(lanes):
        color, tint = COLORS[lane % len(COLORS)]
        top = _lane_top(lane)
        yield rounded(24, top, width - 48, LANE_HEIGHT, 12, fill=tint)
        yield words(40, top + LANE_HEIGHT / 2 + 5, side, "lane", fill=color)


def _draw(box: Box) -> Iterator[str]:
    color, _ = COLORS[box.lane % len(COLORS)]
    radius = box.height / 2 if box.pill else 10
    upper = box.height - (BADGE if box.badge else 0)
    yield rounded(box.x, box.y, box.width, box.height, radius, fill=box.tint)
    if box.badge:
        yield round_top(box.x, box.y, box.width, upper, radius, fill="#ffffff")
        yield words(box.middle, box.y + box.height - 7, box.badge, "badge", "middle")
    yield rounded(box.x, box.y, box.width, box.height, radius, fill="none", stroke=color)
    lines = [box.name, *box.lines]
    for number, line in enumerate(lines):
        y = box.y + upper / 2 + 5 - 9 * (len(lines) - 1) + 18 * number
        yield words(box.middle, y, line, "detail" if number else "name", "middle")


def _subtitle(graph: Graph, plan: Plan | None) -> str:
    each = f"{steps(graph)} per iteration"
    size = f"{count(graph.num_envs, 'environment')}, {each}"
    if plan is None:
        return size
    replicas = plan.copies_of(graph.home)
    size = f"{count(plan.num_envs, 'environment')}, {each}"
    size = f"{replicas} replicas, {size}" if replicas > 1 else size
    return f"{size}, staleness {plan.staleness} · strategy {plan.strategy}"


def _plan_notes(plan: Plan) -> list[str]:
    return [*(named(workers, plan) for workers in alike(plan)), *plan.notes]


def _lane_top(lane: int) -> float:
    return TOP + lane * (LANE_HEIGHT + LANE_GAP)
