"""The rate limiter counts; the service waits, and says why it does."""

import threading
import time
from typing import Any

import numpy as np
import pytest

from dovetail.errors import UserError
from dovetail.replay import HostTable, RateLimiter, ReplayService, Table
from dovetail.replay.service import service as service_module

ROW = {"observation": np.zeros((), np.int32)}


def rows(count: int, value: int = 0) -> dict[str, Any]:
    return {"observation": np.full((count, 1), value, np.int32)}


def made(limiter: RateLimiter | None = None, envs: int = 1, timeout: float = 5.0) -> ReplayService:
    return ReplayService(HostTable(Table(capacity=100), ROW, envs), limiter, timeout)


def test_the_minimum_comes_first() -> None:
    limiter = RateLimiter(min_size=10)
    assert limiter.may_insert(1000) and not limiter.may_sample(1)
    limiter.insert(9)
    assert not limiter.may_sample(1)
    assert limiter.explain(1, 4) == (
        "sampling waits for 10 items, of which 9 are inserted; inserting 1 may go on."
    )
    limiter.insert(1)
    assert limiter.may_sample(1000)


def test_either_side_waits_when_it_is_ahead() -> None:
    limiter = RateLimiter(min_size=10, samples_per_insert=4, tolerance=8)
    assert limiter.may_insert(10) and limiter.may_insert(12) and not limiter.may_insert(13)
    limiter.insert(10)
    assert limiter.may_sample(8) and not limiter.may_sample(9)
    assert limiter.may_insert(2) and not limiter.may_insert(3)
    limiter.sample(8)
    assert not limiter.may_sample(1) and limiter.may_insert(4) and not limiter.may_insert(5)
    assert limiter.explain(5, 6) == (
        "sampling 6 waits for 2 more items to be inserted; "
        "inserting 5 waits for 4 more items to be sampled."
    )
    limiter.insert(2)
    assert limiter.may_sample(8)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"min_size": 0}, "min_size is 0"),
        ({"samples_per_insert": 0.0}, "samples_per_insert is 0.0"),
        ({"samples_per_insert": 4.0, "tolerance": 3.0}, "give at least 4"),
    ],
)
def test_limits_that_cannot_be(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        RateLimiter(**options)


def test_threads_keep_in_step() -> None:
    """Two inserters and two samplers, far apart in speed, end within the tolerance."""
    limiter = RateLimiter(min_size=20, samples_per_insert=2, tolerance=20)
    service = made(limiter, envs=2)
    failures: list[BaseException] = []

    def insert(env: int) -> None:
        with service.inserting():
            for value in range(100):
                service.insert(rows(1, value), envs=(env, env + 1))

    def sample() -> None:
        for _ in range(43):
            service.sample(np.array([0.1, 0.5, 0.7, 0.9]))

    def guarded(work: Any, *arguments: int) -> None:
        try:
            work(*arguments)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(insert, env)) for env in (0, 1)]
    threads += [threading.Thread(target=guarded, args=(sample,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not failures
    assert (limiter.inserted, limiter.sampled) == (198, 344)
    assert abs(limiter.ahead) <= limiter.tolerance


def test_a_wait_ends_and_says_what_for() -> None:
    service = made(RateLimiter(min_size=5), timeout=0.05)
    service.insert(rows(3))
    with pytest.raises(UserError, match="waited 0.05 s to sample 4 items: sampling waits for 5"):
        service.sample(np.zeros(4))


def test_nobody_is_left_to_insert() -> None:
    service = made(RateLimiter(min_size=5))
    found: list[str] = []

    def sample() -> None:
        try:
            service.sample(np.zeros(1))
        except UserError as error:
            found.append(str(error))

    waiting = threading.Thread(target=sample)
    with service.inserting():
        waiting.start()
        service.insert(rows(3))
    waiting.join(5)
    assert found == [
        "Replay has nobody left to insert: sampling waits for 5 items, of which 2 are inserted; "
        "inserting 1 may go on."
    ]


def test_two_sides_that_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "PATIENCE", 0.1)
    service = made(RateLimiter(min_size=1, samples_per_insert=1, tolerance=4), timeout=20)
    service.insert(rows(2))
    found: list[str] = []

    def insert() -> None:
        try:
            service.insert(rows(50))
        except UserError as error:
            found.append(str(error))

    inserting = threading.Thread(target=insert)
    inserting.start()
    with pytest.raises(UserError, match="stands still, as each side waits for the other: sampling"):
        service.sample(np.zeros(60))
    inserting.join(5)
    (sentence,) = found
    assert sentence == (
        "Replay stands still, as each side waits for the other: sampling 60 waits for 56 more "
        "items to be inserted; inserting 50 waits for 46 more items to be sampled. Give the "
        "limiter a larger tolerance, or insert and sample fewer items at a time."
    )


def test_closing_ends_every_wait() -> None:
    service = made()
    found: list[str] = []

    def sample() -> None:
        try:
            service.sample(np.zeros(1))
        except UserError as error:
            found.append(str(error))

    waiting = threading.Thread(target=sample)
    waiting.start()
    time.sleep(0.05)
    service.close()
    waiting.join(5)
    assert found == ["The replay service has been closed: make a new one to go on."]
    with pytest.raises(UserError, match="has been closed"):
        service.insert(rows(1))
