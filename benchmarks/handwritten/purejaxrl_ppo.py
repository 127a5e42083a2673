"""PPO as the usual single JAX program, the structure that PureJaxRL made known.

    python -m benchmarks.handwritten.purejaxrl_ppo --num-envs 64 --total-steps 2000000

One key for the whole batch, split at every step; Gymnax's own autoreset, computed at every step;
statistics in the environment's state; every epoch permutes all samples; a flax network. Written
from that description, for Gymnax before 1.0, and run in rejax's environment.
"""

import time
from typing import Any, NamedTuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from benchmarks import protocol as p


class ActorCritic(nn.Module):
    """Two towers of tanh layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def tower(x: jax.Array, outputs: int, scale: float) -> jax.Array:
            for size in p.HIDDEN:
                x = nn.tanh(nn.Dense(size, kernel_init=nn.initializers.orthogonal(2**0.5))(x))
            return nn.Dense(outputs, kernel_init=nn.initializers.orthogonal(scale))(x)

        return tower(x, 2, 0.01), tower(x, 1, 1.0)[..., 0]


class Transition(NamedTuple):
    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array


class Runner(NamedTuple):
    train: TrainState
    env: Any
    observation: jax.Array
    episode_return: jax.Array
    last_return: jax.Array
    key: jax.Array


env, env_params = gymnax.make("CartPole-v1")
network = ActorCritic()


def start(num_envs: int, seed: int) -> Runner:
    key, network_key, reset_key = jax.random.split(jax.random.PRNGKey(seed), 3)
    optimizer = optax.chain(
        optax.clip_by_global_norm(p.MAX_GRAD_NORM), optax.adam(p.LEARNING_RATE, eps=p.ADAM_EPSILON)
    )
    params = network.init(network_key, jnp.zeros((1, 4)))
    train = TrainState.create(apply_fn=network.apply, params=params, tx=optimizer)
    reset_keys = jax.random.split(reset_key, num_envs)
    observation, state = jax.vmap(env.reset, (0, None))(reset_keys, env_params)
    zero = jnp.zeros(num_envs)
    return Runner(train, state, observation, zero, zero, key)


def env_step(runner: Runner, _: None) -> tuple[Runner, Transition]:
    key, action_key, step_key = jax.random.split(runner.key, 3)
    logits, value = network.apply(runner.train.params, runner.observation)
    action = jax.random.categorical(action_key, logits)
    log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=1)[:, 0]
    step_keys = jax.random.split(step_key, action.shape[0])
    observation, state, reward, done, _ = jax.vmap(env.step, (0, 0, 0, None))(
        step_keys, runner.env, action, env_params
    )
    returns = runner.episode_return + reward
    row = Transition(runner.observation, action, log_prob, value, reward, done)
    last = jnp.where(done, returns, runner.last_return)
    runner = Runner(runner.train, state, observation, returns * (1 - done), last, key)
    return runner, row


def advantages(rows: Transition, last_value: jax.Array) -> jax.Array:
    def step(carry: tuple[jax.Array, jax.Array], row: Transition) -> Any:
        advantage, next_value = carry
        going_on = 1 - row.done
        delta = row.reward + p.DISCOUNT * next_value * going_on - row.value
        advantage = delta + p.DISCOUNT * p.LAMBDA * going_on * advantage
        return (advantage, row.value), advantage

    start = (jnp.zeros_like(last_value), last_value)
    return jax.lax.scan(step, start, rows, reverse=True, unroll=16)[1]


def loss(
    params: Any, rows: Transition, advantage: jax.Array, target: jax.Array
) -> tuple[jax.Array, Any]:
    logits, value = network.apply(params, rows.observation)
    log_probs = jax.nn.log_softmax(logits)
    log_prob = jnp.take_along_axis(log_probs, rows.action[:, None], axis=1)[:, 0]
    ratio = jnp.exp(log_prob - rows.log_prob)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = jnp.clip(ratio, 1 - p.CLIP, 1 + p.CLIP)
    policy = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
    error = 0.5 * jnp.square(value - target).mean()
    entropy = -(jnp.exp(log_probs) * log_probs).sum(axis=-1).mean()
    total = policy + p.VALUE_COEFFICIENT * error - p.ENTROPY_COEFFICIENT * entropy
    return total, (policy, error, entropy)


def iteration(runner: Runner, _: None) -> tuple[Runner, Any]:
    runner, rows = jax.lax.scan(env_step, runner, None, p.UNROLL)
    last_value = network.apply(runner.train.params, runner.observation)[1]
    advantage = advantages(rows, last_value)
    batch = (rows, advantage, advantage + rows.value)

    def minibatch(train: TrainState, chosen: Any) -> tuple[TrainState, Any]:
        (total, parts), gradients = jax.value_and_grad(loss, has_aux=True)(train.params, *chosen)
        return train.apply_gradients(grads=gradients), (total, parts)

    def epoch(carry: tuple[TrainState, jax.Array], _: None) -> Any:
        train, key = carry
        key, permutation_key = jax.random.split(key)
        size = advantage.size
        order = jax.random.permutation(permutation_key, size)

        def shuffle(x: jax.Array) -> jax.Array:
            flat = jnp.take(x.reshape(size, *x.shape[2:]), order, axis=0)
            return flat.reshape(p.MINIBATCHES, -1, *x.shape[2:])

        train, losses = jax.lax.scan(minibatch, train, jax.tree.map(shuffle, batch))
        return (train, key), losses

    (train, key), losses = jax.lax.scan(epoch, (runner.train, runner.key), None, p.EPOCHS)
    metrics = (runner.last_return.mean(), *jax.tree.map(jnp.mean, losses))
    return runner._replace(train=train, key=key), metrics


def many_iterations(runner: Runner, count: jax.Array) -> Runner:
    return jax.lax.fori_loop(0, count, lambda _, runner: iteration(runner, None)[0], runner)


@jax.jit
def greedy(params: Any, observation: jax.Array) -> jax.Array:
    return network.apply(params, observation)[0].argmax(axis=-1)


def main() -> None:
    job = p.parse_job()
    runner = jax.jit(lambda: start(job.envs, job.seed))()
    began = time.perf_counter()
    program = jax.jit(many_iterations).lower(runner, np.int32(1)).compile()
    compile_s = time.perf_counter() - began
    state = [runner]

    def iterate(count: int) -> None:
        state[0] = jax.block_until_ready(program(state[0], np.int32(count)))

    p.train_and_answer(job, iterate, lambda x: greedy(state[0].train.params, x), compile_s)


if __name__ == "__main__":
    main()
