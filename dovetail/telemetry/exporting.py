"""Serves Prometheus metrics from a separate process, so that a scrape never waits for training.

A thread of the training process sends the counters at most once a second; the server process keeps
the latest and answers scrapes. It exits when its standard input closes, so that it never outlives
the training process.
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
"""Time limit for the server process to start listening."""
CLOSE_SECONDS = 5.0
"""Time limit for the server process to take the last message, and again to exit."""
LINGER = 15.0
"""Time limit for the server process to confirm that a scrape has seen a divergence."""

Tell = Callable[[str], None]


class ExporterProcess:
    """The training process's handle of the server process."""

    def __init__(
        self,
        host: str,
        port: int,
        info: Mapping[str, str],
        bound: int,
        nodes: Mapping[str, str],
        tell: Tell,
    ) -> None:
        """The arguments of `Exporter`; `tell` is called if the server process dies."""
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
            # The child finds the packages of this process, wherever these came from.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # a signal to the group of the training is for the training
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
        """Publishes the scalars of a report and the totals of all spans so far."""
        self._hand_over(self._published.after(row, timeline))

    def ended(self) -> None:
        """Publishes that training is over, while the run is being finished."""
        self._hand_over(dataclasses.replace(self._published, up=False))

    def diverged(self) -> None:
        """Publishes that training diverged; if the run is scraped, waits until a scrape saw it."""
        self._stop_work()
        self._send(_message(dataclasses.replace(self._published, up=False, diverged=True)))
        self._answer(LINGER)

    def close(self) -> None:
        """Stops the server process; safe to call twice."""
        self._stop_work()
        self._end()

    def _end(self) -> None:
        """Ends the server process, by force after 10 s."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):  # closing flushes, which fails if the process is gone
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_SECONDS)
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
        if self._thread is threading.current_thread():
            return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():  # it waits for a process that reads nothing
            self._process.kill()
            self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        """The sender thread: sends the latest counters, at most one message per `EVERY` seconds."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closing)
                # Only the latest counters: those before it are outdated.
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
        """The server process's next message; empty after `limit` seconds."""
        lines: list[str] = []
        assert self._process.stdout is not None
        # A pipe has no read timeout, so a thread reads.
        reader = threading.Thread(
            target=lambda out: lines.append(out.readline()),
            args=(self._process.stdout,),
            daemon=True,
        )
        reader.start()
        reader.join(limit)
        return json.loads(lines[0]) if lines and lines[0] else {}


def _message(published: Published) -> dict[str, Any]:
    """Converts to JSON, whose keys must be strings."""
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
    """Inverse of `_message`."""
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
    """The server process: serves until its standard input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends training, which closes our stdin
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
