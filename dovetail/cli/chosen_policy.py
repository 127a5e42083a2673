"""The flags that choose a policy of a run, and give the new places of files that have moved."""

from collections.abc import Mapping
from typing import Any, Literal

from dovetail.cli.parser import Parser
from dovetail.cli.values import convert


def place_flags(parser: Parser) -> None:
    """Adds the flags."""
    parser.flag(
        "--checkpoint",
        "The policy: best (default where there is one), last, or the number of a checkpoint",
        "WHICH",
    )
    parser.flag("--env", "Environment, if the run's own has moved or another is wanted", "ENV")
    parser.flag("--algorithm", "file.py:Name of the algorithm, if the run's own has moved", "NAME")


def chosen_policy(given: Mapping[str, Any]) -> dict[str, Any]:
    """The given flags as the arguments of `dovetail.evaluate_run` and `dovetail.watch`."""
    chosen = {name: given[name] for name in ("env", "algorithm") if name in given}
    if "checkpoint" in given:
        kind = Literal["best", "last"] | int
        chosen["which"] = convert(given["checkpoint"], kind, "--checkpoint")
    return chosen
