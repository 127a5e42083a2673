"""Advantage actor-critic, written from scratch: one network, one gradient step per unroll."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

import dovetail as dt


class State(NamedTuple):
    """The learner's state, carried from one iteration to the next."""

    params: Any
    optimizer: Any


@dataclass(frozen=True)
class ActorCritic(dt.Algorithm):
    """Policy gradients, weighted by the advantage: the return minus the predicted value."""

    unroll_length: int = 32
    """Steps each environment takes between two updates."""
    learning_rate: float = 3e-3
    """Adam's step size."""
    gamma: float = 0.99
    """Discount factor γ."""
    hidden: int = 64
    """Size of the hidden layer."""

    actions: ClassVar[tuple[type, ...]] = (dt.envs.Discrete,)

    def init(self, key: jax.Array) -> State:
        """A network of one hidden layer, and a fresh optimizer."""
        env = self.task.env
        assert isinstance(env.action, dt.envs.Discrete)  # as `actions` says
        inputs, outputs = env.observation.shape[0], env.action.n + 1
        first, second = jax.random.split(key)
        params = {
            "hidden": jax.random.normal(first, (inputs, self.hidden)) / inputs**0.5,
            "heads": 0.1 * jax.random.normal(second, (self.hidden, outputs)) / self.hidden**0.5,
        }
        return State(params, self.optimizer().init(params))

    def optimizer(self) -> optax.GradientTransformation:
        """Adam."""
        return optax.adam(self.learning_rate)

    def network(self, params: Any, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The policy's logits [..., n], and the value [...]."""
        outputs = jnp.tanh(observation @ params["hidden"]) @ params["heads"]
        return outputs[..., :-1], outputs[..., -1]

    def act(self, params: Any, carry: Any, timestep: dt.Timestep, key: jax.Array) -> Any:
        """(action, extras, carry): an action sampled from the policy; no extras, no memory."""
        logits, _ = self.network(params, timestep.observation)
        return jax.random.categorical(key, logits), (), carry

    def greedy(self, params: Any, carry: Any, timestep: dt.Timestep) -> Any:
        """(action, carry): the most likely action."""
        return jnp.argmax(self.network(params, timestep.observation)[0]), carry

    def value(self, params: Any, carry: Any, timestep: dt.Timestep) -> jax.Array:
        """The expected return from here on."""
        return self.network(params, timestep.observation)[1]

    def returns(self, batch: dt.Trajectory) -> jax.Array:
        """Discounted returns [T, B]; where an episode was cut, `bootstrap` replaces the rest."""
        beyond = jnp.where(batch.terminated, 0.0, batch.bootstrap)
        ended = batch.terminated | batch.truncated

        def back(following: jax.Array, row: Any) -> tuple[jax.Array, jax.Array]:
            reward, ended, beyond = row
            total = reward + self.gamma * jnp.where(ended, beyond, following)
            return total, total

        return jax.lax.scan(back, beyond[-1], (batch.reward, ended, beyond), reverse=True)[1]

    def loss(self, params: Any, batch: dt.Trajectory) -> jax.Array:
        """Policy gradient, value error and a small entropy bonus, over the valid steps."""
        logits, values = self.network(params, batch.observation)
        log_probs = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_probs, batch.action[..., None], axis=-1)[..., 0]
        advantages = self.returns(batch) - values
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
        losses = -chosen * jax.lax.stop_gradient(advantages) + 0.5 * advantages**2 - 0.01 * entropy
        return jnp.mean(losses * batch.valid)

    def learn(self, rl: dt.RL, state: State, batch: dt.Trajectory) -> tuple[State, Any]:
        """One gradient step."""
        loss, gradients = jax.value_and_grad(self.loss)(state.params, batch)
        updates, optimizer = self.optimizer().update(rl.mean(gradients), state.optimizer)
        return State(optax.apply_updates(state.params, updates), optimizer), {"loss": loss}

    def iteration(self, rl: dt.RL, state: State) -> tuple[State, Any]:
        """The body of the training loop."""
        params = rl.broadcast(state.params)
        trajectory = rl.unroll(self.act, params, self.unroll_length, bootstrap=self.value)
        batch = rl.gather(trajectory)
        return self.learn(rl, state, batch)
