"""`dovetail data`: one action for each function of `dovetail.data`, and `dovetail.estimate`."""

import json
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from dovetail.cli.parser import Parser
from dovetail.cli.values import convert, numbers
from dovetail.errors import UserError, nearest

ACTIONS = {
    "info": "says what datasets hold, and checks them",
    "merge": "makes one dataset of several",
    "split": "makes several datasets of one",
    "export": "writes a dataset in another format",
    "repair": "finishes a recording that was not closed",
    "estimate": "says what a run's policy would return, without an environment",
}
QUIET_SECONDS = 2.0
"""Delay before progress is shown."""


def run(argv: list[str]) -> None:
    """Runs one of the actions."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return
    action, *rest = argv
    if action not in ACTIONS:
        raise UserError(f"dovetail data has no action {action!r}: {nearest(action, ACTIONS)}")
    DOING[action](rest)


def usage() -> str:
    """The text of `dovetail data --help`."""
    width = max(map(len, ACTIONS))
    lines = [f"  {name:<{width}}  {line}" for name, line in ACTIONS.items()]
    return "\n".join(
        [
            "usage: dovetail data ACTION …",
            "",
            "Works with recorded data: folders in Minari's layout, or tables in Parquet.",
            "",
            "actions:",
            *lines,
            "",
            "`dovetail data ACTION --help` says more.",
            "",
            "example:",
            "  dovetail data info data/cartpole --check",
        ]
    )


class Telling:
    """Shows progress on standard error, after `QUIET_SECONDS`."""

    def __init__(self, what: str) -> None:
        self._what, self._due = what, time.monotonic() + QUIET_SECONDS
        self._live = sys.stderr.isatty()
        self._told = False

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + (0.2 if self._live else 5.0)
            self._told = True
            line = f"{self._what}: {done:,} of {total:,}"
            end = "\r" if self._live else "\n"
            print(line, end=end, file=sys.stderr, flush=True)

    def over(self) -> None:
        """Ends the line that a terminal keeps overwriting."""
        if self._told and self._live:
            print(file=sys.stderr)


def _info(argv: list[str]) -> None:
    parser = Parser(
        "data info",
        "Says what datasets hold: episodes, returns, spaces, and where they come from.",
        "dovetail data info data/cartpole --check",
    )
    parser.add_argument("datasets", metavar="DATASET", nargs="+", help="The datasets' folders")
    parser.flag("--check", "Read all of it, and name what is damaged or cannot be")
    parser.flag("--json", "Print one JSON object per line, one for each dataset")
    given = parser.read(argv)

    from dovetail import data

    tell = Telling("episodes read")
    for number, folder in enumerate(given["datasets"]):
        found = data.info(folder, check="check" in given, tell=tell)
        tell.over()
        if "json" in given:
            print(json.dumps(_plain(found.described())))
        else:
            print(("\n" if number else "") + _summary(found.described()))


def _summary(told: Mapping[str, Any]) -> str:
    returns, lengths, versions = told["returns"], told["lengths"], told["versions"]
    known = told["log_probabilities"]
    chances = "recorded" if known == 1 else f"recorded for {100 * known:.0f} % of the steps"
    lines = {
        "dataset": f"{told['dataset']} ({told['format']}, {told['megabytes']:,.1f} MB)",
        "environment": told["environment"] or "not known",
        "episodes": f"{told['episodes']:,} with {told['steps']:,} steps: "
        f"{told['terminated']:,} terminated, {told['truncated']:,} truncated"
        + (f" ({told['cut']:,} by the end of the recording)" if told["cut"] else ""),
        "returns": _returns(returns, told["fragments"]),
        "lengths": f"mean {lengths['mean']:.4g}, "
        f"from {lengths['low']:.0f} to {lengths['high']:.0f}",
        "observations": told["observation"],
        "actions": told["action"],
        "probabilities": chances if known else "of actions are not known",
        "versions": f"{versions[0]:,} to {versions[1]:,}" if versions else "not known",
    }
    width = max(map(len, lines))
    rows = [f"{name:<{width}}  {text}" for name, text in lines.items()]
    rows += [f"{'source':<{width}}  {_source(source)}" for source in told["sources"]]
    if told["checked"]:
        rows.append(
            f"{'checked':<{width}}  all of it is whole and finite, every choice is in its space"
        )
    return "\n".join(rows)


def _returns(returns: Mapping[str, float] | None, fragments: int) -> str:
    if returns is None:
        return "not known: no episode was recorded from its first step to its last"
    text = (
        f"mean {returns['mean']:.4g} ± {returns['deviation']:.4g}, "
        f"from {returns['low']:.4g} to {returns['high']:.4g}"
    )
    left = f" ({fragments:,} not recorded from first step to last left out)" if fragments else ""
    return text + left


def _source(source: Mapping[str, Any]) -> str:
    parts = [source["kind"]]
    parts += [f"of {source['algorithm']}"] if source["algorithm"] else []
    parts += [f"on {source['environment']}"] if source["environment"] else []
    parts += [f"seed {source['seed']}"] if source["seed"] is not None else []
    parts += [f"run {source['run']}"] if source["run"] else []
    return ", ".join(parts)


def _merge(argv: list[str]) -> None:
    parser = Parser(
        "data merge",
        "Makes one new dataset of all episodes of others, which keep their sources.",
        "dovetail data merge data/expert data/random --out data/mixed",
    )
    parser.add_argument("datasets", metavar="DATASET", nargs="+", help="The datasets' folders")
    parser.flag("--out", "The new dataset's folder", "FOLDER")
    parser.flag(
        "--drop-invalid",
        "Leave out episodes with numbers that are not finite or not in their space",
    )
    parser.flag("--json", "Print one line of JSON")
    given = parser.read(argv)
    _transfer(given, given["datasets"], "minari", "drop-invalid" in given)


def _export(argv: list[str]) -> None:
    parser = Parser(
        "data export",
        "Writes a dataset in another format: minari (HDF5, as Minari does) or parquet (tables).",
        "dovetail data export data/cartpole --format parquet --out data/cartpole-tables",
    )
    parser.add_argument("dataset", metavar="DATASET", help="The dataset's folder")
    parser.flag("--format", "minari (default) or parquet", "FORMAT")
    parser.flag("--out", "The new dataset's folder", "FOLDER")
    parser.flag("--json", "Print one line of JSON")
    given = parser.read(argv)
    _transfer(given, [given["dataset"]], given.get("format", "minari"), False)


def _transfer(given: Mapping[str, Any], datasets: list[str], format: str, drop: bool) -> None:
    out = _out(given)

    from dovetail import data

    tell = Telling("episodes written")
    made = data.merge(datasets, out, format=format, drop_invalid=drop, tell=tell)
    tell.over()
    _print_made(given, [made])


def _split(argv: list[str]) -> None:
    parser = Parser(
        "data split",
        "Makes several new datasets of one; whole episodes are drawn at random.",
        "dovetail data split data/mixed --shares 0.9,0.1 --out data/train,data/test",
    )
    parser.add_argument("dataset", metavar="DATASET", help="The dataset's folder")
    parser.flag("--shares", "Shares of the episodes, as 0.9,0.1 (default)", "SHARES")
    parser.flag("--out", "The new datasets' folders, comma-separated", "FOLDERS")
    parser.flag("--seed", "Seed of the draw (default 0)", "N")
    parser.flag("--json", "Print one line of JSON")
    given = parser.read(argv)
    shares = convert(given.get("shares", "0.9,0.1"), tuple[float, ...], "--shares")
    outs = [folder for folder in _out(given).split(",") if folder]
    seed = numbers(given, "seed")

    from dovetail import data

    tell = Telling("episodes written")
    made = data.split(given["dataset"], outs, shares, **seed, tell=tell)
    tell.over()
    _print_made(given, made)


def _repair(argv: list[str]) -> None:
    parser = Parser(
        "data repair",
        "Makes a dataset of a recording whose process was killed: all whole episodes are kept.",
        "dovetail data repair data/cartpole",
    )
    parser.add_argument("dataset", metavar="DATASET", help="The recording's folder")
    parser.flag("--json", "Print one line of JSON")
    given = parser.read(argv)

    from dovetail import data

    tell = Telling("episodes saved")
    found, lost = data.repair(given["dataset"], tell)
    tell.over()
    if "json" in given:
        told = {"dataset": given["dataset"], "episodes": found.episodes, "steps": found.steps}
        print(json.dumps(told | {"lost": lost}))
        return
    rest = f" What followed is lost: {lost}." if lost else ""
    print(f"{given['dataset']} has {found.episodes:,} episodes, {found.steps:,} steps.{rest}")


def _estimate(argv: list[str]) -> None:
    parser = Parser(
        "data estimate",
        "Says what the policy of a run would return where a dataset was recorded: by\n"
        "importance sampling (is, wis, pdis, wpdis: plain, weighted, per decision, both), doubly\n"
        "robust (dr) and fitted-Q evaluation (fqe), with 95 % intervals.",
        "dovetail data estimate data/cartpole runs/dqn-CartPole-v1-0-20260101-120000 --method fqe",
    )
    parser.add_argument("dataset", metavar="DATASET", help="The dataset's folder")
    parser.add_argument("run", metavar="RUN", help="The run's folder")
    parser.flag("--method", "Methods, comma-separated (default: all that are possible)", "METHODS")
    parser.flag("--gamma", "How much a later reward counts (default: as in training)", "G")
    parser.flag(
        "--acting",
        "greedy (default), or sampled: as the policy draws its actions in training",
        "HOW",
    )
    parser.flag("--epsilon", "Share of the policy's actions that are random (default 0)", "E")
    parser.flag("--updates", "Gradient steps of fitted-Q evaluation (default 10_000)", "N")
    parser.flag("--seed", "Seed of fitted-Q evaluation (default 0)", "N")
    parser.flag("--json", "Print one line of JSON")
    given = parser.read(argv)
    options = {
        name: convert(given[name], float, f"--{name}")
        for name in ("gamma", "epsilon")
        if name in given
    }
    acting = {"acting": given["acting"]} if "acting" in given else {}
    methods = tuple(convert(given.get("method", ""), list[str], "--method"))
    fitted = numbers(given, "updates", "seed")

    import dovetail
    from dovetail import estimation

    tell = Telling("updates of fitted-Q evaluation")
    found = dovetail.estimate(
        given["dataset"],
        given["run"],
        methods,
        options=estimation.FittedQ(**fitted),
        tell=tell,
        **options,
        **acting,
    )
    tell.over()
    told = [_plain(vars(one)) for one in found]
    if "json" in given:
        print(json.dumps({"dataset": given["dataset"], "run": given["run"], "estimates": told}))
        return
    for one in found:
        count = one.effective_episodes
        weighed = f"  {count:,.1f} effective episodes" if count is not None else ""
        note = f"  ({one.note})" if one.note else ""
        band = f"{one.low:.4g} to {one.high:.4g}"
        print(f"{one.method:<6} {one.value:>9.4g}  95 % {band}{weighed}{note}")


def _out(given: Mapping[str, Any]) -> str:
    if "out" not in given:
        raise UserError("Name the folder of the new dataset with --out FOLDER.")
    return given["out"]


def _print_made(given: Mapping[str, Any], made: list[Any]) -> None:
    told = [
        {
            "dataset": str(one.folder),
            "episodes": one.metadata.episodes,
            "steps": one.metadata.steps,
            "dropped": one.dropped,
            "unread": one.unread,
        }
        for one in made
    ]
    if "json" in given:
        print(json.dumps(told[0] if len(told) == 1 else told))
        return
    for one in told:
        left = f"; {one['dropped']:,} were left out" if one["dropped"] else ""
        print(f"{one['dataset']} has {one['episodes']:,} episodes, {one['steps']:,} steps{left}.")
    if unread := told[0]["unread"]:
        print(f"Minari's own {', '.join(unread)} were left out: they are not read here.")


def _plain(told: Any) -> Any:
    """Replaces NaN and infinities, which JSON lacks, by None."""
    if isinstance(told, Mapping):
        return {name: _plain(value) for name, value in told.items()}
    if isinstance(told, list | tuple):
        return [_plain(value) for value in told]
    return None if isinstance(told, float) and not math.isfinite(told) else told


DOING = {
    "info": _info,
    "merge": _merge,
    "split": _split,
    "export": _export,
    "repair": _repair,
    "estimate": _estimate,
}
"""The function of each action."""
