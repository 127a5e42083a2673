"""A carry stays on its device from one step to the next, in the same memory, and only slots whose
episode begins are reset."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import Decoder
from small import Started
from toys import Drift, leaves_close

from dovetail.graph.unroll import masked_reset, slot_reset
from dovetail.runtime.batched_unroll import ActBatch
from dovetail.runtime.host_unroll import OwnEnvironments
from dovetail.strategies import CentralInference, Local

WAYS: dict[str, tuple[Any, type]] = {
    "at hand": (Local(), OwnEnvironments),
    "on other workers": (CentralInference(workers=2, batch=2), ActBatch),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_acting_takes_the_carry_and_gives_it_back_in_place(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, kind = WAYS[way]
    act, used = kind.act, list[tuple[bool, bool]]()

    def watched(self: Any, *args: Any) -> Any:
        before = jax.tree.leaves(self._turns.carry)
        found = act(self, *args)
        if found is not False:
            after = jax.tree.leaves(self._turns.carry)
            on_device = all(isinstance(leaf, jax.Array) for leaf in (*before, *after))
            used.append((on_device, all(leaf.is_deleted() for leaf in before)))
        return found

    monkeypatch.setattr(kind, "act", watched)
    with Started(Decoder(num_envs=4), Drift(), strategy) as running:
        running.advance(2)
    assert len(used) >= 6
    assert set(used) == {(True, True)}


@pytest.mark.parametrize("way", list(WAYS))
def test_what_an_unroll_begins_with_can_still_be_read(way: str) -> None:
    """It was reported, and an unroll that fails is run again with it."""
    with Started(Decoder(num_envs=4), Drift(), WAYS[way][0]) as running:
        reported = running.advance(1).actor().carry
        before = jax.tree.map(np.array, reported)
        running.advance(2)
        leaves_close(jax.tree.map(np.asarray, reported), before)
        assert isinstance(reported["cache"], jax.Array)


def test_the_two_ways_to_reset_write_the_same_slots() -> None:
    initial = {"a": jnp.arange(3.0), "b": jnp.int32(7)}
    carry = {"a": jnp.full((4, 3), 9.0), "b": jnp.arange(4, dtype=jnp.int32)}
    for first in ([0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]):
        flags = jnp.array(first, bool)
        found = jax.jit(slot_reset(initial))(carry, flags)
        leaves_close(found, masked_reset(initial)(carry, flags))
        assert found["b"].tolist() == [7 if one else i for i, one in enumerate(first)]
