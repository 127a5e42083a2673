"""The acting program of the host loop, with as few arguments and results as possible.

Every array passed to or from a compiled call costs microseconds, and the loop makes one call per
step. So inputs that the policy does not read (the last reward, unused observation statistics, …)
are found once by dead-code elimination and left out. Small weights are packed into one array once
per unroll. The keys of all steps are made in one call. The results come back as one array of 32-bit
words, and the action and the extras are views of it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval as pe

from dovetail.graph.ir import Unroll
from dovetail.graph.unroll import act_key
from dovetail.keys import from_words
from dovetail.runtime.arrays import Leaf, avals_of
from dovetail.trajectory import Timestep

WORDS = (jnp.float32, jnp.int32, jnp.uint32)
"""Dtypes that can be returned as words."""

Made = jax.Array | list[jax.Array]
"""The results of a call: one array of words, or one array for each leaf if not all of them are of
dtypes in `WORDS`."""

PACKED_BYTES = 64 * 1024
"""Weights up to this total size are packed: unpacking them costs less than passing each array."""


class WordPart(NamedTuple):
    """The place of an array among the words of a call's results."""

    words: slice
    dtype: np.dtype
    shape: tuple[int, ...]


class ActProgram:
    """The acting program of an unroll.

    `call` takes `weights(inputs)`, the carry, the observed leaves, the reward, beginnings and
    numbers where read, and the words of the keys if `random`. `call_slots` takes the carry of all
    environments and the slots of those it acts for.
    """

    def __init__(self, unroll: Unroll, live_extras: list[bool], num_observations: int) -> None:
        inner = unroll.act
        assert inner.program is not None and inner.out_tree is not None
        count = len(inner.program.jaxpr.outvars)
        made = cast(tuple[object, object, object], inner.out_tree.unflatten(range(count)))
        action, _, carry = made
        self._action = jax.tree.structure(action)
        self._carry = jax.tree.structure(carry)
        # Extras that are not read are not computed; the action and the carry always are.
        wanted = [True] * self._action.num_leaves + live_extras + [True] * self._carry.num_leaves
        # Not part of JAX's documented interface. `used` has one flag for each input.
        jaxpr, used = pe.dce_jaxpr(inner.program.jaxpr, wanted)
        self._function = jaxpr_as_fun(ClosedJaxpr(jaxpr, inner.program.consts))
        # Inputs are: weights, carry, observation, then reward, first, number and key.
        weights = len(used) - self._carry.num_leaves - num_observations - 4
        ends = [weights, weights + self._carry.num_leaves, len(used) - 4]
        self._weights, self._carries = used[: ends[0]], used[ends[0] : ends[1]]
        self.observed = used[ends[1] : ends[2]]
        """Which leaves of the observation it reads."""
        self.rewarded, self.begun, self.numbered, self.random = used[ends[2] :]
        """Whether it reads the last reward, the mask of beginning episodes, the environment's
        number, and its key."""
        self._looks = (self.rewarded, self.begun, self.numbered)
        taken = avals_of(jaxpr.invars[: sum(self._weights)])
        self._pieces = _parts(taken)
        # One dtype only: concatenate would convert the others.
        self._small = (
            len(taken) > 1
            and all(aval.dtype == jnp.float32 for aval in taken)
            and sum(aval.size for aval in taken) * 4 <= PACKED_BYTES
        )
        self._pack = jax.jit(lambda leaves: jnp.concatenate([leaf.ravel() for leaf in leaves]))
        results = avals_of(jaxpr.outvars[: len(jaxpr.outvars) - self._carry.num_leaves])
        self._packed = all(aval.dtype in WORDS for aval in results)
        self._parts = _parts(results)
        self._dtypes = {part.dtype for part in self._parts}
        self._shaped = [(i, p.shape) for i, p in enumerate(self._parts) if len(p.shape) != 1]
        self._bare = jax.tree_util.treedef_is_leaf(self._action)
        self.num_actions = self._action.num_leaves
        self._key_words = jax.jit(partial(_key_words, unroll.length))
        # The carry is donated: the new carry reuses its memory.
        self.call: Callable[..., tuple[Made, object]] = jax.jit(
            self._act, donate_argnums=[1] if self._carry.num_leaves else []
        )
        self.call_slots: Callable[..., tuple[Made, object]] = jax.jit(
            self._act_slots, donate_argnums=1
        )

    def weights(self, inputs: list[Leaf]) -> list[Leaf]:
        """Selects the inputs that acting reads, packed if they are small.

        `inputs` is parallel to `Unroll.act_inputs`; the result is the first argument of `call`.
        """
        taken = list(compress(inputs, self._weights))
        # Called once per unroll, so packing costs one call per unroll and saves arguments in each
        # step.
        return [self._pack(taken)] if self._small else taken

    def words(self, keys: jax.Array, start: int) -> np.ndarray:
        """The words of every environment's key at each step, [T, B, …]."""
        return np.asarray(self._key_words(keys, np.int32(start)))

    def unpack(self, made: Made) -> list[np.ndarray]:
        """The leaves of the action, then the extras that are read, as numpy arrays [B, …].

        Waits until the call that returned `made` is done.
        """
        if isinstance(made, list):
            return [np.asarray(leaf) for leaf in made]
        words = np.asarray(made)
        views = {dtype: words.view(dtype) for dtype in self._dtypes}
        found = [views[part.dtype][part.words] for part in self._parts]
        for i, shape in self._shaped:
            found[i] = found[i].reshape(shape)
        return found

    def action(self, leaves: list[np.ndarray]) -> np.ndarray:
        """Builds the action from the leaves returned by `unpack`."""
        return leaves[0] if self._bare else self._action.unflatten(leaves[: self.num_actions])

    @property
    def in_words(self) -> bool:
        """Whether the results come back as one array of words."""
        return self._packed

    def choose(self, inputs: list[Leaf], at: Timestep, keys: jax.Array) -> jax.Array:
        """Acts on a batch at timestep `at` as part of a larger program; returns the words.

        Only for acting without a carry.
        """
        last = compress((at.reward, at.first, at.number), self._looks)
        made = self._function(
            *compress(inputs, self._weights),
            *compress(jax.tree.leaves(at.observation), self.observed),
            *last,
            *([keys] if self.random else []),
        )
        return _words(made)

    def leaves(self, words: jax.Array) -> list[jax.Array]:
        """Like `unpack`, as part of a larger program."""
        return [
            jax.lax.bitcast_convert_type(words[part.words], part.dtype).reshape(part.shape)
            for part in self._parts
        ]

    def writer(self, rows: list[np.ndarray]) -> "RowWriter | WordWriter":
        """A writer for the results of an unroll's calls; `rows` has one [T, B, …] per leaf.

        For calls that serve all environments at once, in the order of the steps.
        """
        if not (self._packed and self._bare):
            return RowWriter(self, rows)
        return WordWriter(rows, self._parts)

    def _act(
        self,
        weights: list[jax.Array],
        carry: object,
        sees: list[jax.Array],
        last: list[jax.Array],
        words: list[jax.Array],
    ) -> tuple[Made, object]:
        """Acts on a batch; returns (results for `unpack`, carry).

        `sees` are the observed leaves; `last` the reward, beginnings and environment numbers that
        are read; `words` those of the keys, if read.
        """
        if self._small:
            weights = [weights[0][piece.words].reshape(piece.shape) for piece in self._pieces]
        carries = list(compress(jax.tree.leaves(carry), self._carries))
        outputs = self._function(*weights, *carries, *sees, *last, *map(from_words, words))
        tail = len(outputs) - self._carry.num_leaves
        made, carry = outputs[:tail], self._carry.unflatten(outputs[tail:])
        if not self._packed:
            return made, carry
        return _words(made), carry

    def _act_slots(
        self,
        weights: list[jax.Array],
        carry: object,
        slots: jax.Array,
        sees: list[jax.Array],
        last: list[jax.Array],
        words: list[jax.Array],
    ) -> tuple[Made, object]:
        """`_act` for the environments at `slots` of the carry; out-of-range slots are padding."""
        # Padding slots read the last row (clip) and write nowhere (drop).
        own = jax.tree.map(lambda x: x.at[slots].get(mode="clip"), carry)
        made, after = self._act(weights, own, sees, last, words)
        put = lambda x, new: x.at[slots].set(new, mode="drop")  # noqa: E731
        return made, jax.tree.map(put, carry, after)


class RowWriter:
    """Writes the results of each call into the rows of its step."""

    def __init__(self, acting: ActProgram, rows: list[np.ndarray]) -> None:
        self._acting, self._rows = acting, rows

    def put(self, t: int, made: Made) -> np.ndarray:
        """Stores the results of step `t`; returns the action."""
        leaves = self._acting.unpack(made)
        for row, leaf in zip(self._rows, leaves, strict=True):
            row[t] = leaf
        return self._acting.action(leaves)

    def finish(self) -> None:
        """Does nothing: `put` has written everything."""


class WordWriter:
    """Collects the words of every call and writes all rows of a leaf at once at the end."""

    def __init__(self, rows: list[np.ndarray], parts: list[WordPart]) -> None:
        self._rows, self._parts = rows, parts
        self._words = np.zeros((len(rows[0]), parts[-1].words.stop), np.int32)
        self._chosen, self._dtype, self._shape = parts[0]

    def put(self, t: int, made: Made) -> np.ndarray:
        """Stores the results of step `t`; returns the action."""
        words = np.asarray(made)
        # One copy of all leaves per step; `finish` splits the leaves once per unroll.
        self._words[t] = words
        return words[self._chosen].view(self._dtype).reshape(self._shape)

    def finish(self) -> None:
        """Writes the rows after the last step."""
        for row, part in zip(self._rows, self._parts, strict=True):
            row[...] = self._words[:, part.words].view(part.dtype).reshape(row.shape)


def _words(leaves: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate(
        # The bits, not the values: floats come back unchanged.
        [jax.lax.bitcast_convert_type(leaf, jnp.int32).ravel() for leaf in leaves]
    )


def _key_words(length: int, keys: jax.Array, start: jax.Array) -> jax.Array:
    steps = start + jnp.arange(length, dtype=jnp.int32)
    # The outer map runs over the steps and the inner one over the environments: [T, B].
    over_time = jax.vmap(jax.vmap(act_key, (0, None)), (None, 0))
    return jax.random.key_data(over_time(keys, steps))


def _parts(avals: list[ShapedArray]) -> list[WordPart]:
    """The place of each array among the words, one after another."""
    sizes = [int(np.prod(aval.shape)) for aval in avals]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [
        WordPart(slice(end - size, end), np.dtype(aval.dtype), tuple(aval.shape))
        for aval, size, end in zip(avals, sizes, ends, strict=True)
    ]
