"""Elements of an SVG drawing as text: document, text, arrows, labels, rounded boxes."""

from collections.abc import Iterable, Iterator
from html import escape

INK, FAINT = "#374151", "#9ca3af"
STYLE = """
  text { font-family: "Inter", "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif; }
  .title { font-size: 18px; font-weight: 600; fill: #111827; }
  .lane { font-size: 13px; font-weight: 600; }
  .name { font-size: 14px; font-weight: 600; fill: #111827; }
  .detail { font-size: 12px; fill: #4b5563; }
  .label { font-size: 12px; font-weight: 600; fill: #1f2937; }
  .small { font-size: 11px; fill: #6b7280; }
  .badge { font-size: 11px; fill: #374151; }
"""


def document(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A complete drawing on a white background."""
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f"<defs>{_head(INK)}{_head(FAINT)}</defs>",
        rounded(0, 0, width, height, 0, fill="#ffffff"),
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def words(x: float, y: float, line: str, style: str, anchor: str = "start", fill: str = "") -> str:
    """One line of text; `style` names a class of STYLE."""
    color = f' fill="{fill}"' if fill else ""
    place = f'x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}"{color}'
    return f"<text {place}>{escape(line)}</text>"


def rounded(
    x: float, y: float, width: float, height: float, radius: float, fill: str, stroke: str = "none"
) -> str:
    """A rectangle with rounded corners."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"'
    return f'<rect {place} fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>'


def round_top(x: float, y: float, width: float, height: float, radius: float, fill: str) -> str:
    """A rectangle with only its upper corners rounded."""
    bend, straight = f"{radius:g}", f"{height - radius:g}"
    shape = (
        f"M {x:g} {y + height:g} v -{straight} q 0 -{bend} {bend} -{bend} "
        f"h {width - 2 * radius:g} q {bend} 0 {bend} {bend} v {straight} z"
    )
    return f'<path d="{shape}" fill="{fill}"/>'


def arrow(shape: str, color: str = INK, dashed: bool = False, tip: str = "") -> str:
    """An arrow along the SVG path `shape`; `tip` is its tooltip."""
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<path d="{shape}" fill="none" stroke="{color}" stroke-width="1.6"{dash} '
        f'marker-end="url(#head-{color[1:]})">{title}</path>'
    )


def label(x: float, y: float, lines: tuple[str, ...]) -> Iterator[str]:
    """Lines of text centered on a point, on an opaque background."""
    width, height = 8 + 6.9 * max(map(len, lines)), 15 * len(lines) + 3
    yield (
        f'<rect x="{x - width / 2:.1f}" y="{y - height / 2:.1f}" width="{width:.1f}" '
        f'height="{height}" rx="4" fill="#ffffff" fill-opacity="0.92"/>'
    )
    for number, line in enumerate(lines):
        style = "label" if number == 0 and len(lines) > 1 else "small"
        yield words(x, round(y - height / 2 + 12.5 + 15 * number, 1), line, style, "middle")


def _head(color: str) -> str:
    return (
        f'<marker id="head-{color[1:]}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" fill="{color}"/></marker>'
    )
