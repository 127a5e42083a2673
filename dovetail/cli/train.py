"""`dovetail train`: `dovetail.train` and `dovetail.resume`."""

import json
import sys
from typing import Any, get_type_hints

from dovetail.cli.experiment import (
    Words,
    deployment,
    experiment,
    replay,
    replay_flags,
    understand,
)
from dovetail.cli.options import flag, read
from dovetail.cli.parser import Parser
from dovetail.cli.reference import PACKAGE
from dovetail.cli.spelling import resume_text, train_text
from dovetail.cli.values import convert, numbers
from dovetail.errors import UserError

WITH_RESUME = {"resume", "total-steps", "online-steps", "cluster", "deploy", "json", "quiet"}
"""The flags allowed with --resume; everything else comes from the run's config."""


def run(argv: list[str]) -> None:
    """Trains or resumes; prints the summary as JSON with --json."""
    words = understand(_parser(), argv)
    quiet = bool(words.values.get("quiet"))
    trained = _resume(words, quiet) if "resume" in words.values else _train(words, quiet)
    if words.values.get("json"):
        print(json.dumps(trained.summary))
    elif quiet:
        print(trained)


def _parser() -> Parser:
    parser = Parser(
        "train",
        "Trains an algorithm on an environment until the steps are done or the return is reached,\n"
        "and leaves a run folder. Ctrl-C saves and stops. `dovetail train ppo --help` lists the\n"
        "options of PPO too.",
        "dovetail train ppo --env CartPole-v1 --until 475",
        "dovetail train my_file.py:Mine --env gymnax:CartPole-v1 --strategy fused --num-envs 2048",
        "dovetail train iql --data data/hopper --total-steps 50_000 --online-steps 20_000",
        "dovetail train --resume runs/ppo-CartPole-v1-0-20260101-120000 --total-steps 400_000",
    )
    parser.usage = "dovetail train ALGORITHM --env ENV [--option value …]"
    parser.flag("--env", "Environment: CartPole-v1, gymnax:CartPole-v1, my_env.py:MyEnv", "ENV")
    parser.flag("--strategy", "Strategy: see `dovetail list`, or file.py:Name", "STRATEGY")
    parser.flag("--cluster", "Run on Ray: local, auto or host:port", "CLUSTER")
    parser.flag("--deploy", "TOML file that says what goes where on the cluster", "FILE")
    replay_flags(parser)
    parser.flag("--seed", "Seed of everything random (default 0)", "N")
    parser.flag(
        "--total-steps",
        "Environment steps in all, or gradient steps of what learns from --data alone "
        "(default 200_000)",
        "N",
    )
    parser.flag("--data", "Learn from this dataset: alone if made for that, else beside", "FOLDER")
    parser.flag(
        "--online-steps", "After --total-steps on the data alone, go on for so many in --env", "N"
    )
    parser.flag(
        "--data-memory",
        "Megabytes of the dataset in memory; a larger one is read as needed (default 2_000)",
        "MB",
    )
    parser.flag("--run", "Folder for the run; new or empty", "FOLDER", "settings.folder")
    parser.flag("--config", "TOML file with any of these; the command line wins", "FILE")
    parser.flag("--resume", "Go on with this run, with its own options", "RUN")
    parser.flag("--json", "End with one line of JSON on standard output")
    parser.flag("--quiet", "Show nothing but the result")
    settings = read(PACKAGE / "run" / "settings.py", "Settings")
    folder = settings.pop("folder")
    parser.known.add(f"settings.{folder.name}")
    parser.options("settings", "settings", settings.values())
    return parser


def _train(words: Words, quiet: bool) -> Any:
    import dovetail

    wanted = experiment(words, "train")
    given = numbers(words.values, "total-steps", "seed", "online-steps", "data-memory")
    data = {"data": convert(words.values["data"], str, "--data")} if "data" in words.values else {}
    settings = _settings(words)
    where, spelled = deployment(words)
    kept, kept_text = replay(words)
    _show(train_text(wanted, given, spelled, settings, data.get("data"), kept_text), quiet)
    strategy = wanted.strategy.build() if wanted.strategy else None
    if quiet:
        settings.setdefault("display", "none")
    return dovetail.train(
        wanted.algorithm.build(),
        wanted.env,
        strategy,
        settings=dovetail.Settings(**settings),
        **data,
        **given,
        **where,
        **kept,
    )


def _resume(words: Words, quiet: bool) -> Any:
    import dovetail

    spare = sorted(set(words.values) - WITH_RESUME)
    if words.algorithm is not None:
        spare.insert(0, words.algorithm.word)
    if spare:
        raise UserError(
            f"--resume goes on with the run's own options, so {spare[0].rpartition('.')[2]!r} has "
            "no place beside it: leave it out, or train a new run."
        )
    given = numbers(words.values, "total-steps", "online-steps")
    where, spelled = deployment(words)
    _show(resume_text(words.values["resume"], given, spelled), quiet)
    return dovetail.resume(words.values["resume"], **given, **where)


def _settings(words: Words) -> dict[str, Any]:
    import dovetail

    hints = get_type_hints(dovetail.Settings)
    flags = {"folder": "--run"}
    return {
        name: convert(text, hints[name], flags.get(name, flag(name)))
        for name, text in words.section("settings").items()
    }


def _show(python: str, quiet: bool) -> None:
    """Prints the equivalent Python code to standard error."""
    if not quiet:
        print(f"The same in Python:\n\n{python}\n", file=sys.stderr, flush=True)
