"""rejax's SAC and TD3 on Gymnax Pendulum-v1, DQN on its CartPole-v1; one environment.

    python -m benchmarks.peers.rejax_control --algorithm sac --num-envs 1 --unroll 1

Its `train_iteration` is compiled in a loop, as its own `train` does between two evaluations. An
iteration of TD3 takes as many steps as its policy is delayed: give it --unroll 2.
"""

import argparse
import sys
import time
from typing import Any

import jax
import numpy as np
from rejax import DQN, SAC, TD3

from benchmarks import protocol as p


def create(name: str) -> Any:
    shared: dict[str, Any] = {
        "env": "Pendulum-v1",
        "num_envs": 1,
        "batch_size": p.CONTROL_BATCH,
        "buffer_size": p.CONTROL_CAPACITY,
        "fill_buffer": p.CONTROL_BEGIN_AT,
        "learning_rate": p.CONTROL_LEARNING_RATE,
        "gamma": p.DISCOUNT,
        "polyak": 1.0 - p.CONTROL_TARGET_RATE,
        "target_update_freq": 1,
        "max_grad_norm": np.inf,
    }
    if name == "dqn":
        less = {"env": "CartPole-v1", "batch_size": p.DQN_BATCH}
        plain = {"agent_kwargs": {"activation": "relu"}, "ddqn": False}
        return DQN.create(**(shared | less | plain))
    if name == "sac":
        return SAC.create(
            agent_kwargs={"activation": "relu"}, hidden_layer_sizes=p.CONTROL_HIDDEN, **shared
        )
    relu = {"activation": "relu"}
    made = TD3.create(actor_kwargs=relu, critic_kwargs=dict(relu), **shared)
    wide = {"hidden_layer_sizes": p.CONTROL_HIDDEN}  # its own sizes cannot be given
    return made.replace(actor=made.actor.clone(**wide), critic=made.critic.clone(**wide))


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--algorithm", choices=("sac", "td3", "dqn"), default="sac")
    options, sys.argv[1:] = parser.parse_known_args()
    job = p.parse_job()
    algorithm = create(options.algorithm)
    train_state = jax.jit(algorithm.init_state)(jax.random.PRNGKey(job.seed))

    def many_iterations(train_state: Any, count: Any) -> Any:
        return jax.lax.fori_loop(
            0, count, lambda _, state: algorithm.train_iteration(state), train_state
        )

    began = time.perf_counter()
    program = jax.jit(many_iterations).lower(train_state, np.int32(1)).compile()
    compile_s = time.perf_counter() - began
    state = [train_state]

    def iterate(count: int) -> None:
        state[0] = jax.block_until_ready(program(state[0], np.int32(count)))

    p.train_and_answer(job, iterate, lambda x: x, compile_s)


if __name__ == "__main__":
    main()
