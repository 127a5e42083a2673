"""An unroll's acting program for the host loop: handed only what acting depends on.

Every array that crosses into or out of a compiled call costs microseconds, and the loop makes one
call per step. What the policy does not look at (the last reward, the moments of observations that
are not normalized, …) is found once, from the program, and left out; small weights go in as one
array, packed once per unroll; the keys of all its steps are made in one call; what the policy makes
comes back as one array of words, of which the action and the extras are views.
"""

from collections.abc import Sequence
from functools import partial
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval as pe

from dovetail.graph.ir import Unroll
from dovetail.graph.unroll import act_key
from dovetail.keys import from_words
from dovetail.trajectory import Timestep

WORDS = (jnp.float32, jnp.int32, jnp.uint32)
"""What can come back as words."""

PACKED_BYTES = 64 * 1024
"""Weights of up to this size go in as one array: taking it apart costs less than its pieces."""


class ActProgram:
    """Call it with `weights(inputs)`, the carry, a row of `sees`, the reward if `rewarded`, and
    the words of the keys if `random`; or with the carry of more environments than it acts for, and
    their slots."""

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
        weights = len(used) - self._carry.num_leaves - num_observations - 4
        ends = [weights, weights + self._carry.num_leaves, len(used) - 4]
        self._weights, self._carries = used[: ends[0]], used[ends[0] : ends[1]]
        self.observed = used[ends[1] : ends[2]]
        """Which leaves of the observation it looks at."""
        self.rewarded, self.begun, self.numbered, self.random = used[ends[2] :]
        """Whether it looks at the last reward, at whether an episode begins, at the environment's
        number, and at its key."""
        self._looks = (self.rewarded, self.begun, self.numbered)
        taken: list[Any] = [var.aval for var in jaxpr.invars[: sum(self._weights)]]
        self._pieces = _parts(taken)
        self._small = (
            len(taken) > 1
            and all(aval.dtype == jnp.float32 for aval in taken)
            and sum(aval.size for aval in taken) * 4 <= PACKED_BYTES
        )
        self._pack = jax.jit(lambda leaves: jnp.concatenate([leaf.ravel() for leaf in leaves]))
        made: list[Any] = [
            var.aval for var in jaxpr.outvars[: len(jaxpr.outvars) - self._carry.num_leaves]
        ]
        self._packed = all(aval.dtype in WORDS for aval in made)
        self._parts = _parts(made)
        self._dtypes = {dtype for _, dtype, _ in self._parts}
        self._shaped = [(i, p[2]) for i, p in enumerate(self._parts) if len(p[2]) != 1]
        self._bare = jax.tree_util.treedef_is_leaf(self._action)
        self.num_actions = self._action.num_leaves
        self._key_words = jax.jit(partial(_key_words, unroll.length))
        # the carry is the caller's to give away: what comes back lies in the same memory
        self.call = jax.jit(self._act, donate_argnums=[1] if self._carry.num_leaves else [])
        self.call_slots = jax.jit(self._act_slots, donate_argnums=1)

    def weights(self, inputs: list[Any]) -> list[Any]:
        """Of what the unroll takes, what acting takes."""
        taken = list(compress(inputs, self._weights))
        return [self._pack(taken)] if self._small else taken

    def words(self, keys: Any, start: int) -> np.ndarray:
        """The words of every environment's key at each step of an unroll, [T, B, …]."""
        return np.asarray(self._key_words(keys, np.int32(start)))

    def unpack(self, made: Any) -> list[np.ndarray]:
        """The action's leaves, then the extras that somebody reads, as numpy arrays."""
        if not self._packed:
            return [np.asarray(leaf) for leaf in made]
        words = np.asarray(made)
        views = {dtype: words.view(dtype) for dtype in self._dtypes}
        found = [views[dtype][part] for part, dtype, _ in self._parts]
        for i, shape in self._shaped:
            found[i] = found[i].reshape(shape)
        return found

    def action(self, leaves: list[np.ndarray]) -> Any:
        """The action, of the first leaves that `unpack` gave."""
        return leaves[0] if self._bare else self._action.unflatten(leaves[: self.num_actions])

    @property
    def in_words(self) -> bool:
        """Whether what it makes comes back as one array of words."""
        return self._packed

    def choose(self, inputs: list[Any], at: Timestep, keys: Any) -> jax.Array:
        """The words of what the batch does `at` a timestep, inside a larger program; for acting
        that carries nothing from one step to the next."""
        last = compress((at.reward, at.first, at.number), self._looks)
        made = self._function(
            *compress(inputs, self._weights),
            *compress(jax.tree.leaves(at.observation), self.observed),
            *last,
            *([keys] if self.random else []),
        )
        return _words(made)

    def leaves(self, words: jax.Array) -> list[jax.Array]:
        """The action's leaves, then the extras that somebody reads, inside a larger program."""
        return [
            jax.lax.bitcast_convert_type(words[part], dtype).reshape(shape)
            for part, dtype, shape in self._parts
        ]

    def writer(self, rows: list[np.ndarray]) -> "RowWriter | WordWriter":
        """What writes the calls of an unroll into `rows`, one array [T, B, …] for each leaf."""
        if not (self._packed and self._bare):
            return RowWriter(self, rows)
        return WordWriter(rows, self._parts)

    def _act(
        self, weights: Any, carry: Any, sees: list[Any], last: list[Any], words: list[Any]
    ) -> Any:
        """(what `unpack` takes, carry) of the batch.

        `sees` are the observed leaves; `last` the reward, the beginnings and the environments'
        numbers, if looked at; `words` those of the keys, if looked at.
        """
        if self._small:
            weights = [weights[0][part].reshape(shape) for part, _, shape in self._pieces]
        carries = list(compress(jax.tree.leaves(carry), self._carries))
        outputs = self._function(*weights, *carries, *sees, *last, *map(from_words, words))
        tail = len(outputs) - self._carry.num_leaves
        made, carry = outputs[:tail], self._carry.unflatten(outputs[tail:])
        if not self._packed:
            return made, carry
        return _words(made), carry

    def _act_slots(
        self,
        weights: Any,
        carry: Any,
        slots: jax.Array,
        sees: list[Any],
        last: list[Any],
        words: list[Any],
    ) -> Any:
        """`_act` for the environments at `slots` of a carry; slots beyond it are padding."""
        own = jax.tree.map(lambda x: x.at[slots].get(mode="clip"), carry)
        made, after = self._act(weights, own, sees, last, words)
        put = lambda x, new: x.at[slots].set(new, mode="drop")  # noqa: E731
        return made, jax.tree.map(put, carry, after)


class RowWriter:
    """Writes what each call made into the rows of its step."""

    def __init__(self, acting: ActProgram, rows: list[np.ndarray]) -> None:
        self._acting, self._rows = acting, rows

    def put(self, t: int, made: Any) -> Any:
        """Keeps what step `t` made; returns the action."""
        leaves = self._acting.unpack(made)
        for row, leaf in zip(self._rows, leaves, strict=True):
            row[t] = leaf
        return self._acting.action(leaves)

    def finish(self) -> None:
        """After the last step: everything is in its row already."""


class WordWriter:
    """Keeps the words of every call, and writes all rows of a leaf at once in the end."""

    def __init__(
        self, rows: list[np.ndarray], parts: list[tuple[slice, Any, tuple[int, ...]]]
    ) -> None:
        self._rows, self._parts = rows, parts
        self._words = np.zeros((len(rows[0]), parts[-1][0].stop), np.int32)
        self._chosen, self._dtype, self._shape = parts[0]

    def put(self, t: int, made: Any) -> np.ndarray:
        """Keeps what step `t` made; returns the action."""
        words = np.asarray(made)
        self._words[t] = words
        return words[self._chosen].view(self._dtype).reshape(self._shape)

    def finish(self) -> None:
        """After the last step: writes the rows."""
        for row, (part, dtype, _) in zip(self._rows, self._parts, strict=True):
            row[...] = self._words[:, part].view(dtype).reshape(row.shape)


def _words(leaves: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate(
        [jax.lax.bitcast_convert_type(leaf, jnp.int32).ravel() for leaf in leaves]
    )


def _key_words(length: int, keys: jax.Array, start: jax.Array) -> jax.Array:
    steps = start + jnp.arange(length, dtype=jnp.int32)
    over_time = jax.vmap(jax.vmap(act_key, (0, None)), (None, 0))
    return jax.random.key_data(over_time(keys, steps))


def _parts(avals: list[Any]) -> list[tuple[slice, Any, tuple[int, ...]]]:
    """Which of the words are each array's, with its dtype and shape."""
    sizes = [int(np.prod(aval.shape)) for aval in avals]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [
        (slice(end - size, end), np.dtype(aval.dtype), tuple(aval.shape))
        for aval, size, end in zip(avals, sizes, ends, strict=True)
    ]
