"""The table of what a run survives is the one that the tests make."""

import os

from pages import ROOT
from survival import rows

PAGE = ROOT / "docs" / "what-a-run-survives.md"
BEGIN, END = "<!-- made by tests/docs/test_survival_page.py -->\n", "<!-- end -->\n"


def table() -> str:
    """The rows as Markdown."""
    lines = ["| fault | strategy | where | the run |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows())]) + "\n"


def test_the_table_is_that_of_the_tests() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    found, _, after = rest.partition(END)
    if os.environ.get("DOVETAIL_UPDATE_GOLDEN"):
        PAGE.write_text(f"{before}{BEGIN}{table()}{END}{after}", encoding="utf-8")
        return
    assert found == table(), "run this test with DOVETAIL_UPDATE_GOLDEN=1 and read the difference"


def test_every_outcome_is_there() -> None:
    assert {row.outcome.split(",")[0].split(":")[0] for row in rows()} >= {"goes on", "lost"}
    assert len(rows()) == len(set(rows())) > 25
