"""One cluster for the tests that leave it as it was."""

from collections.abc import Iterator

import pytest
from nodes import Nodes


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """Three nodes of two CPUs each."""
    made = Nodes()
    yield made
    made.close()


@pytest.fixture
def optimized_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Three nodes of their own, with programs as fast as users have them."""
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
    made = Nodes()
    yield made
    made.close()
