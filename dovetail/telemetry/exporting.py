"""Metrics for Prometheus from a process of their own: a scrape never waits for a busy training.

The training hands over what it counted at most once a second, from a thread of its own; the other
process keeps the last of it and answers. It ends when its standard input does, so it never outlives
the training.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from dovetail.errors import UserError
from dovetail.telemetry.prometheus import Exporter, PortTaken, Published, PublishedTotals
from dovetail.telemetry.timeline import Timeline

EVERY = 1.0
"""Seconds between two messages."""
START_SECONDS = 60.0
"""How long the other process may take to listen."""
LINGER = 15.0
"""How long a run that diverged waits for the other process, which waits for a scrape."""

Tell = Callable[[str], None]


class ExporterProcess:
    """The training's end."""

    def __init__(
        self,
        host: str,
        port: int,
        info: Mapping[str, str],
        bound: int,
        nodes: Mapping[str, str],
        tell: Tell,
    ) -> None:
        """The arguments of `Exporter`; `tell` hears if the other process dies."""
        self._tell = tell
        self._published = Published()
        self._changed = threading.Condition()
        self._waiting: Published | None = None
        self._closing = False
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._send({"host": host, "port": port, "info": info, "bound": bound, "nodes": nodes})
        answer = self._answer(START_SECONDS)
        if "url" not in answer:
            self._end()
            kind = PortTaken if answer.get("taken") else UserError
            raise kind(answer.get("error", "The process that serves --metrics-port did not start."))
        self.url: str = answer["url"]
        self._thread = threading.Thread(target=self._work, name="dovetail-exporter", daemon=True)
        self._thread.start()

    def publish(self, row: Mapping[str, float], timeline: Timeline) -> None:
        """Takes the scalars of a report, and what all spans so far come to."""
        self._hand_over(self._published.after(row, timeline))

    def ended(self) -> None:
        """Shows that training is over, while the run is being finished."""
        self._hand_over(dataclasses.replace(self._published, up=False))

    def diverged(self) -> None:
        """Shows that training diverged; where somebody scrapes, until it was seen."""
        self._stop_work()
        self._send(_message(dataclasses.replace(self._published, up=False, diverged=True)))
        self._answer(LINGER)

    def close(self) -> None:
        """Ends the other process; safe to call twice."""
        self._stop_work()
        self._end()

    def _end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):  # what was not sent has nobody to go to
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _hand_over(self, published: Published) -> None:
        self._published = published
        with self._changed:
            self._waiting = published
            self._changed.notify()

    def _stop_work(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        """The thread: sends the last that was handed over, and then nothing for a while."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closing)
                published, self._waiting = self._waiting, None
            if published is None:
                return
            if not self._send(_message(published)):
                self._tell("The process that serves --metrics-port died: nobody can scrape now.")
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closing, EVERY)

    def _send(self, message: Mapping[str, Any]) -> bool:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            return False
        return True

    def _answer(self, limit: float) -> dict[str, Any]:
        """The other process' next word, within a limit."""
        lines: list[str] = []
        assert self._process.stdout is not None
        reader = threading.Thread(
            target=lambda out: lines.append(out.readline()),
            args=(self._process.stdout,),
            daemon=True,
        )
        reader.start()
        reader.join(limit)
        return json.loads(lines[0]) if lines and lines[0] else {}


def _message(published: Published) -> dict[str, Any]:
    """As JSON can tell it: keys are words."""
    totals = [
        [*key, *sums[:4], list(sums.buckets.items())] for key, sums in published.totals.items()
    ]
    return {
        "scalars": {name: float(value) for name, value in published.scalars.items()},
        "totals": totals,
        "staleness": list(published.staleness.items()),
        "dropped_spans": published.dropped_spans,
        "reported": published.reported,
        "up": published.up,
        "diverged": published.diverged,
    }


def _published(message: Mapping[str, Any]) -> Published:
    totals = {
        (worker, kind, name): PublishedTotals(
            calls, seconds, nbytes, items, dict(map(tuple, buckets))
        )
        for worker, kind, name, calls, seconds, nbytes, items, buckets in message["totals"]
    }
    plain: dict[str, Any] = dict(message)
    plain["totals"], plain["staleness"] = totals, dict(map(tuple, message["staleness"]))
    return Published(**plain)


def main() -> None:
    """The other process: serves until its standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training ends by it, and then this
    first = json.loads(sys.stdin.readline())
    try:
        exporter = Exporter(
            first["host"], first["port"], first["info"], first["bound"], first["nodes"]
        )
    except UserError as error:
        _say({"error": str(error), "taken": isinstance(error, PortTaken)})
        return
    _say({"url": exporter.url})
    for line in sys.stdin:
        published = _published(json.loads(line))
        exporter.show(published)
        if published.diverged:
            exporter.linger()
            _say({"seen": time.time()})
    exporter.close()


def _say(word: Mapping[str, Any]) -> None:
    print(json.dumps(word), flush=True)
