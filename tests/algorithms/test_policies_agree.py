"""The promise: every synchronous policy computes what the interpreter computes."""

from typing import Any

import jax
import numpy as np
import pytest
from small import LENGTH, a2c, host_step, interpreted, jax_step, numbers, ppo, reinforce, runtime_of

from dovetail.algorithm import Algorithm, Task
from dovetail.envs.interface import HostEnv
from dovetail.envs.resolve import resolve
from dovetail.policies.fused import Fused
from dovetail.policies.interface import Policy
from dovetail.policies.local import Local
from dovetail.training.start import first_state

ENVS = 8
UPDATES = 3
EVERYTHING: dict[str, Any] = {
    "recurrent": 4,
    "normalise_observations": True,
    "normalise_rewards": True,
}
ALGORITHMS = {
    "ppo": ppo(),
    "a2c": a2c(),
    "reinforce": reinforce(),
    "ppo-recurrent": ppo(**EVERYTHING, clip_value=True, target_kl=0.02),
    "a2c-recurrent": a2c(**EVERYTHING, normalise_advantages=True),
    "reinforce-recurrent": reinforce(**EVERYTHING),
}


def assert_close(found: Any, expected: Any) -> None:
    """Equal to float tolerance; the keys and counters among the numbers are whole."""
    np.testing.assert_allclose(numbers(found), numbers(expected), rtol=1e-5, atol=1e-5)


def without_weights(state: Any) -> Any:
    """With several learners the moments weigh one learner's samples; only ratios matter."""
    return state._replace(
        moments=state.moments._replace(weight=np.zeros(())),
        return_moments=state.return_moments._replace(weight=np.zeros(())),
    )


@pytest.fixture(scope="module", params=ALGORITHMS)
def cartpole(request: pytest.FixtureRequest) -> Any:
    """An algorithm, its first states on the JAX cart-pole, and where the interpreter takes them."""
    env = resolve("dovetail:CartPole-v1?limit=5").jax
    assert env is not None
    algorithm = ALGORITHMS[request.param]
    bound = algorithm.bind(Task(env.spec, ENVS, 1000))
    state, actor = first_state(bound, env, ENVS, seed=3, seeds=1)
    expected = interpreted(bound, jax_step(env), state, actor, UPDATES)
    return algorithm, env, (state, actor), expected


@pytest.mark.parametrize("chosen", ["fused", "fused on several devices", "local"])
def test_a_policy_equals_the_interpreter(cartpole: Any, chosen: str) -> None:
    algorithm, env, start, (state, actor) = cartpole
    several = Fused(ENVS, devices=2 if algorithm.recurrent else 4)
    policies: dict[str, Policy] = {"fused": Fused(ENVS), "local": Local(ENVS)}
    runtime = runtime_of(algorithm, env, policies.get(chosen, several))
    runtime.load(*start)
    runtime.advance(1)
    runtime.advance(UPDATES - 1)
    assert_close(runtime.state.params, state.params)
    assert_close(without_weights(runtime.state), without_weights(state))
    assert_close(runtime.actor, actor)


def test_the_interpreter_moved(cartpole: Any) -> None:
    _, _, (before, _), (after, actor) = cartpole
    assert np.abs(numbers(after.params) - numbers(before.params)).max() > 1e-4
    assert int(after.updates) == UPDATES
    assert np.asarray(actor.step).tolist() == [UPDATES * LENGTH] * ENVS


def first_host_state(algorithm: Algorithm, env_id: str) -> tuple[HostEnv, Any]:
    found = resolve(env_id)
    assert found.host is not None
    env = found.host(4)
    return env, first_state(algorithm.bind(Task(env.spec, 4, 1000)), env, 4, seed=3, seeds=1)


@pytest.mark.parametrize(
    ("algorithm", "autoreset"),
    [
        ("ppo-recurrent", "next_step"),
        ("ppo-recurrent", "same_step"),
        ("ppo-recurrent", "disabled"),
        ("a2c", "next_step"),
        ("reinforce", "same_step"),
    ],
)
def test_local_equals_the_interpreter_on_the_host(algorithm: str, autoreset: str) -> None:
    chosen = ALGORITHMS[algorithm]
    env_id = f"gymnasium:CartPole-v1?vectorization=sync&autoreset={autoreset}&max_episode_steps=5"
    env, start = first_host_state(chosen, env_id)
    bound = chosen.bind(Task(env.spec, 4, 1000))
    state, actor = interpreted(bound, host_step(env), start[0], start[1], UPDATES)
    env.close()
    env, start = first_host_state(chosen, env_id)
    runtime = runtime_of(chosen, env, Local(4))
    runtime.load(*start)
    runtime.advance(UPDATES)
    env.close()
    assert_close(runtime.state, state)
    assert_close(runtime.actor, actor)


def test_several_devices_do_split_the_environments() -> None:
    env = resolve("dovetail:CartPole-v1").jax
    assert env is not None
    runtime = runtime_of(a2c(), env, Fused(ENVS, devices=4))
    bound = a2c().bind(Task(env.spec, ENVS, 1000))
    runtime.load(*first_state(bound, env, ENVS, seed=0, seeds=1))
    runtime.advance(1)
    shards = runtime.actor.step.addressable_shards
    assert [shard.data.shape for shard in shards] == [(2,)] * 4
    assert len({shard.device for shard in shards}) == 4 == len(jax.devices())
