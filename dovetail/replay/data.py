"""Recorded steps on the device: drawn from by a learner, and never added to.

They are a part of the learner's state while it runs, on its side and not on a replay's, since
nobody else writes to them; each learner replica draws its part of a batch from all of them. What
they hold is given by whoever runs the loop: `init` only says how much room there is, and
checkpoints leave them out.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.replay.sample import ItemKeys, Sample


@dataclass(frozen=True)
class DataSpec:
    """How many recorded steps there are, and how much room they take."""

    steps: int
    """Steps of the dataset."""
    held: int
    """The most steps on the device at once: as many, or fewer if the dataset is read in parts."""
    rows: int
    """The most rows on the device at once: steps, and a row behind the last of each episode."""

    def empty(self, example: Any, window: int) -> "Data":
        """Room for steps with rows like `example`, of which items have `window`."""
        rows = jax.tree.map(lambda x: jnp.zeros((self.rows, *x.shape), x.dtype), example)
        numbers = jnp.zeros(self.held, jnp.int32)
        return Data(rows, numbers, numbers, jnp.zeros((), jnp.int32), window)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Data:
    """Recorded steps, numbered through."""

    rows: Any
    """[rows, …], the row behind an episode's last step included."""
    begins: Any
    """[steps]: the row of each."""
    left: Any
    """[steps]: how many there are from it to the end of its episode, itself included."""
    size: Any
    """How many steps there are; what is behind them has no meaning."""
    window: int = field(metadata={"static": True})
    """Steps of an item, cut where its episode ends, as those of `Transitions(window)`."""

    def sample(self, draws: jax.Array) -> Sample:
        """Batches of items for draws [K, n], whole random numbers (uint32): arrays [K, n, …]."""
        chosen = (draws % self.size.astype(jnp.uint32)).astype(jnp.int32)
        within = jnp.arange(self.window + 1)
        left = self.left[chosen][..., None]
        index = self.begins[chosen][..., None] + jnp.minimum(within, left)
        each = jnp.ones(draws.shape, jnp.float32)
        return Sample(
            rows=jax.tree.map(lambda x: x[index], self.rows),
            mask=within < jnp.minimum(left, self.window),
            keys=ItemKeys(slot=chosen, number=jnp.zeros_like(chosen)),
            probabilities=each / self.size,
            size=jnp.broadcast_to(self.size, draws.shape),
            times=jnp.zeros_like(chosen),
        )


def is_data(part: Any) -> bool:
    """Whether a part of a learner's state are recorded steps."""
    return isinstance(part, Data)


def without_data(state: Any) -> Any:
    """A learner's state without the arrays of its recorded steps; where they were stays known."""

    def left_out(part: Any) -> Any:
        if not isinstance(part, Data):
            return part
        return replace(part, rows=None, begins=None, left=None, size=None)

    return jax.tree.map(left_out, state, is_leaf=is_data)


def with_data(state: Any, data: Data | None) -> Any:
    """A learner's state with these recorded steps where it has such."""
    return jax.tree.map(lambda part: data if is_data(part) else part, state, is_leaf=is_data)


def data_leaves(state: Any) -> tuple[int, ...]:
    """The positions among a state's leaves of those of recorded steps."""
    parts = jax.tree.leaves(state, is_leaf=is_data)
    owned = [is_data(part) for part in parts for _ in jax.tree.leaves(part)]
    return tuple(i for i, own in enumerate(owned) if own)
