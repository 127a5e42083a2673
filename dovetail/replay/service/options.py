"""The options of tables and limiters as JSON, and back."""

from dataclasses import fields, is_dataclass
from typing import Any

from dovetail.replay import table as kinds
from dovetail.replay.limiter import RateLimiter

KINDS = {
    kind.__name__: kind
    for kind in (
        kinds.Table,
        kinds.Transitions,
        kinds.Sequences,
        kinds.Episodes,
        kinds.Uniform,
        kinds.Prioritized,
        kinds.Fifo,
        kinds.Lifo,
        kinds.Highest,
        kinds.Lowest,
        kinds.History,
        RateLimiter,
    )
}


def written(options: Any) -> Any:
    """Options as JSON-compatible objects with their kind and fields."""
    if isinstance(options, tuple):
        return [written(part) for part in options]
    if not is_dataclass(options):
        return options
    found = {field.name: written(getattr(options, field.name)) for field in fields(options)}
    return {"kind": type(options).__name__, **found}


def read(found: Any) -> Any:
    """Options from JSON."""
    if isinstance(found, list):
        return tuple(read(part) for part in found)
    if not isinstance(found, dict):
        return found
    given = {name: read(part) for name, part in found.items() if name != "kind"}
    return KINDS[found["kind"]](**given)
