"""An unroll's acting program for the host loop: handed only what acting depends on.

Every array that crosses into a compiled call costs about a microsecond, and the loop makes one call
per step. What the policy does not look at (the last reward, the moments of observations that are
not normalised, …) is found once, from the program, and left out.
"""

from itertools import compress
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval as pe

from dovetail.graph.ir import Unroll
from dovetail.graph.unroll import act_key


class Acting:
    """Call it with `weights(inputs)`, the carry, a row of `sees`, the reward if `rewarded`."""

    def __init__(self, unroll: Unroll, live_extras: list[bool], num_observations: int) -> None:
        inner = unroll.act
        assert inner.program is not None and inner.out_tree is not None
        count = len(inner.program.jaxpr.outvars)
        action, _, carry = inner.out_tree.unflatten(range(count))
        self._action = jax.tree.structure(action)
        self._carry = jax.tree.structure(carry)
        wanted = [True] * self._action.num_leaves + live_extras + [True] * self._carry.num_leaves
        jaxpr, used = pe.dce_jaxpr(inner.program.jaxpr, wanted)
        self._function = jaxpr_as_fun(ClosedJaxpr(jaxpr, inner.program.consts))
        weights = len(used) - self._carry.num_leaves - num_observations - 3
        ends = [weights, weights + self._carry.num_leaves, len(used) - 3]
        self._weights, self._carries = used[: ends[0]], used[ends[0] : ends[1]]
        self.observed = used[ends[1] : ends[2]]
        """Which leaves of the observation it looks at."""
        self.rewarded, self.begun, self._random = used[ends[2] :]
        """Whether it looks at the last reward, and at whether an episode begins."""
        self.call = jax.jit(self._act)

    def weights(self, inputs: list[Any]) -> list[Any]:
        """Of what the unroll takes, what acting takes."""
        return list(compress(inputs, self._weights))

    def _act(
        self, weights: Any, carry: Any, sees: list[Any], last: list[Any], keys: Any, step: Any
    ) -> Any:
        """(action, the extras that somebody reads, carry) of the batch.

        `sees` are the observed leaves; `last` the reward and the beginnings, if looked at.
        """
        acting_keys = [jax.vmap(act_key, (0, None))(keys, step)] if self._random else []
        carries = list(compress(jax.tree.leaves(carry), self._carries))
        outputs = self._function(*weights, *carries, *sees, *last, *acting_keys)
        head, tail = self._action.num_leaves, len(outputs) - self._carry.num_leaves
        return (
            self._action.unflatten(outputs[:head]),
            outputs[head:tail],
            self._carry.unflatten(outputs[tail:]),
        )
