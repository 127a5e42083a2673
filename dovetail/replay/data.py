"""A recorded dataset on the device: a learner samples it and never adds to it.

The data is part of the learner's state during a run. It lives on the learner's side rather than on
a replay's because nothing else writes to it; each learner copy samples its part of a batch from the
whole dataset. `init` only reserves space: the training loop fills it in, and checkpoints leave it
out.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.replay.sample import ItemKeys, Sample


@dataclass(frozen=True)
class DataSpec:
    """The number of recorded steps, and the space they take."""

    steps: int
    """Steps in the dataset."""
    held: int
    """Maximum number of steps on the device at once: all, or fewer if the dataset is read in parts.
    """
    rows: int
    """Maximum number of rows on the device at once: one per step, and one after each episode."""

    def empty(self, example: Any, window: int) -> "Data":
        """Zeroed storage for rows like `example`, sampled in windows of `window` steps."""
        rows = jax.tree.map(lambda x: jnp.zeros((self.rows, *x.shape), x.dtype), example)
        numbers = jnp.zeros(self.held, jnp.int32)
        return Data(rows, numbers, numbers, jnp.zeros((), jnp.int32), window)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Data:
    """Recorded steps, numbered consecutively."""

    rows: Any
    """[rows, …], including the row after each episode's last step."""
    begins: Any
    """[steps]: index of each step's row."""
    left: Any
    """[steps]: number of steps from this one to the end of its episode, inclusive."""
    size: Any
    """Number of valid steps; entries past it are undefined."""
    window: int = field(metadata={"static": True})
    """Steps per item, cut at the end of the episode, as in `Transitions(window)`."""

    def sample(self, draws: jax.Array) -> Sample:
        """Batches of items for random integers `draws` uint32[K, n]: arrays [K, n, …]."""
        # The bias of the modulo is negligible for datasets far smaller than 2**32 steps.
        chosen = (draws % self.size.astype(jnp.uint32)).astype(jnp.int32)
        within = jnp.arange(self.window + 1)
        left = self.left[chosen][..., None]
        # Past the end of an episode the window repeats its last row; the mask hides the repeats.
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
    """Whether a part of a learner's state is a recorded dataset."""
    return isinstance(part, Data)


def without_data(state: Any) -> Any:
    """A learner's state without the arrays of its dataset, whose position stays marked."""

    def left_out(part: Any) -> Any:
        if not isinstance(part, Data):
            return part
        return replace(part, rows=None, begins=None, left=None, size=None)

    return jax.tree.map(left_out, state, is_leaf=is_data)


def with_data(state: Any, data: Data | None) -> Any:
    """A learner's state with `data` in place of its dataset."""
    return jax.tree.map(lambda part: data if is_data(part) else part, state, is_leaf=is_data)


def data_leaves(state: Any) -> tuple[int, ...]:
    """Indices of the dataset's leaves among a state's leaves."""
    parts = jax.tree.leaves(state, is_leaf=is_data)
    # One entry per leaf of each part, in the order of the state's leaves.
    owned = [is_data(part) for part in parts for _ in jax.tree.leaves(part)]
    return tuple(i for i, own in enumerate(owned) if own)
