"""Marks the tests that show what a run survives; docs/what-a-run-survives.md is made from them."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

GOES_ON = "goes on"
RESUMES = "resumes"
LOST = "lost"

TESTS = Path(__file__).resolve().parent


class Row(NamedTuple):
    """What happens to a run."""

    fault: str
    strategy: str
    host: str
    outcome: str


def survives(fault: str, strategy: str, host: str, outcome: str) -> Callable[[Any], Any]:
    """The test that follows fails unless a run with this fault has this outcome."""
    assert outcome.startswith((GOES_ON, RESUMES, LOST)), (fault, strategy, host)
    return lambda test: test


def rows() -> list[Row]:
    """The rows of all tests, in the order of the files."""
    found: list[Row] = []
    for file in sorted(TESTS.rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if "survives(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                found += [_row(mark) for mark in node.decorator_list if _is_mark(mark)]
    return sorted(found, key=lambda row: (row.fault, row.strategy, row.host))


def _is_mark(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "survives"


def _row(node: ast.expr) -> Row:
    assert isinstance(node, ast.Call)
    names = {"GOES_ON": GOES_ON, "RESUMES": RESUMES, "LOST": LOST}

    def text(part: ast.expr) -> str:
        if isinstance(part, ast.BinOp):
            return text(part.left) + text(part.right)
        return names[part.id] if isinstance(part, ast.Name) else str(ast.literal_eval(part))

    return Row(*map(text, node.args))
