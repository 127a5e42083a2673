"""`dovetail eval`: `dovetail.evaluate_run`."""

import json
import math
from typing import Any

from dovetail.cli.chosen_policy import chosen_policy, place_flags
from dovetail.cli.parser import Parser
from dovetail.cli.values import numbers


def run(argv: list[str]) -> None:
    """Evaluates a run's policy and prints its returns."""
    parser = Parser(
        "eval",
        "Evaluates the policy that a run learned: greedy episodes, with seeds of their own.",
        "dovetail eval runs/ppo-CartPole-v1-0-20260101-120000 --episodes 20",
        "dovetail eval runs/ppo-CartPole-v1-0-20260101-120000 --checkpoint last",
        "dovetail eval runs/ppo-CartPole-v1-0-20260101-120000 --explore --record data/cartpole",
    )
    parser.add_argument("run", metavar="RUN", help="The run's folder")
    parser.flag("--episodes", "How many episodes (default 100)", "N")
    parser.flag("--seed", "Seed of the episodes (default 0)", "N")
    parser.flag("--explore", "Choose actions as in training, not greedily")
    parser.flag("--record", "Write the episodes to a new dataset", "FOLDER")
    place_flags(parser)
    parser.flag("--trust", "Run the code that a run from elsewhere names")
    parser.flag("--json", "Print one line of JSON")
    given = parser.read(argv)
    chosen: dict[str, Any] = numbers(given, "episodes", "seed") | chosen_policy(given)
    chosen |= {name: given[name] for name in ("explore", "record", "trust") if name in given}

    import dovetail

    found = dovetail.evaluate_run(given["run"], **chosen)
    low, high = found.interval
    told = {
        "run": given["run"],
        "policy": found.which,
        "env_steps": found.env_steps,
        "episodes": len(found.returns),
        "mean_return": found.mean,
        "confidence_low": low if math.isfinite(low) else None,
        "confidence_high": high if math.isfinite(high) else None,
        "mean_length": float(found.lengths.mean()),
        "returns": found.returns.tolist(),
        "explored": "explore" in given,
        "recorded": given.get("record"),
    }
    print(json.dumps(told) if "json" in given else _text(told))


def _text(told: dict[str, Any]) -> str:
    from dovetail.telemetry.progress import number

    band = ""
    if told["confidence_low"] is not None:
        low, high = number(told["confidence_low"]), number(told["confidence_high"])
        band = f" (95 % confidence {low} to {high})"
    where = f" They are in {told['recorded']}." if told["recorded"] else ""
    kind = "exploring" if told["explored"] else "greedy"
    which = told["policy"]
    policy = f"checkpoint {which}"
    if isinstance(which, str):
        policy = f"the {which} policy, of step {told['env_steps']:,}"
    return (
        f"{told['episodes']} {kind} episodes of {policy}: mean return "
        f"{number(told['mean_return'])}{band}, mean length {told['mean_length']:.1f}.{where}"
    )
