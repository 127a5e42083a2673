"""The links of a page, and where they lead; plain parsing, as GitHub and the site read a page."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

FENCE = re.compile(r"^\s*(`{3,}|~{3,}).*?^\s*\1`*\s*$", flags=re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", flags=re.DOTALL)
LINK = re.compile(r"\]\(\s*<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?([^>\s]+)>?", flags=re.MULTILINE)
ATTRIBUTE = re.compile(r"<(?:a|img)\b[^>]*?\b(?:href|src)=\"([^\"]+)\"")
HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$", flags=re.MULTILINE)
ANCHOR = re.compile(r"<\w+\b[^>]*?\b(?:id|name)=\"([^\"]+)\"")


class Link(NamedTuple):
    """A target as it is written, and the line it is on."""

    target: str
    line: int


def links(text: str) -> list[Link]:
    """Every link and image of a page, outside of code."""
    plain = _without_code(text)
    found = [
        Link(match[1], plain.count("\n", 0, match.start(1)) + 1)
        for pattern in (LINK, REFERENCE, ATTRIBUTE)
        for match in pattern.finditer(plain)
    ]
    return sorted(found, key=lambda link: link.line)


def anchors(text: str) -> set[str]:
    """The anchors of a page: its headings, those that repeat numbered, and its ids."""
    found: set[str] = set()
    headings = HEADING.findall(FENCE.sub("", text))
    for name in map(slug, headings):
        times = 0
        while (unique := f"{name}-{times}" if times else name) in found:
            times += 1
        found.add(unique)
    return found | set(ANCHOR.findall(_without_code(text)))


def slug(heading: str) -> str:
    """The anchor of a heading: lower case, no punctuation, a dash for every space."""
    words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")


def broken(page: Path, root: Path) -> Iterator[str]:
    """A sentence for each link of a page that leads nowhere; other sites are not asked."""
    text = page.read_text(encoding="utf-8")
    for target, line in links(text):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        file = (page.parent / path).resolve() if path else page
        where = f"{page.relative_to(root)}:{line}: {target}"
        if path.startswith("/") or not file.is_relative_to(root):
            yield f"{where} leads out of the repository"
        elif not file.exists():
            yield f"{where}: there is no {file.relative_to(root)}"
        elif anchor and file.suffix != ".md":
            yield f"{where}: only pages have anchors"
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"{where}: {file.relative_to(root)} has no heading with this anchor"


def _without_code(text: str) -> str:
    """The text with its code blanked out, line for line."""
    for pattern in (FENCE, CODE):
        text = pattern.sub(lambda match: "\n" * match[0].count("\n"), text)
    return text
