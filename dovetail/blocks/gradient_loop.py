"""The gradient steps of an update, compiled as one loop."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dovetail.algorithm import RL, Metrics
from dovetail.blocks.learner_state import LearnerState
from dovetail.blocks.replayed import Batch

KEYS = 5
"""Random keys of a gradient step."""

TOGETHER = 4
"""The longest delay whose steps are unrolled in the loop's body: longer ones compile slowly."""

Step = Callable[[LearnerState, Batch, jax.Array], tuple[LearnerState, jax.Array, Metrics]]
"""(state, batch [n, …], keys [`KEYS`]) → (state, errors [n], metrics)."""

Prepare = Callable[[LearnerState, Batch, jax.Array], Batch]
"""(state, batches [delay, n, …], keys [delay, `KEYS`]) → the batches with more known of them."""


def gradient_keys(rl: RL, state: LearnerState, batches: Batch) -> jax.Array:
    """Random keys [K, `KEYS`] for a gradient step on each of K batches [K, n, …].

    All are made before the loop: a key derived inside it would be derived again at every use.
    """
    count, items = batches.weights.shape
    key = jax.random.fold_in(state.key, 2 * state.updates + 1)
    keys = rl.own_keys(jax.random.split(key, (count, KEYS)), items)
    # The barrier keeps XLA from fusing the derivation into each use.
    words = jax.lax.optimization_barrier(jax.random.key_data(keys))
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(keys))


def gradient_loop(
    step: Step,
    state: LearnerState,
    batches: Batch,
    keys: jax.Array,
    enough: jax.Array,
    *,
    delay: int = 1,
    prepare: Prepare | None = None,
) -> tuple[LearnerState, jax.Array, Metrics]:
    """(state, errors [K, n], mean metrics) after `step` on each of K batches [K, n, …].

    Nothing happens unless there is `enough` to learn from. If some parts move only in every
    `delay`-th step, that many steps are unrolled in the loop's body where possible, so that tracing
    decides which parts move. `prepare` computes for these steps at once what does not change
    between them.
    """
    count = batches.weights.shape[0]
    together = delay if delay <= TOGETHER and count % delay == 0 else 1

    @jax.jit(inline=True)  # traced once, both for the shapes and for the loop
    def several(i: jax.Array, state: LearnerState) -> Any:
        """(state, errors [together, n], summed metrics) after the i-th pass."""
        part = lambda x: jax.lax.dynamic_slice_in_dim(x, together * i, together)  # noqa: E731
        own = part(keys)
        taken = jax.tree.map(part, batches)
        if prepare is not None:
            taken = prepare(state, taken, own)
        done = []
        for j in range(together):
            batch = jax.tree.map(lambda x, j=j: x[j], taken)
            # A Python number: `delayed` then decides while tracing, and skipped parts cost nothing.
            at = state if together == 1 else state._replace(steps=j)  # type: ignore[arg-type]
            after, *found = step(at, batch, own[j])
            state = after._replace(steps=state.steps + 1)
            done.append(found)
        errors, metrics = zip(*done, strict=True)
        return state, jnp.stack(errors), jax.tree.map(lambda *x: sum(x), *metrics)

    def body(i: jax.Array, loop: Any) -> Any:
        state, errors, sums = loop
        state, found, metrics = several(jnp.asarray(i, jnp.int32), state)
        errors = jax.lax.dynamic_update_slice_in_dim(errors, found, together * i, axis=0)
        return state, errors, jax.tree.map(jnp.add, sums, metrics)

    # What no gradient step changes stays out of the loop, which would otherwise carry it.
    kept = state._replace(replay=(), data=(), key=())  # type: ignore[arg-type]
    shapes = jax.eval_shape(lambda: several(jnp.int32(0), kept))
    errors = jnp.zeros((count, *shapes[1].shape[1:]))
    sums = {name: jnp.zeros(()) for name in shapes[2]}
    # A loop without passes is cheaper than selecting between old and new weights.
    passes = jnp.where(enough, count // together, 0)
    kept, errors, sums = jax.lax.fori_loop(0, passes, body, (kept, errors, sums))
    metrics = {name: total / count for name, total in sums.items()}
    learned = kept._replace(replay=state.replay, data=state.data, key=state.key)
    return learned, errors, metrics


def delayed(
    update: Callable[[LearnerState], tuple[LearnerState, Metrics]], state: LearnerState, delay: int
) -> tuple[LearnerState, Metrics]:
    """`update(state)` in every `delay`-th gradient step, else the state and zeros.

    Metrics are multiplied by `delay`, so that their mean over all steps is their mean over the
    steps with an update.
    """
    if delay == 1:
        return update(state)

    @jax.jit(inline=True)  # traced once, both for the shapes and for the loop
    def scaled(state: LearnerState) -> tuple[LearnerState, Metrics]:
        state, metrics = update(state)
        return state, {name: delay * x for name, x in metrics.items()}

    nothing = {name: jnp.zeros(()) for name in jax.eval_shape(scaled, state)[1]}
    due: Any = (state.steps + 1) % delay == 0
    if isinstance(due, bool):
        return scaled(state) if due else (state, nothing)
    # A loop of one pass or none: unlike `cond`, it does not copy what stays the same.
    return jax.lax.fori_loop(0, due.astype(jnp.int32), lambda _, x: scaled(x[0]), (state, nothing))


def apply_gradients(
    rl: RL, adam: optax.GradientTransformation, state: LearnerState, gradients: dict[str, Any]
) -> LearnerState:
    """The state after a step of some networks along their gradients, averaged over learners."""
    params, optimizer = dict(state.params), dict(state.optimizer)
    for name, gradient in rl.mean(gradients).items():
        change, optimizer[name] = adam.update(gradient, optimizer[name])
        params[name] = optax.apply_updates(params[name], change)
    return state._replace(params=params, optimizer=optimizer)
