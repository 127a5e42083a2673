"""The process that serves metrics never keeps a training from ending."""

import os
import signal
import time

import pytest

from dovetail.telemetry import exporting
from dovetail.telemetry.exporting import ExporterProcess
from dovetail.telemetry.timeline import Timeline


def test_a_frozen_process_that_reads_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "CLOSE_SECONDS", 0.3)
    # More than a pipe holds: the sender is stuck.
    monkeypatch.setattr(exporting, "_message", lambda published: {"x": "y" * 1_000_000})
    exporter = ExporterProcess("127.0.0.1", 0, {}, 0, {}, lambda _: None)
    process = exporter._process
    os.kill(process.pid, signal.SIGSTOP)
    exporter.publish({}, Timeline())
    time.sleep(0.2)
    assert exporter._thread.is_alive()
    exporter.close()
    assert process.poll() == -signal.SIGKILL
    assert not exporter._thread.is_alive()
