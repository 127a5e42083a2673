"""OpenAI's evolution strategies, https://arxiv.org/abs/1703.03864: no gradient is taken.

Every environment acts with weights of its own: the mean plus a perturbation that depends on the
environment's number and the generation alone. So the learner can compute the perturbations again,
and only weights and fitnesses travel.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

import dovetail as dt


class State(NamedTuple):
    """The mean of the population, and what makes its perturbations."""

    params: Any
    optimizer: Any
    key: jax.Array
    generation: jax.Array


class Population(NamedTuple):
    """What the actors receive."""

    mean: Any
    key: jax.Array


@dataclass(frozen=True)
class Evolution(dt.Algorithm):
    """Moves the mean of the weights toward the perturbations with the best returns."""

    num_envs: int = 64
    """Members of the population: environments 2i and 2i + 1 are a mirrored pair."""
    unroll_length: int = 200
    """Steps of an evaluation; the reward up to the end of the first episode is the fitness."""
    learning_rate: float = 0.05
    """Adam's step size."""
    sigma: float = 0.1
    """Standard deviation of the perturbations."""
    hidden: int = 16
    """Size of the hidden layer."""

    actions: ClassVar[tuple[type, ...]] = (dt.envs.Discrete,)

    def init(self, key: jax.Array) -> State:
        """A network of one hidden layer, a fresh optimizer, and the key of all perturbations."""
        env = self.task.env
        assert isinstance(env.action, dt.envs.Discrete)  # as `actions` says
        inputs, (weights_key, key) = env.observation.shape[0], jax.random.split(key)
        params = {
            "hidden": jax.random.normal(weights_key, (inputs, self.hidden)) / inputs**0.5,
            "heads": jnp.zeros((self.hidden, env.action.n)),
        }
        return State(params, self.optimizer().init(params), key, jnp.zeros((), jnp.int32))

    def optimizer(self) -> optax.GradientTransformation:
        """Adam."""
        return optax.adam(self.learning_rate)

    def perturbation(self, population: Population, number: jax.Array) -> Any:
        """The direction of one member: mirrored pairs share the noise with opposite signs."""
        flat, unravel = ravel_pytree(population.mean)
        noise = jax.random.normal(jax.random.fold_in(population.key, number // 2), flat.shape)
        return unravel(jnp.where(number % 2 == 0, noise, -noise))

    def choose(self, params: Any, observation: jax.Array) -> jax.Array:
        """The network's action."""
        return jnp.argmax(jnp.tanh(observation @ params["hidden"]) @ params["heads"])

    def act(self, params: Population, carry: Any, timestep: dt.Timestep, key: jax.Array) -> Any:
        """(action, extras, carry) of one member, known by its environment's number."""
        direction = self.perturbation(params, timestep.number)
        own = jax.tree.map(lambda w, d: w + self.sigma * d, params.mean, direction)
        return self.choose(own, timestep.observation), (), carry

    def acting(self, state: State) -> Population:
        """The mean and the key of this generation."""
        return Population(state.params, jax.random.fold_in(state.key, state.generation))

    def greedy(self, params: Population, carry: Any, timestep: dt.Timestep) -> Any:
        """(action, carry) with the mean of the weights."""
        return self.choose(params.mean, timestep.observation), carry

    def learn(self, state: State, batch: dt.Trajectory) -> tuple[State, Any]:
        """The gradient of the expected fitness, estimated from the ranks of the population."""
        ended = jnp.cumsum(batch.terminated | batch.truncated, axis=0)
        first_episode = ended - (batch.terminated | batch.truncated) == 0
        fitness = jnp.sum(batch.reward * first_episode * batch.valid, axis=0)
        ranks = jnp.argsort(jnp.argsort(fitness)) / (self.num_envs - 1) - 0.5
        perturb = jax.vmap(self.perturbation, (None, 0))
        directions = perturb(self.acting(state), batch.last.number[0])
        gradients = jax.tree.map(
            lambda d: -jnp.tensordot(ranks, d, 1) / (self.num_envs * self.sigma), directions
        )
        updates, optimizer = self.optimizer().update(gradients, state.optimizer)
        params = optax.apply_updates(state.params, updates)
        after = state._replace(params=params, optimizer=optimizer, generation=state.generation + 1)
        return after, {"fitness": jnp.mean(fitness), "best_fitness": jnp.max(fitness)}

    def iteration(self, rl: dt.RL, state: State) -> tuple[State, Any]:
        """One generation: evaluate the population, then move its mean."""
        population = rl.broadcast(self.acting(state))
        trajectory = rl.unroll(self.act, population, self.unroll_length)
        return self.learn(state, rl.gather(trajectory))
