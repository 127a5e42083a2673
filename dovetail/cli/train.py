"""`dovetail train`: `dovetail.train` and `dovetail.resume`."""

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, get_type_hints

from dovetail.cli.experiment import (
    Words,
    algorithm_options,
    deployment,
    experiment,
    replay,
    replay_flags,
    understand,
    wrap_flag,
)
from dovetail.cli.options import flag, read
from dovetail.cli.parser import Parser
from dovetail.cli.reference import PACKAGE
from dovetail.cli.spelling import resume_text, train_text
from dovetail.cli.values import convert, numbers
from dovetail.errors import UserError

MOVED = {"env": "env", "data": "data", "algorithm-file": "algorithm"}
"""The keys of the new places of a resumed run's files → the arguments of `dovetail.resume`."""

WITH_RESUME = {
    *("resume", "checkpoint", "trust", "total-steps", "online-steps"),
    *("cluster", "deploy", "callback", "json", "quiet"),
    *MOVED,
}
"""The flags allowed with --resume, beside the algorithm's options and the settings; everything else
comes from the run's config."""


def run(argv: list[str]) -> None:
    """Trains or resumes; prints the summary as JSON with --json."""
    words = understand(_parser(), argv)
    quiet = bool(words.values.get("quiet"))
    if "resume" in words.values:
        if argv and not argv[0].startswith("-"):
            raise _no_place(argv[0])
        trained = _resume(words, quiet)
    else:
        trained = _train(words, quiet)
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
        "dovetail train --resume runs/ppo-CartPole-v1-0-20260101-120000 --total-steps 400_000 "
        "--learning-rate 1e-4",
    )
    parser.usage = "dovetail train ALGORITHM --env ENV [--option value …]"
    parser.flag("--env", "Environment: CartPole-v1, gymnax:CartPole-v1, my_env.py:MyEnv", "ENV")
    wrap_flag(parser)
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
    parser.flag(
        "--callback",
        "Function called during the run, which may stop it: file.py:function or "
        "module:function; several with commas",
        "FUNCTION",
    )
    parser.flag("--run", "Folder for the run; new or empty", "FOLDER", "settings.folder")
    parser.flag("--config", "TOML file with any of these; the command line wins", "FILE")
    parser.flag("--resume", "Go on with this run, with its own options or with those given", "RUN")
    parser.flag("--checkpoint", "With --resume: the checkpoint to go on from; else the latest", "N")
    parser.flag("--trust", "With --resume: run the code that a run from elsewhere names")
    parser.flag(
        "--algorithm",
        "With --resume: file.py:Name of the run's algorithm, if it has moved; likewise --env and "
        "--data",
        "NAME",
        "algorithm-file",
    )
    parser.flag("--init-from", "Begin with the parameters of this run, on another task", "RUN")
    parser.flag("--json", "End with one line of JSON on standard output")
    parser.flag("--quiet", "Show nothing but the result")
    settings = read(PACKAGE / "run" / "settings.py", "Settings")
    folder = settings.pop("folder")
    parser.known.add(f"settings.{folder.name}")
    parser.options("settings", "settings", settings.values())
    return parser


def _train(words: Words, quiet: bool) -> Any:
    import dovetail

    if "algorithm-file" in words.values:
        raise UserError(
            "--algorithm is the new place of a resumed run's algorithm: name the one to train as "
            "the first word, dovetail train ppo …"
        )
    for name in ("checkpoint", "trust"):
        if name in words.values:
            raise UserError(f"--{name} is about a run that exists: add --resume RUN.")
    wanted = experiment(words, "train")
    given = numbers(words.values, "total-steps", "seed", "online-steps", "data-memory")
    texts = {name: words.values[name] for name in ("data", "init-from") if name in words.values}
    data = {name.replace("-", "_"): convert(x, str, f"--{name}") for name, x in texts.items()}
    settings = _settings(words)
    where, spelled = deployment(words)
    kept, kept_text = replay(words)
    called = _callback(words)
    python = train_text(wanted, given, spelled, settings, data | called, kept_text)
    strategy = wanted.strategy.build() if wanted.strategy else None
    if quiet:
        settings.setdefault("display", "none")
    with _shown(python, quiet):
        return dovetail.train(
            wanted.algorithm.build(),
            wanted.env,
            strategy,
            settings=dovetail.Settings(**settings),
            **wanted.wraps,
            **data,
            **given,
            **where,
            **kept,
            **called,
        )


def _resume(words: Words, quiet: bool) -> Any:
    import dovetail

    mine = {key for key in words.values if key.startswith(("algorithm.", "settings."))}
    for spare in sorted(set(words.values) - WITH_RESUME - mine):
        raise _no_place(spare.rpartition(".")[2])
    given = numbers(words.values, "total-steps", "online-steps", "checkpoint")
    given |= {"trust": True} if words.values.get("trust") else {}
    moved = {
        name: convert(words.values[key], str, f"--{name}")
        for key, name in MOVED.items()
        if key in words.values
    }
    changes = _settings(words) | algorithm_options(words)
    where, spelled = deployment(words)
    changes |= _callback(words)
    with _shown(resume_text(words.values["resume"], given | moved, spelled, changes), quiet):
        return dovetail.resume(words.values["resume"], **given, **moved, **where, **changes)


def _callback(words: Words) -> dict[str, Any]:
    """The argument `callback`, if given."""
    if "callback" not in words.values:
        return {}
    names = convert(words.values["callback"], list[str], "--callback")
    return {"callback": names[0] if len(names) == 1 else names}


def _no_place(word: str) -> UserError:
    return UserError(
        f"--resume goes on with the run's own algorithm, environment and strategy, so {word!r} has "
        "no place beside it: leave it out, or train a new run (--init-from RUN begins with this "
        "one's parameters)."
    )


def _settings(words: Words) -> dict[str, Any]:
    import dovetail

    hints = get_type_hints(dovetail.Settings)
    flags = {"folder": "--run"}
    return {
        name: convert(text, hints[name], flags.get(name, flag(name)))
        for name, text in words.section("settings").items()
    }


@contextmanager
def _shown(python: str, quiet: bool) -> Generator[None]:
    """Prints the equivalent Python code to standard error once the run begins, so that an error
    about its inputs stands alone."""
    from dovetail.training.announcing import when_accepted

    told = list[bool]()

    def show() -> None:
        told.append(True)
        if not quiet:
            print(f"The same in Python:\n\n{python}\n", file=sys.stderr, flush=True)

    when_accepted(show)
    yield
    if not told:
        show()
