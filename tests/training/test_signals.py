"""What a signal does depends on what was there before: start-up, training, an earlier signal."""

import signal
from collections.abc import Callable

import pytest

from dovetail.training import signals
from dovetail.training.signals import Stop, Stopped, stopping


def asked() -> tuple[Stop, list[str]]:
    """A request during training, and what it called."""
    calls: list[str] = []
    stop = Stop()
    stop.training(lambda: calls.append("stop"))
    return stop, calls


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_before_training_the_first_one_ends_the_start(number: signal.Signals) -> None:
    stop = Stop()
    with pytest.raises(Stopped, match="before training began") as ended:
        stop.ask(number)
    assert ended.value.code == 128 + number and stop


def test_one_that_was_swallowed_ends_training_as_it_begins() -> None:
    stop, calls = Stop(), list[str]()
    for number in (signal.SIGTERM, signal.SIGINT):  # the second is the first, sent again
        with pytest.raises(Stopped):
            stop.ask(number)
    stop.training(lambda: calls.append("stop"))
    assert calls == ["stop"] and stop.signal == signal.SIGTERM


def test_during_training_the_first_one_asks() -> None:
    stop, calls = asked()
    stop.ask(signal.SIGHUP)
    assert calls == ["stop"] and stop.signal == signal.SIGHUP
    with pytest.raises(KeyboardInterrupt):
        stop.ask(signal.SIGINT)


def test_a_signal_that_timeout_sends_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, calls = asked()
    stop.ask(signal.SIGTERM)
    stop.ask(signal.SIGTERM)
    assert calls == ["stop"]
    monkeypatch.setattr(signals, "APART_SECONDS", -1.0)
    with pytest.raises(KeyboardInterrupt):
        stop.ask(signal.SIGTERM)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_nohup_ignores_stays_ignored(handler: Callable[..., None] | signal.Handlers) -> None:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with stopping():
            ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert ignored == (handler is signal.SIG_IGN)
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)
