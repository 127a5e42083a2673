"""Names of earlier versions: translates them, so that old runs can still be read."""

import re
from collections.abc import Collection, Mapping
from typing import Any

KEYS = {
    "policy": "strategy",
    "policy_options": "strategy_options",
    "stations": "processes",
    "fewest": "min_actors",
}
"""Keys of config.json and plan.json, and tables of a config file: old → new."""

OPTIONS: dict[str, tuple[str, ...]] = {
    "actor_every": ("policy_delay",),
    "anneal": ("anneal_lr",),
    "begin_at": ("learning_starts",),
    "capacity": ("buffer_size",),
    "clip": ("clip_range",),
    "conservatism": ("cql_alpha",),
    "critics": ("num_critics",),
    "discount": ("gamma",),
    "duelling": ("dueling",),
    "entropy_coefficient": ("ent_coef",),
    "envs": ("num_envs",),
    "epsilon_share": ("exploration_fraction",),
    "fewest": ("min_actors",),
    "hidden": ("hidden_sizes",),
    "lambda_": ("gae_lambda", "vtrace_lambda"),
    "minibatches": ("num_minibatches",),
    "normalise_advantages": ("normalize_advantages",),
    "normalise_observations": ("normalize_observations",),
    "normalise_rewards": ("normalize_rewards",),
    "prioritised": ("prioritized",),
    "steps": ("total_steps",),
    "target_noise": ("target_policy_noise",),
    "target_rate": ("tau",),
    "value_coefficient": ("vf_coef",),
    "value_high": ("v_max",),
    "value_low": ("v_min",),
    "value_max": ("v_max",),
    "value_min": ("v_min",),
    "value_weight": ("alpha",),
}
"""Options: old → new; of several new names, the first that exists."""


MOVED = {"strategy.num_envs": "algorithm.num_envs"}
"""Options in a table of a config file that now belong to another table."""

COPIES = {"replicas": "learner", "actors": "actor", "shards": "replay"}
"""Counts of a plan then → the side whose copies they are."""

STATE = {"optimiser": "optimizer"}
"""Fields of a learner's state: old → new."""


def with_present_keys(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Renames old keys."""
    return {KEYS.get(key, key): value for key, value in fields.items()}


def with_present_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's config with today's keys, and with the number of environments among the algorithm's
    options: it was an option of the strategy."""
    found = with_present_keys(config)
    options, before = found.get("options"), found.get("strategy_options")
    if not isinstance(options, dict) or not isinstance(before, dict) or "num_envs" in options:
        return found
    kept = with_present_options(before, {"num_envs"})
    if "num_envs" in kept:
        found["options"] = {**options, "num_envs": kept.pop("num_envs")}
        found["strategy_options"] = kept
    return found


def with_present_copies(plan: Mapping[str, Any]) -> dict[str, Any]:
    """A plan's fields with the copies of its sides, which earlier plans counted one by one."""
    fields = dict(plan)
    if "copies" not in fields and "replicas" in fields:
        counts = {side: fields.pop(count) for count, side in COPIES.items() if count in fields}
        fields["copies"] = {"environment": counts.get("actor", 1), **counts}
    return fields


def with_present_options(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Renames old options; an option that is in `known` keeps its name."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        names = (name, *OPTIONS.get(name, ()))
        found[next((other for other in names if other in known), name)] = value
    return found


def present_path(path: str) -> str:
    """Renames old fields in the path of a state's leaf (`jax.tree_util.keystr`)."""
    return re.sub(r"\w+", lambda word: STATE.get(word[0], word[0]), path)
