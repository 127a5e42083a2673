"""The graph as a drawing: a lane for each side, fragments as boxes, boundaries as labelled arrows.

Nodes stand in columns in the order in which they run; arrows between lanes keep to the space
between the lanes, so they never cross a box. With a plan, boxes say which program of which worker
they are in, and arrows what kind of link carries them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

from dovetail.graph.ir import Graph, Side, Unroll, Value
from dovetail.graph.show import base_name, count, flops, inner_flops, quantity
from dovetail.plan.ir import LinkKind, Plan

COLUMN, BOX_WIDTH, BOX_HEIGHT, BADGE = 236, 180, 74, 22
LANE_HEIGHT, LANE_GAP, LEFT, TOP = 132, 92, 128, 112
LABEL_WIDTH, LABEL_HEIGHT = 132, 32
LANES = (Side.LEARNER, Side.ACTOR, Side.ENVIRONMENT)
COLOURS = {
    Side.LEARNER: ("#4f46e5", "#eef2ff"),
    Side.ACTOR: ("#047857", "#ecfdf5"),
    Side.ENVIRONMENT: ("#c2410c", "#fff7ed"),
}
PROGRAMS = ("#dbeafe", "#fde68a", "#fbcfe8", "#d9f99d", "#ddd6fe", "#fed7aa")
"""Tints that programs take in turn: boxes of one tint are compiled together."""
STYLE = """
  text { font-family: "Inter", "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif; }
  .title { font-size: 18px; font-weight: 600; fill: #111827; }
  .lane { font-size: 13px; font-weight: 600; }
  .name { font-size: 14px; font-weight: 600; fill: #111827; }
  .detail { font-size: 12px; fill: #4b5563; }
  .label { font-size: 12px; font-weight: 600; fill: #1f2937; }
  .small { font-size: 11px; fill: #6b7280; }
  .badge { font-size: 11px; fill: #374151; }
  path { fill: none; }
"""


@dataclass
class Box:
    """A fragment, or a pill for what comes in or goes out."""

    name: str
    side: Side
    column: int
    lines: list[str] = field(default_factory=list)
    badge: str = ""
    tint: str = ""
    pill: bool = False

    @property
    def x(self) -> float:
        """The left edge."""
        return LEFT + self.column * COLUMN + (COLUMN - self.width) / 2

    @property
    def y(self) -> float:
        """The upper edge."""
        return _lane_top(self.side) + (LANE_HEIGHT - self.height) / 2

    @property
    def width(self) -> float:
        """Pills are narrower."""
        return 112 if self.pill else BOX_WIDTH

    @property
    def height(self) -> float:
        """Pills are lower; a badge is a strip at the foot."""
        return 40 if self.pill else BOX_HEIGHT + (BADGE if self.badge else 0)

    @property
    def middle(self) -> float:
        """The horizontal centre."""
        return self.x + self.width / 2


@dataclass(frozen=True)
class Arrow:
    """A boundary between two boxes of different lanes."""

    source: Box
    target: Box
    lines: tuple[str, str]
    where: str
    dashed: bool


def svg(graph: Graph, plan: Plan | None = None) -> str:
    """The drawing, as an SVG document."""
    boxes = _boxes(graph)
    if plan is not None:
        _add_badges(boxes, plan)
    columns = 1 + max(box.column for box in boxes.values())
    width = LEFT + columns * COLUMN + 24
    bottom = _lane_top(LANES[-1]) + LANE_HEIGHT
    notes = _plan_notes(plan) if plan is not None else []
    height = bottom + 28 + 20 * len(notes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">',
        f"<title>{escape(_title(graph))}</title>",
        f"<style>{STYLE}</style>",
        _arrow_heads(),
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(24, 40, _title(graph), "title"),
        _text(24, 62, _subtitle(graph, plan), "detail"),
        *_lanes(width),
        *_within_lanes(graph, boxes),
        *_loop(graph, boxes),
        *_crossings(_arrows(graph, plan, boxes)),
        *_turns(graph, plan, boxes),
        *[part for box in boxes.values() for part in _draw(box)],
        *[_text(24, bottom + 26 + 20 * i, line, "detail") for i, line in enumerate(notes)],
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _boxes(graph: Graph) -> dict[str, Box]:
    boxes = {"state": Box("state", Side.LEARNER, 0, pill=True)}
    column = 0
    for column, node in enumerate(graph.nodes, start=1):
        if not isinstance(node, Unroll):
            lines = [flops(node.flops)] + ([f"mean ×{node.means}"] if node.means else [])
            boxes[node.name] = Box(node.name, node.side, column, lines)
            continue
        act, step = f"{node.name}.act", f"{node.name}.step"
        lines = [f"{flops(node.act.flops)} × {count(node.length, 'step')}"]
        if node.bootstrap is not None:
            lines.append(f"bootstrap {flops(node.bootstrap.flops)}")
        boxes[act] = Box(act, Side.ACTOR, column, lines)
        size = inner_flops(node.step)
        lines = [size if node.step.program is None else f"{size} × {count(node.length, 'step')}"]
        lines.append(count(graph.num_envs, "environment"))
        boxes[step] = Box(step, Side.ENVIRONMENT, column, lines)
    if any(not edge.targets for edge in graph.edges):
        boxes["result"] = Box("result", Side.LEARNER, column + 1, pill=True)
    return boxes


def _box_name(graph: Graph, name: str) -> str:
    return f"{name}.act" if name in {unroll.name for unroll in graph.unrolls} else name


def _add_badges(boxes: dict[str, Box], plan: Plan) -> None:
    """Tells on each box its worker and program."""
    total = 0
    for worker in plan.workers:
        for number, fragments in enumerate(plan.programs(worker.name), start=1):
            for name in fragments:
                boxes[name].badge = f"{worker.name} · program {number}"
                boxes[name].tint = PROGRAMS[total % len(PROGRAMS)]
            total += 1


def _arrows(graph: Graph, plan: Plan | None, boxes: dict[str, Box]) -> list[Arrow]:
    arrows: list[Arrow] = []
    for edge in graph.edges:
        source = _box_name(graph, edge.source)
        for target in edge.targets or ("result",):
            target = _box_name(graph, target)
            kind = _kind(plan, edge.boundary, source, target)
            first = f"{edge.boundary} · {kind}" if kind else edge.boundary
            second = f"{quantity(edge.nbytes, 'B')}, {count(len(edge.values), 'array')}"
            where = f"{first}: {second}, {base_name(edge.where)}"
            dashed = kind not in ("", LinkKind.FUSED)
            arrows.append(Arrow(boxes[source], boxes[target], (first, second), where, dashed))
    return [arrow for arrow in arrows if arrow.source.side is not arrow.target.side]


def _kind(plan: Plan | None, boundary: str, source: str, target: str) -> str:
    """The link that carries an edge; empty without a plan."""
    wanted = (boundary, source, target)
    links = plan.links if plan is not None else ()
    kinds = [
        link.kind.value for link in links if (link.boundary, link.source, link.target) == wanted
    ]
    return kinds[0] if kinds else ""


def _crossings(arrows: list[Arrow]) -> Iterator[str]:
    """Curves between lanes; each label sits on its own curve, clear of the others."""
    labels: list[tuple[float, float]] = []
    for number, arrow in enumerate(arrows):
        same = [
            i for i, a in enumerate(arrows) if (a.source, a.target) == (arrow.source, arrow.target)
        ]
        shift = 44 * (same.index(number) - (len(same) - 1) / 2)
        start, end = _ends(arrow, shift)
        bend = (start[1] + end[1]) / 2
        path = f"M {start[0]} {start[1]} C {start[0]} {bend} {end[0]} {bend} {end[0]} {end[1]}"
        yield _path(path, "#374151", arrow.dashed, arrow.where)
        at = _label_place(start, end, labels)
        labels.append(at)
        yield from _label(*at, arrow.lines)


def _ends(arrow: Arrow, shift: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where an arrow leaves its source and meets its target: their facing edges."""
    down = LANES.index(arrow.source.side) < LANES.index(arrow.target.side)
    source, target = arrow.source, arrow.target
    lean = 36 if source.middle < target.middle else 0
    start = (source.middle + shift + (0 if source.pill else lean), source.y + source.height * down)
    end = (
        target.middle + shift - (0 if target.pill else lean),
        target.y + target.height * (not down),
    )
    return start, (end[0], end[1] + (-3 if down else 3))


def _label_place(
    start: tuple[float, float], end: tuple[float, float], taken: list[tuple[float, float]]
) -> tuple[float, float]:
    """The first of a few points on a curve where a label would cover no other."""
    points: list[tuple[float, float]] = []
    for t in (0.5, 0.32, 0.68, 0.2, 0.8):
        eased = 3 * t**2 - 2 * t**3
        height = 1.5 * t * (1 - t) + t**3
        points.append(
            (start[0] + (end[0] - start[0]) * eased, start[1] + (end[1] - start[1]) * height)
        )
    free = (
        point
        for point in points
        if all(
            abs(point[0] - x) > LABEL_WIDTH or abs(point[1] - y) > LABEL_HEIGHT for x, y in taken
        )
    )
    return next(free, points[0])


def _turns(graph: Graph, plan: Plan | None, boxes: dict[str, Box]) -> Iterator[str]:
    """The arrows of an unroll: actions to the environments, observations back."""
    for unroll in graph.unrolls:
        act, step = boxes[f"{unroll.name}.act"], boxes[f"{unroll.name}.step"]
        upper, lower = act.y + act.height, step.y
        to_env, to_actor = unroll.per_step_bytes
        ways = (("action", act, step, to_env), ("observation", step, act, to_actor))
        for boundary, source, target, size in ways:
            kind = _kind(plan, boundary, source.name, target.name)
            down = source is act
            x = act.middle + (-24 if down else 24)
            ends = (upper, lower - 3) if down else (lower, upper + 3)
            tip = f"{boundary}: {quantity(size, 'B')} × {unroll.length}"
            yield _path(
                f"M {x} {ends[0]} L {x} {ends[1]}", "#374151", kind not in ("", LinkKind.FUSED), tip
            )
            anchor, at = ("end", x - 10) if down else ("start", x + 10)
            middle = (upper + lower) / 2
            yield _text(at, middle - 4, boundary, "label", anchor)
            yield _text(
                at, middle + 11, f"{quantity(size, 'B')} × {unroll.length}", "small", anchor
            )
            if kind:
                yield _text(at, middle + 26, kind, "small", anchor)


def _within_lanes(graph: Graph, boxes: dict[str, Box]) -> Iterator[str]:
    """Thin arrows for values that stay on their side."""
    made: list[tuple[str, tuple[Value, ...]]] = [("state", graph.state.inputs)]
    made += [(_box_name(graph, node.name), node.outputs) for node in graph.nodes]
    for node in graph.nodes:
        read = {v.id for v in node.inputs}
        read |= {v.id for v in node.actor_inputs} if isinstance(node, Unroll) else set()
        target = boxes[_box_name(graph, node.name)]
        for name, values in made:
            source = boxes[name]
            if source.side is target.side and any(value.id in read for value in values):
                yield _along(source, target, list(boxes.values()))


def _along(source: Box, target: Box, boxes: list[Box]) -> str:
    """A straight line, or an arc over the boxes that stand between."""
    middle = source.y + source.height / 2
    start, end = source.x + source.width, target.x - 3
    between = range(source.column + 1, target.column)
    if any(box.side is source.side and box.column in between for box in boxes):
        top = _lane_top(source.side) + 8
        bend = f"M {start} {middle - 14} C {start + 40} {top} {start + 40} {top} {start + 80} {top}"
        over = f"L {end - 80} {top} C {end - 40} {top} {end - 40} {top} {end} {middle - 14}"
        return _path(f"{bend} {over}", "#9ca3af", False, "")
    return _path(f"M {start} {middle} L {end} {middle}", "#9ca3af", False, "")


def _loop(graph: Graph, boxes: dict[str, Box]) -> Iterator[str]:
    """The new state goes round to the next iteration."""
    makers = {value.id: node.name for node in graph.nodes for value in node.outputs}
    names = {makers[value.id] for value in graph.state.outputs if value.id in makers}
    last = max(
        (boxes[name] for name in names if name in boxes), key=lambda b: b.column, default=None
    )
    if last is None:
        return
    state, top = boxes["state"], _lane_top(Side.LEARNER) - 14
    left, right = state.middle, last.middle
    path = (
        f"M {right} {last.y} L {right} {top + 10} Q {right} {top} {right - 10} {top} "
        f"L {left + 10} {top} Q {left} {top} {left} {top + 10} L {left} {state.y - 3}"
    )
    yield _path(path, "#9ca3af", True, "")
    yield from _label((left + right) / 2, top, ("next iteration",))


def _lanes(width: float) -> Iterator[str]:
    for side in LANES:
        colour, tint = COLOURS[side]
        top = _lane_top(side)
        yield (
            f'<rect x="24" y="{top}" width="{width - 48}" height="{LANE_HEIGHT}" rx="12" '
            f'fill="{tint}"/>'
        )
        label = _text(40, top + LANE_HEIGHT / 2 + 5, side.value, "lane")
        yield label.replace("<text ", f'<text fill="{colour}" ', 1)


def _draw(box: Box) -> Iterator[str]:
    colour, _ = COLOURS[box.side]
    radius = box.height / 2 if box.pill else 10
    outline = (
        f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="{radius}" '
    )
    yield f'{outline}fill="{box.tint or "#ffffff"}"/>'
    upper = box.height - (BADGE if box.badge else 0)
    if box.badge:
        round_top = (
            f"M {box.x} {box.y + upper} v {10 - upper} q 0 -10 10 -10 h {box.width - 20} "
            f"q 10 0 10 10 v {upper - 10} z"
        )
        yield f'<path d="{round_top}" style="fill: #ffffff"/>'
        yield _text(box.middle, box.y + box.height - 7, box.badge, "badge", "middle")
    yield f'{outline}fill="none" stroke="{colour}" stroke-width="1.5"/>'
    lines = [box.name, *box.lines]
    top = box.y + upper / 2 - 9 * (len(lines) - 1) + 5
    for number, line in enumerate(lines):
        style = "detail" if number else "name"
        yield _text(box.middle, top + 18 * number, line, style, "middle")


def _label(x: float, y: float, lines: tuple[str, ...]) -> Iterator[str]:
    width = 8 + 6.9 * max(map(len, lines))
    height = 15 * len(lines) + 3
    yield (
        f'<rect x="{x - width / 2:.1f}" y="{y - height / 2:.1f}" width="{width:.1f}" '
        f'height="{height}" rx="4" fill="#ffffff" fill-opacity="0.92"/>'
    )
    for number, line in enumerate(lines):
        at = y - height / 2 + 12.5 + 15 * number
        yield _text(x, at, line, "small" if number or len(lines) == 1 else "label", "middle")


def _title(graph: Graph) -> str:
    return f"{graph.algorithm} on {graph.env}"


def _subtitle(graph: Graph, plan: Plan | None) -> str:
    steps = f"{count(graph.steps_per_iteration, 'step')} per iteration"
    if plan is None or plan.replicas == 1:
        size = f"{count(graph.num_envs, 'environment')}, {steps}"
    else:
        size = f"{plan.replicas} replicas, on each {count(graph.num_envs, 'environment')}, {steps}"
    return size if plan is None else f"{size} · policy {plan.policy}"


def _plan_notes(plan: Plan) -> list[str]:
    workers = [
        f"worker {worker.name}: device{'s' if len(worker.devices) > 1 else ''} "
        + ", ".join(map(str, worker.devices))
        for worker in plan.workers
    ]
    return [*workers, *plan.notes]


def _lane_top(side: Side) -> float:
    return TOP + LANES.index(side) * (LANE_HEIGHT + LANE_GAP)


def _arrow_heads() -> str:
    heads = (
        f'<marker id="head-{name}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" style="fill: #{name}"/></marker>'
        for name in ("374151", "9ca3af")
    )
    return f"<defs>{''.join(heads)}</defs>"


def _path(d: str, colour: str, dashed: bool, tip: str) -> str:
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    head = f"url(#head-{colour[1:]})"
    return (
        f'<path d="{d}" stroke="{colour}" stroke-width="1.6"{dash} marker-end="{head}">'
        f"<title>{escape(tip)}</title></path>"
    )


def _text(x: float, y: float, line: str, style: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(line)}</text>'
