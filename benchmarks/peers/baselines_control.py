"""stable-baselines3's or sbx's SAC and TD3 on Gymnasium Pendulum-v1, DQN on CartPole-v1.

    python -m benchmarks.peers.baselines_control --library sbx --algorithm sac --updates 20

sbx is stable-baselines3 with the learning in JAX; the two are called alike, each in its own
environment.
"""

import argparse
import importlib
import sys

import torch

from benchmarks import protocol as p


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--library", choices=("stable_baselines3", "sbx"), required=True)
    parser.add_argument("--algorithm", choices=("sac", "td3", "dqn"), default="sac")
    parser.add_argument("--updates", type=int, default=1)
    options, sys.argv[1:] = parser.parse_known_args()
    job = p.parse_job()
    torch.set_num_threads(job.threads)
    kind = getattr(importlib.import_module(options.library), options.algorithm.upper())
    discrete = options.algorithm == "dqn"
    more = {"target_update_interval": 1} if discrete else {}
    model = kind(
        "MlpPolicy",
        "CartPole-v1" if discrete else "Pendulum-v1",
        learning_rate=p.CONTROL_LEARNING_RATE,
        buffer_size=p.CONTROL_CAPACITY,
        learning_starts=p.CONTROL_BEGIN_AT,
        batch_size=p.DQN_BATCH if discrete else p.CONTROL_BATCH,
        tau=p.CONTROL_TARGET_RATE,
        gamma=p.DISCOUNT,
        train_freq=1,
        gradient_steps=options.updates,
        policy_kwargs={"net_arch": list(p.DQN_HIDDEN if discrete else p.CONTROL_HIDDEN)},
        seed=job.seed,
        device="cpu",
        **more,
    )

    def iterate(count: int) -> None:
        model.learn(count * job.per_iteration, reset_num_timesteps=False)

    iterate(2 * p.CONTROL_BEGIN_AT)  # learning has begun and is compiled before the clock starts
    p.train_and_answer(job, iterate, lambda x: model.predict(x, deterministic=True)[0])


if __name__ == "__main__":
    main()
