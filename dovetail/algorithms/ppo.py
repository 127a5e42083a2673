"""Proximal policy optimization, https://arxiv.org/abs/1707.06347.

Unusual here: minibatches are rows of time, the same for every environment, so that a minibatch is
the same set of samples however environments are split among actors and learners; on a CPU it is
also much cheaper than permuting all samples. With a recurrent memory they are groups of
environments instead, each with its whole unroll.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dovetail.algorithm import RL, Correction, Metrics, Trajectory
from dovetail.algorithms.actor_critic import (
    ActorCriticAlgorithm,
    LearnerState,
    Prepared,
    first_memory,
)
from dovetail.errors import UserError, check_option
from dovetail.functions.gradients import gradient
from dovetail.functions.losses import (
    approximate_kl,
    clip_fraction,
    clipped_surrogate,
    clipped_value_loss,
    entropy_loss,
    explained_variance,
    standardize,
    value_loss,
)


class Samples(NamedTuple):
    """What a gradient step learns from: [T, B, …], or one minibatch of it."""

    observation: Any
    action: Any
    log_prob: jax.Array
    value: jax.Array
    advantage: jax.Array
    target: jax.Array
    weights: jax.Array
    first: jax.Array


class Progress(NamedTuple):
    """What goes round the minibatch loop."""

    params: Any
    optimizer: Any
    going: jax.Array
    """Whether the divergence is still below the target."""


@dataclass(frozen=True)
class PPO(ActorCriticAlgorithm):
    """Proximal policy optimization: several epochs of clipped policy gradients per batch."""

    correction: ClassVar[Correction] = Correction("the clipped ratio", 1)

    epochs: int = 4
    """Passes over each batch."""
    minibatches: int = 4
    """Gradient steps per pass; divides the unroll length (the environments, if recurrent)."""
    lambda_: float = 0.95
    """Trade-off of bias and variance in the advantages."""
    clip: float = 0.2
    """How far the probability ratio may move in one update."""
    clip_value: bool = False
    """Whether the value's step is clipped too."""
    target_kl: float = 0.0
    """Stop an update's gradient steps once the divergence passes 1.5 times this; 0 for never."""
    normalize_advantages: bool = True
    """Whether each batch's advantages are standardized."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "minibatches"):
            check_option(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")
        check_option("clip", self.clip, self.clip > 0, "more than 0")
        check_option("target_kl", self.target_kl, self.target_kl >= 0, "0 or more")
        check_option("lambda_", self.lambda_, 0 <= self.lambda_ <= 1, "0 to 1")

    def gradient_steps(self) -> int:
        """Optimizer steps per update."""
        return self.epochs * self.minibatches

    def learn(self, rl: RL, state: LearnerState, batch: Trajectory) -> tuple[LearnerState, Metrics]:
        """Advantages once, then epochs of minibatches."""
        prepared = self.prepare(rl, state, batch)
        advantages, targets = self.estimate(state, batch, prepared)
        if self.normalize_advantages:
            advantages = standardize(advantages, prepared.weights, rl.mean)
        samples = Samples(
            observation=prepared.observation,
            action=batch.action,
            log_prob=batch.extras.log_prob,
            value=batch.extras.value,
            advantage=advantages,
            target=targets,
            weights=prepared.weights,
            first=batch.first,
        )
        key = jax.random.fold_in(state.key, state.updates)
        start = Progress(state.params, state.optimizer, jnp.array(True))
        after, metrics = self._epochs(rl, start, samples, first_memory(batch), key)
        metrics["explained_variance"] = explained_variance(
            samples.value, samples.target, samples.weights
        )
        return self.next_state(state, prepared, after.params, after.optimizer), metrics

    def estimate(
        self, state: LearnerState, batch: Trajectory, prepared: Prepared
    ) -> tuple[jax.Array, jax.Array]:
        """(advantages, targets of the value), once per batch."""
        return self.advantages_and_targets(batch, prepared.reward, self.lambda_)

    def _epochs(
        self, rl: RL, start: Progress, samples: Samples, memory: Any, key: jax.Array
    ) -> tuple[Progress, Metrics]:
        """All gradient steps of one update; the metrics are their averages."""
        take = self._environment_groups(samples, memory) if self.recurrent else self._rows(samples)
        count = samples.first.shape[0] if not self.recurrent else self.minibatches
        shuffle = jax.vmap(lambda key: jax.random.permutation(key, count))
        order = shuffle(jax.random.split(key, self.epochs)).reshape(self.gradient_steps(), -1)
        progress, metrics = jax.lax.scan(
            lambda progress, chosen: self._step(rl, progress, *take(chosen)), start, order
        )
        return progress, jax.tree.map(jnp.mean, metrics)

    def _rows(self, samples: Samples) -> Any:
        """Minibatches of time rows, flattened to [rows × B, …] (which XLA multiplies faster)."""
        length = samples.first.shape[0]
        if length % self.minibatches:
            raise UserError(
                f"{type(self).__name__} splits an unroll of {length} steps into "
                f"{self.minibatches} minibatches, but {length} is not a multiple of "
                f"{self.minibatches}: change --unroll-length or --minibatches."
            )

        def take(rows: jax.Array) -> tuple[Samples, Any]:
            return jax.tree.map(lambda x: x[rows].reshape(-1, *x.shape[2:]), samples), ()

        return take

    def _environment_groups(self, samples: Samples, memory: Any) -> Any:
        """Minibatches of whole unrolls: group g is every environment i with i ≡ g (mod groups)."""
        batch, groups = samples.first.shape[1], self.minibatches
        if batch % groups:
            raise UserError(
                f"Recurrent {type(self).__name__} splits {batch} environments into {groups} "
                f"minibatches, but {batch} is not a multiple of {groups}: change --num-envs or "
                f"--minibatches."
            )

        def split(x: jax.Array, axis: int) -> jax.Array:
            return x.reshape(*x.shape[:axis], batch // groups, groups, *x.shape[axis + 1 :])

        def take(group: jax.Array) -> tuple[Samples, Any]:
            chosen = jax.tree.map(lambda x: split(x, 1)[:, :, group[0]], samples)
            return chosen, jax.tree.map(lambda x: split(x, 0)[:, group[0]], memory)

        return take

    def _step(
        self, rl: RL, progress: Progress, samples: Samples, memory: Any
    ) -> tuple[Progress, Metrics]:
        """One gradient step."""
        if self.recurrent:
            gradients, metrics = jax.grad(self._loss, has_aux=True)(
                progress.params, samples, memory
            )
        else:
            gradients, metrics = gradient(self._loss, progress.params, samples, memory)
        gradients = rl.mean(gradients)
        updates, optimizer = self.optimizer().update(gradients, progress.optimizer, progress.params)
        after = Progress(optax.apply_updates(progress.params, updates), optimizer, progress.going)
        if self.target_kl:
            kl = rl.mean(metrics["approx_kl"])
            going = progress.going & (kl <= 1.5 * self.target_kl)
            after = jax.tree.map(lambda new, old: jnp.where(going, new, old), after, progress)
            after = after._replace(going=going)
        return after, metrics

    def _loss(self, params: Any, samples: Samples, memory: Any) -> tuple[jax.Array, Metrics]:
        """Clipped surrogate, value loss and entropy bonus of one minibatch."""
        weights = samples.weights
        if self.recurrent:
            distribution, values = self.network.unroll(
                params, memory, samples.observation, samples.first
            )
        else:
            distribution, values, _ = self.network.step(params, memory, samples.observation)
        log_probs = distribution.log_prob(samples.action)
        policy = clipped_surrogate(
            log_probs, samples.log_prob, samples.advantage, self.clip, weights
        )
        if self.clip_value:
            value = clipped_value_loss(values, samples.value, samples.target, self.clip, weights)
        else:
            value = value_loss(values, samples.target, weights)
        entropy = -entropy_loss(distribution.entropy(), weights)
        loss = policy + self.value_coefficient * value - self.entropy_coefficient * entropy
        return loss, {
            "loss": loss,
            "policy_loss": policy,
            "value_loss": value,
            "entropy": entropy,
            "approx_kl": approximate_kl(log_probs, samples.log_prob, weights),
            "clip_fraction": clip_fraction(log_probs, samples.log_prob, self.clip, weights),
        }
