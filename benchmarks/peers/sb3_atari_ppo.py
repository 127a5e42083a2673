"""stable-baselines3's PPO on Atari Pong, with its own wrappers and its own Nature CNN.

    python -m benchmarks.peers.sb3_atari_ppo --num-envs 8 --total-steps 8192 --threads 2

Environments are stepped in turn in this process, as `make_atari_env` makes them. Every sample is
learned from in 4 epochs, each of 4 minibatches. Speeds are those of agent steps: four frames each.
"""

import ale_py  # noqa: F401  registers the games
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack

from benchmarks import protocol as p


def main() -> None:
    job = p.parse_job()
    torch.set_num_threads(job.threads)
    games = make_atari_env("PongNoFrameskip-v4", n_envs=job.envs, seed=job.seed)
    model = PPO(
        "CnnPolicy",
        VecFrameStack(games, n_stack=4),
        learning_rate=p.ATARI_LEARNING_RATE,
        n_steps=job.unroll,
        batch_size=job.per_iteration // p.MINIBATCHES,
        n_epochs=p.EPOCHS,
        gamma=p.DISCOUNT,
        gae_lambda=p.LAMBDA,
        clip_range=p.CLIP,
        ent_coef=p.ENTROPY_COEFFICIENT,
        vf_coef=p.VALUE_COEFFICIENT,
        max_grad_norm=p.MAX_GRAD_NORM,
        seed=job.seed,
        device="cpu",
    )

    def iterate(count: int) -> None:
        model.learn(count * job.per_iteration, reset_num_timesteps=False)

    p.train_and_answer(job, iterate, lambda x: model.predict(x, deterministic=True)[0])


if __name__ == "__main__":
    main()
