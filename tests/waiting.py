"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable
from typing import Any


def eventually(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What it gives once that is true; fails after the limit."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)
    return found
