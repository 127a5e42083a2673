"""PPO in torch as one plain loop over Gymnasium environments, the structure CleanRL made known.

    python -m benchmarks.handwritten.cleanrl_ppo --num-envs 8 --total-steps 50000 --threads 1

A `SyncVectorEnv`, tensors filled row by row, advantages in a Python loop, minibatches of permuted
samples. Written from that description; run in stable-baselines3's environment.
"""

from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from benchmarks import protocol as p


def tower(outputs: int, scale: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, size in zip((4, *p.HIDDEN), p.HIDDEN, strict=False):
        layers += [orthogonal(nn.Linear(inputs, size), 2**0.5), nn.Tanh()]
    return nn.Sequential(*layers, orthogonal(nn.Linear(p.HIDDEN[-1], outputs), scale))


def orthogonal(layer: Any, scale: float) -> Any:
    nn.init.orthogonal_(layer.weight, scale)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = tower(2, 0.01)
        self.value = tower(1, 1.0)

    def act(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        distribution = Categorical(logits=self.policy(x))
        action = distribution.sample()
        return action, distribution.log_prob(action), self.value(x).flatten()

    def judge(self, x: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
        distribution = Categorical(logits=self.policy(x))
        return distribution.log_prob(action), distribution.entropy(), self.value(x).flatten()

    def estimate(self, x: torch.Tensor) -> torch.Tensor:
        return self.value(x).flatten()


def cartpoles(num_envs: int) -> Any:
    envs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * num_envs)
    return gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)


class Training:
    """The loop, for any vector environment and any agent with `act`, `judge` and `estimate`."""

    def __init__(self, envs: Any, first: np.ndarray, agent: Any, learning_rate: float) -> None:
        self.envs, self.agent = envs, agent
        self.optimizer = torch.optim.Adam(
            self.agent.parameters(), lr=learning_rate, eps=p.ADAM_EPSILON
        )
        self.observation = torch.as_tensor(first)
        shape = (p.UNROLL, len(first))
        self.observations = torch.zeros((*shape, *first.shape[1:]), dtype=self.observation.dtype)
        self.actions = torch.zeros(shape, dtype=torch.int64)
        self.log_probs, self.rewards = torch.zeros(shape), torch.zeros(shape)
        self.dones, self.values = torch.zeros(shape), torch.zeros(shape)
        self.done = torch.zeros(len(first))

    def iterate(self, count: int) -> None:
        for _ in range(count):
            self.collect()
            self.update(*self.advantages())

    def collect(self) -> None:
        for t in range(p.UNROLL):
            self.observations[t], self.dones[t] = self.observation, self.done
            with torch.no_grad():
                action, self.log_probs[t], self.values[t] = self.agent.act(self.observation)
            self.actions[t] = action
            observation, reward, terminated, truncated, _ = self.envs.step(action.numpy())
            self.rewards[t] = torch.as_tensor(reward)
            self.observation = torch.as_tensor(observation)
            self.done = torch.as_tensor(np.logical_or(terminated, truncated), dtype=torch.float32)

    def advantages(self) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            next_value = self.agent.estimate(self.observation)
            advantages = torch.zeros_like(self.rewards)
            last = torch.zeros_like(next_value)
            going_on = 1.0 - self.done
            for t in reversed(range(p.UNROLL)):
                delta = self.rewards[t] + p.DISCOUNT * next_value * going_on - self.values[t]
                last = delta + p.DISCOUNT * p.LAMBDA * going_on * last
                advantages[t] = last
                going_on, next_value = 1.0 - self.dones[t], self.values[t]
        return advantages.flatten(), (advantages + self.values).flatten()

    def update(self, advantages: torch.Tensor, targets: torch.Tensor) -> None:
        observations, actions = self.observations.flatten(0, 1), self.actions.flatten()
        log_probs = self.log_probs.flatten()
        size = len(actions)
        indices = np.arange(size)
        for _ in range(p.EPOCHS):
            np.random.shuffle(indices)
            for chosen in np.split(indices, p.MINIBATCHES):
                loss = self.loss(
                    observations[chosen],
                    actions[chosen],
                    log_probs[chosen],
                    advantages[chosen],
                    targets[chosen],
                )
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), p.MAX_GRAD_NORM)
                self.optimizer.step()

    def loss(
        self,
        observations: torch.Tensor,
        actions: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        log_probs, entropy, values = self.agent.judge(observations, actions)
        ratio = (log_probs - old_log_probs).exp()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        clipped = torch.clamp(ratio, 1 - p.CLIP, 1 + p.CLIP)
        policy = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        error = 0.5 * (values - targets).square().mean()
        return policy + p.VALUE_COEFFICIENT * error - p.ENTROPY_COEFFICIENT * entropy.mean()

    def greedy(self, observation: Any) -> Any:
        with torch.no_grad():
            return self.agent.policy(torch.as_tensor(observation)).argmax(dim=-1).numpy()


def main() -> None:
    job = p.parse_job()
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    np.random.seed(job.seed)
    envs = cartpoles(job.envs)
    training = Training(envs, envs.reset(seed=job.seed)[0], Agent(), p.LEARNING_RATE)
    p.train_and_answer(job, training.iterate, training.greedy)


if __name__ == "__main__":
    main()
