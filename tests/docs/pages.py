"""The pages of the documentation, by their paths below docs/, and the blocks they show."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    page.relative_to(ROOT / "docs").as_posix(): page
    for page in sorted((ROOT / "docs").rglob("*.md"))
}
DOCS = {name: page.read_text(encoding="utf-8") for name, page in FILES.items()}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]
