"""`dovetail doctor`: `dovetail.doctor` and `dovetail.stacks`."""

import dataclasses
import json

from dovetail.cli.parser import Parser
from dovetail.errors import UserError

MARKS = {"good": "✓", "note": "·", "bad": "✗"}


def run(argv: list[str]) -> None:
    """Prints the findings; with --stacks, the stack traces of a running run."""
    parser = Parser(
        "doctor",
        "Says what this machine has; or, of a run, what each worker does or waits for, and what\n"
        "went wrong.",
        "dovetail doctor",
        "dovetail doctor runs/ppo-cartpole-v1-0-20260101-120000 --stacks",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="A run's folder")
    parser.flag("--stacks", "Show the lines of code at which a live run's threads stand")
    parser.flag("--json", "Print it as JSON")
    words = parser.read(argv)

    import dovetail

    if "stacks" in words:
        if "run" not in words:
            raise UserError("--stacks asks a run: name its folder, dovetail doctor RUN --stacks.")
        print(dovetail.stacks(words["run"]))
        return
    found = dovetail.doctor(words.get("run"))
    if "json" in words:
        print(json.dumps([dataclasses.asdict(finding) for finding in found]))
        return
    for finding in found:
        print(f"{MARKS[finding.level]} {finding.text}")
