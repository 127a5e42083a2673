"""PPO in torch as one plain loop over an EnvPool of Atari Pong, the structure CleanRL made known.

    python -m benchmarks.handwritten.cleanrl_atari_ppo --num-envs 8 --total-steps 8192 --threads 2

The loop of `cleanrl_ppo.py` with the Nature CNN, whose features policy and value share. Every
sample is learned from in 4 epochs, each of 4 minibatches. Written from that description; run in
stable-baselines3's environment. Speeds are those of agent steps: four frames each.
"""

import envpool
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from benchmarks import protocol as p
from benchmarks.handwritten.cleanrl_ppo import Training, orthogonal


class Agent(nn.Module):
    def __init__(self, actions: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            orthogonal(nn.Conv2d(4, 32, 8, stride=4), 2**0.5),
            nn.ReLU(),
            orthogonal(nn.Conv2d(32, 64, 4, stride=2), 2**0.5),
            nn.ReLU(),
            orthogonal(nn.Conv2d(64, 64, 3, stride=1), 2**0.5),
            nn.ReLU(),
            nn.Flatten(),
            orthogonal(nn.Linear(64 * 7 * 7, 512), 2**0.5),
            nn.ReLU(),
        )
        self.policy = orthogonal(nn.Linear(512, actions), 0.01)
        self.value = orthogonal(nn.Linear(512, 1), 1.0)

    def see(self, x: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        features = self.features(x / 255.0)
        return Categorical(logits=self.policy(features)), self.value(features).flatten()

    def act(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        distribution, value = self.see(x)
        action = distribution.sample()
        return action, distribution.log_prob(action), value

    def judge(self, x: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
        distribution, value = self.see(x)
        return distribution.log_prob(action), distribution.entropy(), value

    def estimate(self, x: torch.Tensor) -> torch.Tensor:
        return self.see(x)[1]


def main() -> None:
    job = p.parse_job()
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    np.random.seed(job.seed)
    games = envpool.make(
        "Pong-v5",
        env_type="gymnasium",
        num_envs=job.envs,
        num_threads=job.threads,
        seed=job.seed,
        episodic_life=True,
        reward_clip=True,
    )
    agent = Agent(int(games.action_space.n))
    training = Training(games, games.reset()[0], agent, p.ATARI_LEARNING_RATE)
    p.train_and_answer(job, training.iterate, training.greedy)


if __name__ == "__main__":
    main()
