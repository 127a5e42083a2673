"""A tiny environment and tiny algorithms, for tests of the graph, of plans and of runtimes."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.algorithm import RL, Algorithm, Metrics, Task, Timestep
from dovetail.envs import batched
from dovetail.envs.interface import Discrete, EnvSpec, JaxStep
from dovetail.graph.unroll import ActorState, environment_keys, initial_actor


def uniform(key: jax.Array) -> jax.Array:
    """Four numbers in [0, 1) from a key's own bits: quick to compile, and random enough here."""
    word = jax.random.key_data(key)[0]
    return ((word >> jnp.array([0, 8, 16, 24], jnp.uint32)) & 255) / 256


class Drift:
    """Four numbers that drift up and down with the action; ends in both ways, at random times."""

    spec = EnvSpec("toy:Drift", jax.ShapeDtypeStruct((4,), jnp.float32), Discrete(2))

    def reset(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = uniform(key)
        return state, state

    def step(self, state: jax.Array, action: jax.Array, key: jax.Array) -> JaxStep:
        state = state + 0.1 * (action - 0.5) + 0.4 * (uniform(key) - 0.5)
        return JaxStep(state, state, state.sum(), state[0] > 0.8, state[1] > 0.8)


class ToyState(NamedTuple):
    params: Any
    updates: jax.Array


@dataclass(frozen=True)
class Toy(Algorithm):
    """Policy gradient with a linear policy and no baseline."""

    unroll_length: int = 3
    rate: float = 0.1

    def init(self, key: jax.Array) -> ToyState:
        return ToyState({"w": 0.1 * jax.random.normal(key, (4, 2))}, jnp.int32(0))

    def act(self, params: Any, carry: Any, timestep: Timestep, key: jax.Array) -> Any:
        logits = timestep.observation @ params["w"]
        log_probs = jax.nn.log_softmax(logits)
        action = (uniform(key)[0] < jnp.exp(log_probs[1])).astype(jnp.int32)
        return action, log_probs[action], carry

    def value(self, params: Any, carry: Any, timestep: Timestep) -> jax.Array:
        return (timestep.observation @ params["w"]).sum()

    def loss(self, params: Any, batch: Any) -> jax.Array:
        log_probs = jax.nn.log_softmax(batch.observation @ params["w"])
        chosen = jnp.take_along_axis(log_probs, batch.action[..., None], -1)[..., 0]
        return -(chosen * (batch.reward + batch.bootstrap)).mean()

    def iteration(self, rl: RL, state: ToyState) -> tuple[ToyState, Metrics]:
        params = rl.broadcast(state.params)
        trajectory = rl.unroll(self.act, params, self.unroll_length, bootstrap=self.value)
        batch = rl.gather(trajectory)
        loss, gradients = jax.value_and_grad(self.loss)(state.params, batch)
        return self.updated(state, rl.mean(gradients)), {"loss": loss}

    def updated(self, state: ToyState, gradients: Any) -> ToyState:
        params = jax.tree.map(lambda p, g: p - self.rate * g, state.params, gradients)
        return ToyState(params, state.updates + 1)


@dataclass(frozen=True)
class RecurrentToy(Toy):
    """As `Toy`, with a carry that remembers past observations, and no two actors alike."""

    def initial_carry(self) -> Any:
        return {"memory": jnp.full((4,), 0.5), "steps": jnp.int32(0)}

    def act(self, params: Any, carry: Any, timestep: Timestep, key: jax.Array) -> Any:
        memory = 0.5 * carry["memory"] + timestep.observation + 0.1 * timestep.number
        action, log_prob, _ = super().act(params, (), timestep._replace(observation=memory), key)
        return action, (log_prob, carry), {"memory": memory, "steps": carry["steps"] + 1}

    def value(self, params: Any, carry: Any, timestep: Timestep) -> jax.Array:
        seen = timestep.observation + 0.1 * timestep.number
        return ((seen + carry["memory"]) @ params["w"]).sum()

    def loss(self, params: Any, batch: Any) -> jax.Array:
        memory = batch.extras[1]["memory"] + batch.carry["memory"]
        return super().loss(params, batch._replace(observation=batch.observation + memory))


@dataclass(frozen=True)
class TwoUnrolls(Toy):
    """Unrolls twice with different weights, which the learner computes before it broadcasts."""

    def iteration(self, rl: RL, state: ToyState) -> tuple[ToyState, Metrics]:
        first = self._unrolled(rl, state.params)
        gradients = rl.mean(jax.grad(self.loss)(state.params, first))
        halfway = self.updated(state, gradients)
        second = self._unrolled(rl, halfway.params)
        loss, gradients = jax.value_and_grad(self.loss)(halfway.params, second)
        return self.updated(halfway, rl.mean(gradients)), {"loss": loss}

    def _unrolled(self, rl: RL, params: Any) -> Any:
        return rl.gather(
            rl.unroll(self.act, rl.broadcast(params), self.unroll_length, bootstrap=self.value)
        )


@dataclass(frozen=True)
class ActorGradients(Toy):
    """Gradients on the actor side, applied by the learner, as A3C has it."""

    def iteration(self, rl: RL, state: ToyState) -> tuple[ToyState, Metrics]:
        params = rl.broadcast(jax.tree.map(lambda p: 2 * p, state.params))
        trajectory = rl.unroll(self.act, params, self.unroll_length, bootstrap=self.value)
        loss, gradients = jax.value_and_grad(self.loss)(params, trajectory)
        loss, gradients = rl.reduce((loss, gradients))
        return self.updated(state, rl.mean(gradients)), {"loss": loss}


def drift_task(num_envs: int = 4) -> Task:
    return Task(Drift.spec, num_envs, 1000)


def with_iteration(iteration: Callable[..., Any], base: type[Toy] = Toy) -> Toy:
    """`base` with another loop: `iteration(self, rl, state)`."""

    @dataclass(frozen=True)
    class Altered(base):
        pass

    Altered.iteration = iteration
    return Altered()


def line_of(function: Callable[..., Any], marker: str = "# here") -> str:
    """file:line of the marked line of a function."""
    source, first = inspect.getsourcelines(function)
    number = next(i for i, line in enumerate(source) if marker in line)
    return f"{inspect.getsourcefile(function)}:{first + number}"


def drift_actor(algorithm: Toy, num_envs: int, seed: int = 0) -> ActorState:
    """The actors' first state in `Drift`."""
    keys = environment_keys(jax.random.key(seed), num_envs)
    env_state, observation = batched.reset(Drift(), keys)
    return initial_actor(env_state, observation, algorithm.initial_carry(), keys)


@jax.jit
def drift_step(state: Any, action: Any, keys: jax.Array) -> batched.BatchStep:
    return batched.step(Drift(), state, action, keys)


def leaves_close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """Asserts that two pytrees hold the same numbers, to a tolerance; keys exactly."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), tolerance, tolerance)
