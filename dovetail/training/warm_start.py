"""A warm start: a new run that begins with the parameters of another one.

Only parameters are taken: whatever acting uses, and all networks and their targets. The optimizer,
the replay and all counters begin anew.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.algorithm import Algorithm
from dovetail.errors import UserError
from dovetail.run.checkpoint import Checkpoints
from dovetail.run.folder import Run
from dovetail.training.launch import acting_leaves

NETWORKS = (".params", ".target")
"""The parts of a state that hold the weights of networks, beside what acting uses."""


@dataclass(frozen=True)
class WarmStart:
    """The parameters of another run, by their path in a new state."""

    run: Path
    updates: int
    leaves: dict[str, np.ndarray]

    def into(self, state: Any) -> Any:
        """The state with these parameters; with several seeds, each begins with them."""

        def begun(path: tuple[Any, ...], leaf: Any) -> Any:
            found = self.leaves.get(jax.tree_util.keystr(path))
            return leaf if found is None else jnp.broadcast_to(found, leaf.shape).astype(leaf.dtype)

        return jax.tree_util.tree_map_with_path(begun, state)

    def __str__(self) -> str:
        return f"It begins with the parameters of {self.run} after {self.updates:,} updates."


def warm_start(source: str | Path | Run, algorithm: Algorithm) -> WarmStart:
    """Takes the parameters of a run's last checkpoint for a bound algorithm; raises if they do not
    fit it."""
    run = source if isinstance(source, Run) else Run.open(source)
    saved, meta = Checkpoints(run.path / "checkpoints").arrays()
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    acting = acting_leaves(algorithm.acting, state, seeds=1)
    found: dict[str, np.ndarray] = {}
    for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        name = jax.tree_util.keystr(path)
        # Acting may use counters too, for exploration that declines.
        acts = i in acting and jnp.issubdtype(leaf.dtype, jnp.floating)
        if not acts and not name.startswith(NETWORKS):
            continue
        there = saved.get(f"['state']{name}")
        if there is None or there.shape != leaf.shape:
            was = "not there" if there is None else f"of shape {list(there.shape)}"
            raise UserError(
                f"The parameters of {run.path} do not fit {type(algorithm).__name__} on "
                f"{algorithm.task.env.id}: state{name} has shape {list(leaf.shape)} here, and is "
                f"{was} in that run; --init-from needs the same observations, actions and networks."
            )
        found[name] = there
    return WarmStart(run.path, int(meta["updates"]), found)
