"""Two revisions of Dovetail in turns: what a change to the runtime costs or brings.

    python benchmarks/revisions.py cfb03f2 [name …] [--after HEAD] [--rounds 3] [--json FILE]

Each revision is checked out into a folder of its own and runs its own benchmarks, with the names
that options had then, in this virtual environment, whose packages must be those of both. Trainings
of both revisions stand side by side and take short turns, TURNS in a round; tables and Ape-X run in
whole, one after the other. Who is first alternates. The median of the ratios counts.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.run import ENVIRONMENT, Live  # noqa: E402

OF_A_COMPARISON = """
import json, sys
from benchmarks.comparisons import COMPARISONS
chosen = next(c for c in COMPARISONS if c.name == sys.argv[1]).ours[0]
print(json.dumps([chosen.module, "--mode", "turns", sys.argv[2], sys.argv[3], *chosen.arguments]))
"""
"""Prints the arguments of a comparison's first contestant, as that revision names them."""

COMPARED = {
    "fused-64": 400_000,
    "local-8": 40_000,
    "links-threads": 400_000,
    "cluster-impala": 200_000,
    "dqn-sbx": 2_000,
}
"""Comparisons of `run.py` whose own side is run, and the steps of a turn: about a second."""
TURNS = 10
"""Turns of each revision in a round."""
REPLAYS = ("replay", "replay-prioritized", "replay-service", "replay-service-prioritized")
WORK = (*COMPARED, *REPLAYS, "apex")


def main() -> int:
    """Runs the chosen work under both revisions in turns and prints the ratios."""
    options = parse()
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        trees = {
            revision: stack.enter_context(checked_out(revision))
            for revision in (options.before, options.after)
        }
        for name in options.names or WORK:
            print(f"\n{name}", flush=True)
            results[name] = compare(name, trees, options.rounds)
    print("\n" + json.dumps(results))
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", help="the revision to compare with")
    parser.add_argument("names", nargs="*", choices=[*WORK, []], metavar="name", help="or all")
    parser.add_argument("--after", default="HEAD", help="the revision that is judged")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each revision")
    parser.add_argument("--json", help="a file for the results")
    return parser.parse_args()


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """A folder with that revision's files."""
    with tempfile.TemporaryDirectory(prefix="dovetail-revision-") as folder:
        tree = Path(folder) / revision
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def compare(name: str, trees: dict[str, Path], rounds: int) -> dict[str, Any]:
    """The speeds of both revisions, by what is measured, and the median ratio of the rounds."""
    speeds: dict[str, dict[str, list[float]]] = {}
    for revision, answer in answers(name, trees, rounds):
        for key in ("steps_per_s", "inserts_per_s", "samples_per_s"):
            if key in answer:
                speeds.setdefault(key, {}).setdefault(revision, []).append(answer[key])
    before, after = trees
    found: dict[str, Any] = {}
    for key, by_revision in speeds.items():
        pairs = zip(by_revision[after], by_revision[before], strict=True)
        ratios = [new / old for new, old in pairs]
        found[key] = {**by_revision, "ratios": ratios, "ratio": statistics.median(ratios)}
        medians = [statistics.median(by_revision[revision]) for revision in (before, after)]
        print(
            f"  {key:16} {medians[0]:14,.0f} {medians[1]:14,.0f}   ratio {found[key]['ratio']:.3f}"
            f"   (of {len(ratios)}: {min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )
    return found


def answers(name: str, trees: dict[str, Path], rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(revision, what it printed): whole runs, or turns of two trainings side by side."""
    commands = {revision: command(name, tree) for revision, tree in trees.items()}
    if name not in COMPARED:
        for round_ in range(rounds):
            for revision in sorted(trees, reverse=round_ % 2 == 1):
                said = run(commands[revision], trees[revision])
                yield revision, json.loads(said.splitlines()[-1])
        return
    with ExitStack() as stack:
        live = {
            revision: stack.enter_context(
                closing(Live([sys.executable, *commands[revision]], trees[revision]))
            )
            for revision in trees
        }
        for round_ in range(rounds * TURNS):
            for revision in sorted(live, reverse=round_ % 2 == 1):
                yield revision, json.loads(live[revision].turn())


def command(name: str, tree: Path) -> list[str]:
    """The arguments of Python for that work, in the words of that revision."""
    renamed = (tree / "dovetail" / "strategies").is_dir()
    if name == "apex":
        return ["-c", apex(renamed)]
    if name in COMPARED:
        steps = "--total-steps" if renamed else "--steps"
        said = run(["-c", OF_A_COMPARISON, name, steps, str(COMPARED[name])], tree)
        return ["-m", *json.loads(said)]
    kind, prioritized, _ = name.partition("-prioritized")
    module = {"replay": "replay_ours", "replay-service": "replay_service_ours"}[kind]
    flags = ["--prioritized" if renamed else "--prioritised"] if prioritized else []
    return ["-m", f"benchmarks.{module}", *flags]


def apex(renamed: bool) -> str:
    """Ape-X with four actors and two shards of the replay, steps per second of a whole run."""
    where = "strategy=dt.strategies" if renamed else "policy=dt.policies"
    steps = "total_steps" if renamed else "steps"
    return (
        "import json, tempfile, dovetail as dt\n"
        "with tempfile.TemporaryDirectory() as runs:\n"
        "    quietly = dict(folder=runs + '/run', display='none', video=False, episodes=1)\n"
        "    run = dt.train(dt.algorithms.ApeX(), env='CartPole-v1',\n"
        "        settings=dt.Settings(**quietly),\n"
        f"        {where}.ActorLearner(actors=4, shards=2), {steps}=60_000)\n"
        "    print(json.dumps({'steps_per_s': run.summary['steps_per_s']}))\n"
    )


def run(arguments: list[str], tree: Path) -> str:
    """What Python prints with these arguments in that tree."""
    env = {**ENVIRONMENT, "PYTHONPATH": str(tree)}
    made = subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=env, capture_output=True, text=True
    )
    if made.returncode:
        raise SystemExit(f"{' '.join(arguments)} in {tree.name} failed:\n{made.stderr[-3000:]}")
    return made.stdout


if __name__ == "__main__":
    sys.exit(main())
