"""An advantage actor-critic whose critic lives, and learns, on a side of its own.

The critic's parameters are marked as living on the side "critic", and `rl.call` runs a function
there. The strategy decides where that is: with the learner, on a worker, in a process, on another
machine.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

import dovetail as dt
from dovetail.functions.returns import generalized_advantages

Layers = dict[str, jax.Array]


class State(NamedTuple):
    """The state that is carried from one iteration to the next."""

    params: Layers
    optimizer: Any
    critic: Any
    """(parameters, optimizer), on the critic's side."""


@dataclass(frozen=True)
class CriticApart(dt.Algorithm):
    """Policy gradients, weighted by advantages that a critic on another side computes."""

    unroll_length: int = 16
    """Steps each environment takes between two updates."""
    learning_rate: float = 3e-3
    """Adam's step size, for both networks."""
    gamma: float = 0.99
    """Discount factor γ."""
    gae_lambda: float = 0.95
    """λ of generalized advantage estimation."""
    hidden: int = 64
    """Size of the hidden layers."""

    actions: ClassVar[tuple[type, ...]] = (dt.envs.Discrete,)

    def init(self, key: jax.Array) -> State:
        """Two networks of one hidden layer; the critic's is marked with its side."""
        env, (one, two) = self.task.env, jax.random.split(key)
        assert isinstance(env.action, dt.envs.Discrete)  # as `actions` says
        params = self.layers(one, env.observation.shape[0], env.action.n)
        critic = self.layers(two, env.observation.shape[0], 1)
        optimizer = optax.adam(self.learning_rate)
        return State(
            params, optimizer.init(params), dt.at("critic", (critic, optimizer.init(critic)))
        )

    def layers(self, key: jax.Array, inputs: int, outputs: int) -> Layers:
        """Small random weights."""
        one, two = jax.random.split(key)
        first = jax.random.normal(one, (inputs, self.hidden)) / inputs**0.5
        return {"in": first, "out": 0.1 * jax.random.normal(two, (self.hidden, outputs))}

    def act(self, params: Layers, carry: Any, timestep: dt.Timestep, key: jax.Array) -> Any:
        """(action, extras, carry): an action sampled from the policy; no extras, no memory."""
        return jax.random.categorical(key, network(params, timestep.observation)), (), carry

    def greedy(self, params: Layers, carry: Any, timestep: dt.Timestep) -> Any:
        """(action, carry): the most likely action."""
        return jnp.argmax(network(params, timestep.observation)), carry

    def criticize(self, critic: Any, batch: dt.Trajectory) -> tuple[Any, jax.Array]:
        """On the critic's side: (the critic after one gradient step, which stays there; the
        normalized advantages [T, B] before it, which go back)."""
        params, optimizer = critic
        values, following = (
            network(params, seen)[..., 0] for seen in (batch.observation, batch.next_observation)
        )
        ends = batch.terminated, batch.truncated
        advantages = generalized_advantages(
            batch.reward, values, following, *ends, self.gamma, self.gae_lambda
        )
        goals = values + advantages

        def error(params: Layers) -> jax.Array:
            return ((goals - network(params, batch.observation)[..., 0]) ** 2).mean()

        gradients = jax.grad(error)(params)
        updates, optimizer = optax.adam(self.learning_rate).update(gradients, optimizer)
        learned = optax.apply_updates(params, updates), optimizer
        # This side has the whole batch, however many learners there are, so it can normalize.
        normalized = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        return dt.at("critic", learned), normalized

    def loss(self, params: Layers, batch: dt.Trajectory, advantages: jax.Array) -> jax.Array:
        """The policy-gradient loss."""
        log_probs = jax.nn.log_softmax(network(params, batch.observation))
        chosen = jnp.take_along_axis(log_probs, batch.action[..., None], -1)[..., 0]
        return -(chosen * advantages).mean()

    def iteration(self, rl: dt.RL, state: State) -> tuple[State, Any]:
        """The body of the training loop."""
        params = rl.broadcast(state.params)
        batch = rl.gather(rl.unroll(self.act, params, self.unroll_length))
        critic, advantages = rl.call("critic", self.criticize, state.critic, batch)
        loss, gradients = jax.value_and_grad(self.loss)(state.params, batch, advantages)
        adam = optax.adam(self.learning_rate)
        updates, optimizer = adam.update(rl.mean(gradients), state.optimizer)
        params: Any = optax.apply_updates(state.params, updates)
        return State(params, optimizer, critic), {"loss": loss}


def network(params: Layers, observation: jax.Array) -> jax.Array:
    """The outputs [..., n] of a network with two layers."""
    return jnp.tanh(observation @ params["in"]) @ params["out"]
