"""Processes that are slow, frozen or gone: how long a run waits for them, and when it does not."""

import threading
import time
from typing import Any

import pytest

from dovetail.errors import UserError
from dovetail.hosts import interface
from dovetail.hosts.interface import Processes, Pulse, Supervised
from dovetail.runtime.channel import Closed
from dovetail.runtime.remote import WorkerLost


class Pretended:
    """A process that is set up or not, and answers or not."""

    def __init__(self, there: bool) -> None:
        self.there, self.answers, self.killed = there, True, False

    def get(self, limit: float | None = None) -> Any:
        """The result of `set_up`."""
        if self.there:
            return "a node"
        time.sleep(0.01)
        raise TimeoutError

    def set_up(self) -> "Pretended":
        return self

    def pulse(self, worker: str) -> Pulse:
        """It has always made progress, if it answers."""
        if not self.answers:
            raise TimeoutError
        return Pulse(0.0, True, "")

    def awaited(self) -> str:
        return "1 CPU"

    def kill(self) -> None:
        self.killed = True


class Endless:
    """A call that never ends."""

    def get(self, limit: float | None = None) -> Any:
        time.sleep(0.01)
        raise TimeoutError


class PretendedHost:
    """Starts processes that are there at once; those that replace another never are."""

    def start(self, name: str, again: bool) -> Any:
        return Pretended(there=not again)


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PLACE_SECONDS", 0.1)
    monkeypatch.setattr(interface, "COMPILE_SECONDS", 0.1)
    monkeypatch.setattr(interface, "STOP_SECONDS", 0.1)


def started(alike: tuple[str, ...]) -> tuple[Processes, Supervised, Supervised]:
    """Two processes that are up."""
    host: Any = PretendedHost()
    groups = {"actor-0": ("actor-0",), "actor-1": ("actor-1",)}
    processes = Processes(host, groups, 0.05, lambda _: None, alike=alike)
    first, second = processes._supervised.values()
    for one in (first, second):
        one.wait_until_there(*one.started(), lambda _: None)
    return processes, first, second


def test_a_lost_process_is_waited_for_as_long_as_another_trains() -> None:
    processes, first, _ = started(("actor-0", "actor-1"))
    first.kill(first.process)
    threading.Timer(0.4, processes.stop).start()
    with pytest.raises(Closed):  # not UserError, after 0.1 s
        first.wait_until_there(*first.started(), lambda _: None)


@pytest.mark.parametrize("alike", [(), ("actor-0", "actor-1")])
def test_without_another_the_wait_has_a_limit(alike: tuple[str, ...]) -> None:
    _, first, second = started(alike)
    if alike:
        second.kill(second.process)
    first.kill(first.process)
    with pytest.raises(UserError, match="actor-0 has waited .* for 1 CPU"):
        first.wait_until_there(*first.started(), lambda _: None)


def test_a_frozen_process_is_ended_after_the_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "COMPILE_SECONDS", 1000.0)
    _, first, _ = started(())
    process: Any = first.process
    threading.Timer(0.1, lambda: setattr(process, "answers", False)).start()
    with pytest.raises(WorkerLost, match="actor-0 on a node hangs, and is ended: It does not"):
        first.wait(process, Endless(), "actor-0", lambda: None)
    assert process.killed


def test_a_process_that_still_compiles_is_ended_soon_after_a_request_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interface, "COMPILE_SECONDS", 1000.0)
    processes, first, _ = started(())
    process: Any = first.process
    process.answers = False
    threading.Timer(0.1, processes.hurry).start()
    with pytest.raises(WorkerLost):
        first.wait(process, Endless(), "actor-0", lambda: None)
