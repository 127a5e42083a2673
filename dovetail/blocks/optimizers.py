"""Optimizers: clipped Adam, its annealed step size, and one step of it."""

from typing import Any

import optax

from dovetail.algorithm import Task


def adam_with_clipping(
    rate: optax.ScalarOrSchedule, max_grad_norm: float
) -> optax.GradientTransformation:
    """Adam on gradients whose global norm is clipped to `max_grad_norm`."""
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), optax.adam(rate, eps=1e-5))


def annealed(rate: float, steps: int) -> optax.Schedule:
    """A step size that falls linearly from `rate` to 0 over that many optimizer steps."""
    return optax.linear_schedule(rate, 0.0, max(1, steps))


def updates_in(task: Task, unroll_length: int) -> int:
    """Number of updates in a task, the last of which may be partial."""
    return -(-task.steps // (unroll_length * task.num_envs))


def apply_gradients(
    optimizer: optax.GradientTransformation, gradients: Any, state: Any, params: Any
) -> tuple[Any, Any]:
    """(params, optimizer state) after one descent step along `gradients`."""
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state
