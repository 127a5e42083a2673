"""What only recorded data needs: rows of a dataset, and policies fitted to recorded actions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.blocks.replayed import Batch, Row
from dovetail.envs.interface import ActionSpace, Continuous
from dovetail.functions.distributions import Categorical, Gaussian
from dovetail.networks.layers import Params
from dovetail.networks.policy_network import PolicyNetwork

INSIDE = 1 - 1e-5
"""Recorded actions are clipped to this: a squashed distribution has no density on the bounds."""


def recorded_rows(space: ActionSpace, rows: Any) -> Row:
    """Rows of a dataset as the learner keeps them, with actions clipped to their bounds."""
    action = rows.action
    if isinstance(space, Continuous):
        action = np.clip(action, -INSIDE, INSIDE)
    return Row(rows.observation, action, rows.reward, rows.terminated)


def init_policy(network: PolicyNetwork, space: ActionSpace, key: jax.Array) -> Params:
    """New weights of a policy; with continuous actions, a log standard deviation for each entry."""
    params = network.init(key)
    if isinstance(space, Continuous):
        return params | {"log_std": jnp.zeros(space.size)}
    return params


def bounded_sample(policy: Categorical | Gaussian, key: jax.Array) -> jax.Array:
    """An action of a policy; a continuous one is clipped to [-1, 1]."""
    action = policy.sample(key)
    return action if isinstance(policy, Categorical) else jnp.clip(action, -1.0, 1.0)


def bounded_log_prob(policy: Categorical | Gaussian, action: jax.Array) -> jax.Array:
    """Log-probability with which `bounded_sample` returns an action."""
    if isinstance(policy, Categorical):
        return policy.log_prob(action)
    return policy.clipped_log_prob(action)


def negative_log_likelihood(
    policy: Categorical | Gaussian, batch: Batch, weights: jax.Array | float = 1.0
) -> jax.Array:
    """Mean of -w log π(a|s) over the actions of a batch; `weights` w are [n]."""
    return -jnp.mean(batch.weights * weights * policy.log_prob(batch.action))
