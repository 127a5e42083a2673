"""rejax's PPO on Gymnax CartPole-v1.

    python -m benchmarks.peers.rejax_ppo --num-envs 64 --total-steps 2000000

Its `train_iteration` is compiled in a loop, as its own `train` does between two evaluations.
"""

import time
from typing import Any

import jax
import numpy as np
from rejax import PPO

from benchmarks import protocol as p


def main() -> None:
    job = p.parse_job()
    algorithm = PPO.create(
        env="CartPole-v1",
        agent_kwargs={"activation": "tanh", "hidden_layer_sizes": p.HIDDEN},
        num_envs=job.envs,
        num_steps=p.UNROLL,
        num_epochs=p.EPOCHS,
        num_minibatches=p.MINIBATCHES,
        learning_rate=p.LEARNING_RATE,
        max_grad_norm=p.MAX_GRAD_NORM,
        gamma=p.DISCOUNT,
        gae_lambda=p.LAMBDA,
        clip_eps=p.CLIP,
        vf_coef=p.VALUE_COEFFICIENT,
        ent_coef=p.ENTROPY_COEFFICIENT,
    )
    train_state = jax.jit(algorithm.init_state)(jax.random.PRNGKey(job.seed))

    def many_iterations(train_state: Any, count: Any) -> Any:
        return jax.lax.fori_loop(
            0, count, lambda _, state: algorithm.train_iteration(state), train_state
        )

    began = time.perf_counter()
    program = jax.jit(many_iterations).lower(train_state, np.int32(1)).compile()
    compile_s = time.perf_counter() - began
    state = [train_state]

    @jax.jit
    def greedy(params: Any, observation: Any) -> Any:
        distribution = algorithm.actor.apply(params, observation, method="_action_dist")
        return distribution.mode()

    def iterate(count: int) -> None:
        state[0] = jax.block_until_ready(program(state[0], np.int32(count)))

    p.train_and_answer(job, iterate, lambda x: greedy(state[0].actor_ts.params, x), compile_s)


if __name__ == "__main__":
    main()
