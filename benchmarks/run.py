"""The one entry to every measurement: `python benchmarks/run.py [name …] [--repeats N] [--quick]`.

Contestants run in fresh processes, one at a time and in turn (ours, theirs, ours, theirs, …), so
that whatever the machine does meets both. Where its mood within a run would decide, both train side
by side and in short turns instead. A ratio is taken in each round, and its median counts.
Peers are installed on first use. Everything measured goes to benchmarks/results/ as JSON.
"""

import argparse
import json
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.comparisons import COMPARISONS, Comparison, Metric  # noqa: E402
from benchmarks.contestants import Contestant  # noqa: E402
from benchmarks.interpreters import interpreter  # noqa: E402
from benchmarks.protocol import READY  # noqa: E402

CHANNEL, PROCESSES = ["benchmarks.channel"], ["benchmarks.env_processes"]
REPLAY, GROWTH = ["benchmarks.replay"], ["benchmarks.replay_growth"]
SERVICE, DURABLE = ["benchmarks.replay_service"], ["benchmarks.replay_durable"]
SCRIPTS = {
    "parity": ("the hand-written PPO computes the same numbers", ["benchmarks.parity"]),
    "startup": ("seconds from the command to the first update", ["benchmarks.startup"]),
    "memory": ("resident memory of long runs (20 minutes)", ["benchmarks.memory"]),
    "links-channel": ("a small message between two threads, there and back", CHANNEL),
    "env-processes": ("environments in processes against Gymnasium's", PROCESSES),
    "central": ("how full acting's batches are under CentralInference", ["benchmarks.central"]),
    "telemetry": ("what measuring and scraping cost", ["benchmarks.telemetry"]),
    "replay": ("tables in one process against cpprb, flashbax and torchrl", REPLAY),
    "replay-service": ("a table in another process against dm-reverb", SERVICE),
    "replay-durable": ("what it costs that nothing acknowledged is lost", DURABLE),
    "replay-growth": ("prioritized sampling from 10 thousand to 10 million items", GROWTH),
    "products": ("what the products of a gradient step alone take", ["benchmarks.products"]),
    "cluster-costs": ("weights, start-up and 64 actors on Ray", ["benchmarks.cluster"]),
}
GIVE_UP = 3600.0
"""Seconds after which a contestant that does not answer counts as hung."""
ENDING = 60.0
"""Seconds in which one that gets no more turns has to end."""
TURNS = 20
"""Turns of each contestant for a round of whole runs."""
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
BUSY = 0.5
"""A load average above which other work on the machine would be measured too."""

Answer = dict[str, Any]


def main() -> int:
    options = parse()
    warn_if_busy()
    chosen = options.names
    results: dict[str, Any] = {"machine": machine(), "quick": options.quick}
    for comparison in COMPARISONS:
        if comparison.name in chosen:
            measured = compare(comparison, options.repeats, options.quick)
            show(comparison, measured)
            results[comparison.name] = measured
    for name, (title, command) in SCRIPTS.items():
        if name in chosen:
            print(f"\n{name}: {title}", flush=True)
            results[name] = run_script([*command, *(["--quick"] if options.quick else [])])
    path = save(results)
    print(f"\nEverything is in {path.relative_to(ROOT)}")
    return 0


def parse() -> argparse.Namespace:
    names = [*(c.name for c in COMPARISONS), *SCRIPTS]
    lines = [f"  {c.name:24}{c.title}" for c in COMPARISONS]
    lines += [f"  {name:24}{title}" for name, (title, _) in SCRIPTS.items()]
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="names:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="*", metavar="name", help="what to measure, or how its name begins; or all"
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each comparison")
    parser.add_argument("--quick", action="store_true", help="a fifth of the steps: only a look")
    options = parser.parse_args()
    found = [known for name in options.names for known in meant_by(name, names)]
    unknown = [name for name in options.names if not meant_by(name, names)]
    if unknown:
        parser.error(f"there is no {unknown[0]!r}: choose from {', '.join(names)}")
    options.names = found or names
    return options


def meant_by(name: str, names: list[str]) -> list[str]:
    """The measurement of that name, or all whose names begin with it: `atari` is `atari-…`."""
    return [name] if name in names else [known for known in names if known.startswith(f"{name}-")]


def warn_if_busy() -> None:
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load average {load:.2f}")
    if load > BUSY:
        print("Something else is running: these numbers will be noise. Stop it and start again.")


def compare(comparison: Comparison, repeats: int, quick: bool) -> dict[str, Any]:
    """Every contestant in turn, `repeats` times; twice as often where each round is a seed."""
    print(f"\n{comparison.name}: {comparison.title}", flush=True)
    contestants = [*comparison.ours, *comparison.others]
    answers: dict[str, list[Answer]] = {c.name: [] for c in contestants}
    for contestant in contestants:
        interpreter(contestant.python)  # installs before anything is timed
    if comparison.turn:
        rows = turns(contestants, comparison.turn, repeats * TURNS // (5 if quick else 1))
    else:
        count = 2 * repeats if comparison.threshold else repeats
        rows = runs(contestants, comparison.threshold, count, quick)
    for round_, name, answer in rows:
        answers[name].append(answer)
        if round_ % (10 if comparison.turn else 1) == 0:
            print(f"  round {round_ + 1:3}  {name:32} {line(answer)}", flush=True)
    verdicts = [
        verdict(comparison, answers, metric, target) for metric, target in comparison.metrics
    ]
    return {"title": comparison.title, "answers": answers, "verdicts": verdicts}


def runs(
    contestants: list[Contestant], threshold: bool, rounds: int, quick: bool
) -> Iterator[tuple[int, str, Answer]]:
    """(round, name, answer): each time a whole run."""
    for round_ in range(rounds):
        for contestant in contestants:
            yield round_, contestant.name, ask(contestant, threshold, round_, quick)


def turns(
    contestants: list[Contestant], steps: int, rounds: int
) -> Iterator[tuple[int, str, Answer]]:
    """(round, name, answer): all are started, one after another, and then take turns."""
    with ExitStack() as stack:
        live: dict[str, Live] = {}
        for contestant in contestants:
            words = [contestant.module, "--mode", "turns", "--total-steps", str(steps)]
            command = [str(interpreter(contestant.python)), "-m", *words, *contestant.arguments]
            live[contestant.name] = stack.enter_context(closing(Live(command)))
        for round_ in range(rounds):
            for name in sorted(live, reverse=round_ % 2 == 1):  # nobody is always the first
                yield round_, name, json.loads(live[name].turn())


def ask(contestant: Contestant, threshold: bool, round_: int, quick: bool) -> Answer:
    """One run in a process of its own; with a threshold each round has its own seed."""
    steps = contestant.steps if threshold or not quick else contestant.steps // 5
    command = [str(interpreter(contestant.python)), "-m", contestant.module]
    command += ["--mode", "threshold" if threshold else "speed", "--total-steps", str(steps)]
    command += ["--seed", str(round_ if threshold else 0), *contestant.arguments]
    return run_json(command)


class Live:
    """A contestant that waits for its turns."""

    def __init__(self, command: list[str], folder: Path = ROOT) -> None:
        """`folder`: whose files it runs."""
        self._command = " ".join(command)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        env = {**ENVIRONMENT, "PYTHONPATH": str(folder)}
        self._process = subprocess.Popen(
            command, cwd=folder, env=env, text=True, start_new_session=True, **pipes
        )
        while self._line() != READY:
            pass

    def turn(self) -> str:
        """The answer of its next turn."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        """Its next line, which nothing may have been read of before."""
        out = self._process.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], GIVE_UP)
        text = out.readline() if ready else ""
        if not text:
            self._errors.seek(0)
            raise SystemExit(f"{self._command} failed:\n{self._errors.read()[-2000:]}")
        return text.strip()

    def close(self) -> None:
        """No more turns: it ends by itself, or is killed with what it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(ENDING)
        except BaseException:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise


def run_json(command: list[str]) -> Answer:
    """Runs a command and reads the JSON object on its last line."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=GIVE_UP)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # what it started goes with it
            raise
    if process.returncode or not output.strip():
        raise SystemExit(f"{' '.join(command)} failed:\n{errors[-2000:]}")
    return json.loads(output.strip().splitlines()[-1])


def run_script(command: list[str]) -> Answer:
    """Runs one of the other measurements, which prints its own table and ends with JSON."""
    python = "ray" if command[0] == "benchmarks.cluster" else "dovetail"
    full = [str(interpreter(python)), "-m", *command]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        full, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        last = ""
        for text in process.stdout:
            if last:
                print(f"  {last}", flush=True)
            last = text.rstrip()
    if process.returncode:
        raise SystemExit(f"{' '.join(full)} failed.")
    return json.loads(last)


def line(answer: Answer) -> str:
    if "env_steps_to_threshold" not in answer:
        return f"{answer['steps_per_s']:12,.0f} steps/s"
    if answer["env_steps_to_threshold"] is None:
        return f"not reached in {answer['steps']:,} steps (return {answer['final_return']:.0f})"
    took = answer["time_to_threshold_s"]
    return f"seed {answer['seed']}: {answer['env_steps_to_threshold']:9,} steps, {took:7.2f} s"


def verdict(
    comparison: Comparison, answers: dict[str, list[Answer]], metric: Metric, target: float
) -> dict[str, Any]:
    """Our best variant against their best: the median of the rounds' ratios, or, for training to
    the threshold, the ratio of the medians over seeds."""
    more_is_better = metric == "steps_per_s"
    worst = 0.0 if more_is_better else float("inf")
    values = {
        name: [worst if a[metric] is None else a[metric] for a in rows]
        for name, rows in answers.items()
    }
    pick = max if more_is_better else min
    medians = {name: statistics.median(v) for name, v in values.items()}
    mine = pick((c.name for c in comparison.ours), key=medians.__getitem__)
    best = pick((c.name for c in comparison.others), key=medians.__getitem__)
    if comparison.threshold:
        ratio = medians[best] / medians[mine]
    else:
        ratio = statistics.median(a / b for a, b in zip(values[mine], values[best], strict=True))
    return {
        "metric": metric,
        "ours": mine,
        "theirs": best,
        "medians": medians,
        "ratio": ratio,
        "target": target,
        "met": ratio >= target,
    }


def show(comparison: Comparison, measured: dict[str, Any]) -> None:
    for found in measured["verdicts"]:
        print(f"  {found['metric']}, medians")
        for name, median in found["medians"].items():
            print(f"    {name:32} {median:14,.2f}")
        sign = "reached" if found["met"] else "MISSED"
        print(
            f"    {found['ours']} is {found['ratio']:.3f} × {found['theirs']}; "
            f"target {found['target']:g}: {sign}"
        )


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def save(results: dict[str, Any]) -> Path:
    folder = ROOT / "benchmarks" / "results"
    folder.mkdir(exist_ok=True)
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main())
