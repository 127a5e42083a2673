"""What measuring costs: steps per second with telemetry and without, scrapes, and memory.

    python -m benchmarks.telemetry [--repeats N] [--quick]

Each training is a process of its own. With and without take turns, and change who is first from
round to round; a ratio is taken in each round, and its median counts. Without, nothing is noted,
added up or written. Scrapes come from this process, every second, at a run with 64 actors. Memory
is that of the spans of an hour, made up at the rate that was measured.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

TARGET, SCRAPED_TARGET, ANSWER_MS, MEMORY_MB = 0.98, 0.99, 50.0, 32.0
ROOT = Path(__file__).resolve().parent.parent
STEPS = {"fused": 8_000_000, "local": 400_000, "actor-learner": 400_000, "64 actors": 100_000}
HOUR = 3600.0


def train(case: str, steps: int, measured: bool, folder: str) -> None:
    """One training, in a process of its own; ends with JSON."""
    import dovetail
    from dovetail.algorithms import IMPALA, PPO
    from dovetail.strategies import ActorLearner, Fused, Local
    from dovetail.telemetry.spans import Track
    from dovetail.telemetry.status import Status
    from dovetail.telemetry.timeline import Timeline

    if not measured:
        for kind, name in ((Track, "add"), (Timeline, "add"), (Timeline, "write")):
            setattr(kind, name, lambda *_, **__: None)
        setattr(Status, "_work", lambda _: None)  # noqa: B010
    host, jax = "gymnasium:CartPole-v1", "dovetail:CartPole-v1"
    cases: dict[str, tuple[Any, str, Any]] = {
        "fused": (PPO(num_envs=256), jax, Fused()),
        "local": (PPO(num_envs=16), host, Local()),
        "actor-learner": (IMPALA(num_envs=16), host, ActorLearner(actors=2, processes=False)),
        "64 actors": (IMPALA(num_envs=128), host, ActorLearner(actors=64, processes=False)),
    }
    settings = dovetail.Settings(
        folder=folder,
        episodes=1,
        evaluate_every=0,
        checkpoint_every=1e9,
        video=False,
        display="plain" if case == "64 actors" else "none",
        metrics_port=0 if case == "64 actors" else None,
    )
    run = dovetail.train(*cases[case], total_steps=steps, settings=settings)
    spans = seconds = 0.0
    if measured:
        workers = dovetail.analyze(run).measured["workers"]
        seconds = max(of["wall_s"] for of in workers.values())
        kinds = [of[kind] for of in workers.values() for kind in of if kind != "wall_s"]
        spans = sum(totals["spans"] for kind in kinds for totals in kind.values())
    rate = spans / seconds if seconds else 0.0
    print(json.dumps({"steps_per_s": run.summary["steps_per_s"], "spans_per_s": rate}))


def start(case: str, steps: int, measured: bool, folder: Path) -> subprocess.Popen[str]:
    words = ["--case", case, "--total-steps", str(steps), "--folder", str(folder)]
    words += [] if measured else ["--without"]
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.telemetry", *words],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if case == "64 actors" else None,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> dict[str, float]:
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit("A training failed.")
    return json.loads(output.strip().splitlines()[-1])


def trained(case: str, steps: int, measured: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return answer(start(case, steps, measured, Path(folder) / "run"))


def scraped(steps: int, scrapes: bool) -> tuple[dict[str, float], list[float]]:
    """A run with 64 actors, and the milliseconds that each scrape of it took."""
    took: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        process = start("64 actors", steps, True, Path(folder) / "run")
        assert process.stderr is not None
        url = ""
        while not url and (line := process.stderr.readline()):
            found = re.search(r"http://\S+/metrics", line)
            url = found[0] if found else ""
        while scrapes and process.poll() is None:
            began = time.perf_counter()
            try:
                with urllib.request.urlopen(url, timeout=10) as page:
                    text = page.read()
            except OSError:  # it has just ended
                break
            if b"dovetail_up 0.0" in text:  # it is being finished
                break
            took.append(1e3 * (time.perf_counter() - began))
            time.sleep(1.0)
        return answer(process), took


def compare(one: Any, other: Any, repeats: int) -> tuple[float, list[Any], list[Any]]:
    """The median over rounds of what `one` does per what `other` does."""
    ones: list[Any] = []
    others: list[Any] = []
    for i in range(repeats):
        for make, kept in ((one, ones), (other, others))[:: -1 if i % 2 else 1]:
            kept.append(make())
    speeds = [(_speed(a), _speed(b)) for a, b in zip(ones, others, strict=True)]
    return statistics.median(a / b for a, b in speeds), ones, others


def _speed(found: Any) -> float:
    return (found[0] if isinstance(found, tuple) else found)["steps_per_s"]


def hour_of_spans(spans_per_s: float) -> dict[str, float]:
    """What an hour of spans takes in a process of its own: of memory, for buffers, totals and the
    window, and of a processor's time."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.telemetry", "--hour", str(spans_per_s)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout)


def hour(spans_per_s: float) -> None:
    from benchmarks.memory import resident_megabytes
    from dovetail.telemetry.spans import COMPUTE, LIMIT, LINK, WAIT, Track
    from dovetail.telemetry.timeline import Timeline

    timeline, track = Timeline(), Track("actor-0")
    before, began = resident_megabytes(os.getpid()), time.process_time()
    total, report = int(HOUR * spans_per_s), max(1, int(spans_per_s / 4))
    for i in range(total):
        kind = (COMPUTE, WAIT, LINK)[i % 3]
        track.add(kind, f"{kind}-{i % 4}", i * 1e-3, 1e-6 * (i % 9999), 1, i, 1, i, i % 3)
        if i % report == 0:
            timeline.add({f"actor-{i % 64}": track.drain()})
    seconds = time.process_time() - began
    for i in range(LIMIT):  # and a buffer that nobody drains
        track.add(COMPUTE, "late", float(i), 1e-6, 1, i, 1, i, 0)
    timeline.to_json()
    megabytes = resident_megabytes(os.getpid()) - before
    print(json.dumps({"megabytes": megabytes, "us_per_span": 1e6 * seconds / total}))


def verdict(name: str, value: str, met: bool) -> None:
    print(f"{name:28} {value}: {'reached' if met else 'MISSED'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case", choices=tuple(STEPS))
    parser.add_argument("--total-steps", type=int, default=0)
    parser.add_argument("--folder", default="")
    parser.add_argument("--without", action="store_true")
    parser.add_argument("--hour", type=float)
    options = parser.parse_args()
    if options.case:
        train(options.case, options.total_steps, not options.without, options.folder)
        return
    if options.hour is not None:
        hour(options.hour)
        return
    repeats = 2 if options.quick else options.repeats
    found: dict[str, Any] = {}
    rates = [100.0]
    for case in ("fused", "local", "actor-learner"):
        steps = STEPS[case] // (10 if options.quick else 1)
        ratio, ones, others = compare(
            lambda case=case, steps=steps: trained(case, steps, True),
            lambda case=case, steps=steps: trained(case, steps, False),
            repeats,
        )
        rates += [one["spans_per_s"] for one in ones]
        found[case] = {"ratio": ratio, "with": ones, "without": others, "target": TARGET}
        verdict(case, f"{ratio:.3f} of the speed without; target {TARGET}", ratio >= TARGET)
    steps = STEPS["64 actors"] // (4 if options.quick else 1)
    ratio, ones, others = compare(
        lambda: scraped(steps, True), lambda: scraped(steps, False), repeats
    )
    took = [ms for _, each in ones for ms in each[1:]] or [each[0] for _, each in ones]
    slowest = max(took)
    found["scraped"] = {"ratio": ratio, "with": ones, "without": others, "slowest_ms": slowest}
    verdict("64 actors, scraped", f"{ratio:.3f}; target {SCRAPED_TARGET}", ratio >= SCRAPED_TARGET)
    told = f"{statistics.median(took):.1f} ms, at most {slowest:.1f}; target {ANSWER_MS:g}"
    verdict("a scrape's answer", told, slowest < ANSWER_MS)
    rates += [one["spans_per_s"] for one, _ in ones]
    taken = hour_of_spans(max(rates))
    found["hour"] = {**taken, "spans_per_s": max(rates), "target": MEMORY_MB}
    told = f"{taken['megabytes']:.1f} MB at {max(rates):,.0f} spans/s; target {MEMORY_MB:g}"
    verdict("spans of an hour", told, taken["megabytes"] <= MEMORY_MB)
    busy = 1e-6 * taken["us_per_span"] * max(rates)
    told = f"{taken['us_per_span']:.2f} µs each, {busy:.2%} of a processor; target {1 - TARGET:.0%}"
    verdict("spans by processor time", told, busy <= 1 - TARGET)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
