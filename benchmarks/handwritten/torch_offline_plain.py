"""IQL and TD3+BC in torch as their published single-file implementations have them.

    python -m benchmarks.handwritten.torch_offline_plain --algorithm iql --threads 2

Written from the description: two critics that are modules of their own, an optimizer and a backward
pass for each loss, torch's default Adam, targets that follow parameter by parameter. The other file
is what becomes of it with care for speed.
"""

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.functional import mse_loss

from benchmarks import protocol as p
from benchmarks.handwritten.torch_offline import Batch, Mlp, frozen, run


class Twins(nn.Module):
    """Two critics."""

    def __init__(self) -> None:
        super().__init__()
        size = p.OFFLINE_OBSERVATION + p.OFFLINE_ACTION
        self.first, self.second = Mlp(size, 1), Mlp(size, 1)

    def forward(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([observation, action], dim=1)
        return self.first(both)[:, 0], self.second(both)[:, 0]


def adam(module: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(module.parameters(), p.CONTROL_LEARNING_RATE)


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def follow(target: nn.Module, source: nn.Module) -> None:
    rate = p.CONTROL_TARGET_RATE
    for old, new in zip(target.parameters(), source.parameters(), strict=True):
        old.data.copy_((1 - rate) * old.data + rate * new.data)


class Policy(nn.Module):
    """A mean in [-1, 1], and a deviation that is the same everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = Mlp(p.OFFLINE_OBSERVATION, p.OFFLINE_ACTION)
        self.log_std = nn.Parameter(torch.zeros(p.OFFLINE_ACTION))

    def forward(self, observation: Tensor) -> Normal:
        mean, log_std = torch.tanh(self.mean(observation)), self.log_std.clamp(-5.0, 2.0)
        return Normal(mean, log_std.exp(), validate_args=False)


class Iql:
    def __init__(self) -> None:
        self.critics, self.value, self.actor = Twins(), Mlp(p.OFFLINE_OBSERVATION, 1), Policy()
        self.target = frozen(self.critics)
        self.optimizers = [adam(part) for part in (self.value, self.critics, self.actor)]

    def step(self, batch: Batch) -> None:
        observation, action, reward, discount, following = batch
        by_value, by_critics, by_actor = self.optimizers
        with torch.no_grad():
            worth = torch.min(*self.target(observation, action))
            goal = reward + discount * self.value(following)[:, 0]
        advantage = worth - self.value(observation)[:, 0]
        scale = torch.where(advantage < 0, 1 - p.IQL_EXPECTILE, p.IQL_EXPECTILE)
        descend(by_value, (scale * advantage**2).mean())
        first, second = self.critics(observation, action)
        descend(by_critics, mse_loss(first, goal) + mse_loss(second, goal))
        follow(self.target, self.critics)
        weights = torch.exp(p.IQL_INVERSE_TEMPERATURE * advantage.detach()).clamp(max=100.0)
        likely = self.actor(observation).log_prob(action).sum(1)
        descend(by_actor, -(weights * likely).mean())


class Td3Bc:
    def __init__(self) -> None:
        self.critics, self.actor = Twins(), Mlp(p.OFFLINE_OBSERVATION, p.OFFLINE_ACTION)
        self.target, self.target_actor = frozen(self.critics), frozen(self.actor)
        self.by_critics, self.by_actor = adam(self.critics), adam(self.actor)
        self.steps = 0

    def step(self, batch: Batch) -> None:
        observation, action, reward, discount, following = batch
        with torch.no_grad():
            noise = (0.2 * torch.randn_like(action)).clamp(-0.5, 0.5)
            then = (torch.tanh(self.target_actor(following)) + noise).clamp(-1.0, 1.0)
            goal = reward + discount * torch.min(*self.target(following, then))
        first, second = self.critics(observation, action)
        descend(self.by_critics, mse_loss(first, goal) + mse_loss(second, goal))
        self.steps += 1
        if self.steps % 2:
            return
        own = torch.tanh(self.actor(observation))
        values = self.critics.first(torch.cat([observation, own], dim=1))[:, 0]
        scale = p.TD3_BC_VALUE_WEIGHT / values.abs().mean().detach()
        descend(self.by_actor, mse_loss(own, action) - scale * values.mean())
        follow(self.target, self.critics)
        follow(self.target_actor, self.actor)


if __name__ == "__main__":
    run(Iql, Td3Bc)
