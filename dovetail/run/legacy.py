"""Names of earlier versions: what was written with them is read as if written today."""

import re
from collections.abc import Collection, Mapping
from typing import Any

KEYS = {"policy": "strategy", "policy_options": "strategy_options", "stations": "processes"}
"""Keys of config.json and plan.json, and tables of a config file: then → now."""

OPTIONS: dict[str, str] = {}
"""Options of algorithms and strategies: then → now."""


STATE = {"optimiser": "optimizer"}
"""Fields of a learner's state: then → now."""


def with_present_keys(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same fields under today's keys."""
    return {KEYS.get(key, key): value for key, value in fields.items()}


def with_present_options(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The same options under today's names; one that is `known` as it stands keeps its name."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        present = OPTIONS.get(name, name)
        found[name if name in known or present not in known else present] = value
    return found


def present_path(path: str) -> str:
    """The path of a leaf of a state, as jax.tree_util.keystr writes it, under today's names."""
    return re.sub(r"\w+", lambda word: STATE.get(word[0], word[0]), path)
