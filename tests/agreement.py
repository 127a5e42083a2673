"""What the interpreter computes, and how near to it a strategy must come."""

import dataclasses
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from small import LENGTH, STEPS, Started, a2c, numbers, ppo, reinforce
from small import interpreted as interpreted_from

from dovetail.algorithm import Algorithm, Task
from dovetail.algorithms import (
    A3C,
    D4PG,
    DDPG,
    DQN,
    IMPALA,
    QRDQN,
    R2D2,
    SAC,
    TD3,
    ApeX,
    SACDiscrete,
)
from dovetail.envs import batched
from dovetail.envs.interface import EnvSpec, HostEnv
from dovetail.envs.resolve import resolve
from dovetail.graph.unroll import Step
from dovetail.graph.unroll_spec import step_function
from dovetail.inspection.interpret import stepper
from dovetail.runtime.environments import initial_observation
from dovetail.training.start import first_state

ENVS, UPDATES, SEED = 8, 3, 3
CARTPOLE = "dovetail:CartPole-v1?limit=5"
HOST = "gymnasium:CartPole-v1?vectorization=sync&max_episode_steps=5"
PENDULUM = "gymnax:Pendulum-v1?max_steps_in_episode=5"
HOST_PENDULUM = "gymnasium:Pendulum-v1?vectorization=sync&max_episode_steps=5"
EVERYTHING: dict[str, Any] = {
    "recurrent": 4,
    "normalize_observations": True,
    "normalize_rewards": True,
}
REPLAY: dict[str, Any] = {"buffer_size": 64, "learning_starts": 1, "hidden_sizes": (8,)}
RAINBOW: dict[str, Any] = {
    "n_step": 3,
    "prioritized": True,
    "dueling": True,
    "distributional": True,
    "noisy": True,
    "atoms": 3,
}
REPLAYED: dict[str, Any] = {
    "unroll_length": LENGTH,
    "gradient_steps": 2,
    "batch_size": 4,
    "buffer_size": 64,
    "learning_starts": 1,
    "hidden_sizes": (8,),
}
ALGORITHMS: dict[str, Algorithm] = {
    "ppo": ppo(),
    "a2c": a2c(),
    "reinforce": reinforce(),
    "impala": IMPALA(LENGTH, hidden_sizes=(8,)),
    "a3c": A3C(LENGTH, hidden_sizes=(8,)),
    "ppo-recurrent": ppo(**EVERYTHING, clip_value=True, target_kl=0.02),
    "a2c-recurrent": a2c(**EVERYTHING, normalize_advantages=True),
    "reinforce-recurrent": reinforce(**EVERYTHING),
    "impala-recurrent": IMPALA(LENGTH, hidden_sizes=(8,), **EVERYTHING),
    "dqn": DQN(LENGTH, 2, 4, **REPLAY),
    "dqn-prioritized": DQN(LENGTH, 2, 4, **REPLAY, n_step=3, prioritized=True),
    "rainbow": DQN(LENGTH, 2, 4, **REPLAY, **RAINBOW),
    "qr-dqn": QRDQN(LENGTH, 2, 4, **REPLAY, quantiles=3),
    "apex": ApeX(LENGTH, 2, 4, **REPLAY),
    "r2d2": R2D2(LENGTH, 2, 4, **REPLAY, recurrent=4, burn_in=2, learned=3, period=2),
    "ddpg": DDPG(**REPLAYED),
    "d4pg": D4PG(**REPLAYED, prioritized=True, normalize_observations=True),
    "td3": TD3(**REPLAYED),
    "sac": SAC(**REPLAYED),
    "sac-droq": SAC(
        **REPLAYED, num_critics=3, mean_critic=True, policy_delay=2, layer_norm=True, dropout=0.1
    ),
    "sac-discrete": SACDiscrete(**REPLAYED, normalize_observations=True),
}
CONTINUOUS = ("ddpg", "d4pg", "td3", "sac", "sac-droq")
"""Algorithms that are compared on Pendulum; the others on CartPole."""


def assert_close(found: Any, expected: Any) -> None:
    """Equal to float tolerance; the keys and counters among the numbers are whole."""
    np.testing.assert_allclose(numbers(found), numbers(expected), rtol=1e-5, atol=1e-5)


def without_weights(state: Any) -> Any:
    """With several learners the moments weigh one learner's samples; only ratios matter."""
    if hasattr(state, "replay"):
        return without_order(state)
    return state._replace(
        moments=state.moments._replace(weight=np.zeros(())),
        return_moments=state.return_moments._replace(weight=np.zeros(())),
    )


def without_order(state: Any) -> Any:
    """Which of the items that several actors insert at once comes first is not told."""
    held = state.replay.state
    if held.items is None:
        return state
    held = held._replace(items=held.items._replace(serial=np.zeros(())))
    return state._replace(replay=dataclasses.replace(state.replay, state=held))


@cache
def interpreted(algorithm: str, env: str, shards: int = 1) -> tuple[Any, Any]:
    """(state, actor) where the plain loop takes them."""
    found = resolve(env)
    bound = ALGORITHMS[algorithm].bind(Task(found.spec, ENVS, STEPS, shards=shards))
    state, actor = first_state(bound, found.jax, ENVS, SEED)
    if found.jax is not None:
        return interpreted_from(bound, jax.jit(stepper(found.jax)), state, actor, UPDATES)
    assert found.host is not None
    host = found.host(ENVS)
    shown = initial_observation(host, actor.keys)
    actor = actor._replace(timestep=actor.timestep._replace(observation=shown))
    state, actor = interpreted_from(bound, called_back(host, found.spec), state, actor, UPDATES)
    jax.block_until_ready((state, actor))
    host.close()
    return state, actor


def called_back(host: HostEnv, spec: EnvSpec) -> Step:
    """Steps host environments from inside a compiled program, for `interpreted_from`."""
    shapes = step_function(None, spec, ENVS)

    def step(state: Any, action: Any, keys: jax.Array) -> batched.BatchStep:
        like: Any = jax.eval_shape(shapes, state, action, keys)[1:]

        def on_host(action: Any) -> Any:
            after = tuple(host.step(jax.tree.map(np.asarray, action)))
            return jax.tree.map(lambda x, s: np.array(x, s.dtype), after, like)

        return batched.BatchStep(state, *io_callback(on_host, like, action, ordered=True))

    return step


def advance_and_compare(running: Started, algorithm: str, env: str) -> None:
    """Some updates of a running training lead where the plain loop does."""
    before = numbers(running.state.params)
    running.advance(1)
    running.advance(UPDATES - 1)
    state, _ = interpreted(algorithm, env, running.plan.shards)
    assert np.abs(numbers(state.params) - before).max() > 1e-4
    assert_agrees(running, algorithm, env)


def assert_agrees(running: Started, algorithm: str, env: str) -> None:
    """After its first `UPDATES` updates, a training is where the plain loop is."""
    state, actor = interpreted(algorithm, env, running.plan.shards)
    assert int(state.updates) == UPDATES
    assert np.asarray(actor.step).tolist() == [UPDATES * LENGTH] * ENVS
    assert_close(running.state.params, state.params)
    assert_close(without_weights(running.state), without_weights(state))
    assert_close(running.actor, actor)
