"""IQL and TD3+BC as plain torch loops over tensors in memory: what a careful user would write.

    python -m benchmarks.handwritten.torch_offline --algorithm iql --threads 2

Twin critics are one batched product, targets follow by one fused operation, Adam is torch's fused
one, and nothing asks for a number of a tensor while it trains. A step is a gradient step.
"""

import argparse
import copy
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import protocol as p


class Layers(nn.Module):
    """`count` networks of the same sizes side by side: [count, n, inputs] → [count, n, outputs]."""

    def __init__(self, count: int, *sizes: int) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(sizes))
        self.weights = nn.ParameterList([torch.randn(count, i, o) / i**0.5 for i, o in pairs])
        self.biases = nn.ParameterList([torch.zeros(count, 1, o) for _, o in pairs])

    def forward(self, x: Tensor) -> Tensor:
        x = x.expand(len(self.biases[0]), *x.shape)
        last = len(self.biases) - 1
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            if i < last:
                x = torch.relu_(x)
        return x


class Mlp(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        first, second = p.CONTROL_HIDDEN
        super().__init__(
            nn.Linear(inputs, first),
            nn.ReLU(inplace=True),
            nn.Linear(first, second),
            nn.ReLU(inplace=True),
            nn.Linear(second, outputs),
        )


Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def batches() -> Iterator[Batch]:
    """Random transitions for ever: (observation, action, reward, discount, following)."""
    count, size, actions = p.OFFLINE_STEPS, p.OFFLINE_OBSERVATION, p.OFFLINE_ACTION
    table = torch.randn(count, 2 * size + actions + 2)
    table[:, size : size + actions].clamp_(-1.0, 1.0)
    table[:, -1] = p.DISCOUNT
    parts = [size, actions, 1, size, 1]
    while True:
        rows = table[torch.randint(count, (p.CONTROL_BATCH,))]  # one gather for all of a batch
        observation, action, reward, following, discount = rows.split(parts, dim=1)
        yield observation, action, reward[:, 0], discount[:, 0], following


def adam(*modules: nn.Module) -> torch.optim.Adam:
    params = [param for module in modules for param in module.parameters()]
    return torch.optim.Adam(params, p.CONTROL_LEARNING_RATE, fused=True)


def frozen(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).requires_grad_(False)


@torch.no_grad()
def follow(target: list[Tensor], source: list[Tensor]) -> None:
    torch._foreach_lerp_(target, source, p.CONTROL_TARGET_RATE)


class Iql:
    def __init__(self) -> None:
        size, actions = p.OFFLINE_OBSERVATION, p.OFFLINE_ACTION
        self.critics = Layers(2, size + actions, *p.CONTROL_HIDDEN, 1)
        self.target = frozen(self.critics)
        self.value, self.actor = Mlp(size, 1), Mlp(size, actions)
        self.log_std = nn.Parameter(torch.zeros(actions))
        self.optimizer = adam(
            self.critics, self.value, self.actor, nn.ParameterList([self.log_std])
        )
        self.pair = list(self.target.parameters()), list(self.critics.parameters())

    def step(self, batch: Batch) -> None:
        observation, action, reward, discount, following = batch
        both = torch.cat([observation, action], dim=1)
        with torch.no_grad():
            worth = self.target(both)[..., 0].amin(0)
            goal = reward + discount * self.value(following)[:, 0]
        advantage = worth - self.value(observation)[:, 0]
        scale = torch.where(advantage < 0, 1 - p.IQL_EXPECTILE, p.IQL_EXPECTILE)
        loss = (scale * advantage.square()).mean()
        weights = torch.exp(p.IQL_INVERSE_TEMPERATURE * advantage.detach()).clamp_max(100.0)
        loss = loss + (self.critics(both)[..., 0] - goal).square().sum(0).mean()
        mean, log_std = torch.tanh(self.actor(observation)), self.log_std.clamp(-5.0, 2.0)
        likely = (-0.5 * ((action - mean) * torch.exp(-log_std)).square() - log_std).sum(1)
        loss = loss - (weights * likely).mean()
        self.optimizer.zero_grad()
        loss.backward()  # the losses share no parameter: one pass gives each its own gradient
        self.optimizer.step()
        follow(*self.pair)


class Td3Bc:
    def __init__(self) -> None:
        size, actions = p.OFFLINE_OBSERVATION, p.OFFLINE_ACTION
        self.critics = Layers(2, size + actions, *p.CONTROL_HIDDEN, 1)
        self.actor = Mlp(size, actions)
        self.target, self.target_actor = frozen(self.critics), frozen(self.actor)
        self.critic_optimizer, self.actor_optimizer = adam(self.critics), adam(self.actor)
        old = [*self.target.parameters(), *self.target_actor.parameters()]
        self.pair = old, [*self.critics.parameters(), *self.actor.parameters()]
        self.steps = 0

    def step(self, batch: Batch) -> None:
        observation, action, reward, discount, following = batch
        with torch.no_grad():
            noise = (0.2 * torch.randn_like(action)).clamp_(-0.5, 0.5)
            then = (torch.tanh(self.target_actor(following)) + noise).clamp_(-1.0, 1.0)
            values = self.target(torch.cat([following, then], dim=1))[..., 0].amin(0)
            goal = reward + discount * values
        values = self.critics(torch.cat([observation, action], dim=1))[..., 0]
        loss = (values - goal).square().sum(0).mean()
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        self.steps += 1
        if self.steps % 2 == 0:
            self.improve(observation, action)

    def improve(self, observation: Tensor, action: Tensor) -> None:
        """The policy's step; the critics' weights get no gradient of it."""
        own = torch.tanh(self.actor(observation))
        x = torch.cat([observation, own], dim=1)
        layers = list(zip(self.critics.weights, self.critics.biases, strict=True))
        for weight, bias in layers[:-1]:
            x = torch.relu_(torch.addmm(bias[0].detach(), x, weight[0].detach()))
        weight, bias = layers[-1]
        values = torch.addmm(bias[0].detach(), x, weight[0].detach())
        size = values.detach().abs().mean()
        loss = (own - action).square().mean() - p.TD3_BC_VALUE_WEIGHT * values.mean() / size
        self.actor_optimizer.zero_grad()
        loss.backward()
        self.actor_optimizer.step()
        follow(*self.pair)


def run(iql: Callable[[], Any], td3_bc: Callable[[], Any]) -> None:
    """Answers a job with one of two learners; each has `step(batch)`."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--algorithm", choices=("iql", "td3-bc"), default="iql")
    options, sys.argv[1:] = parser.parse_known_args()
    job = p.parse_job()
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    learner = iql() if options.algorithm == "iql" else td3_bc()
    stream = batches()

    def iterate(count: int) -> None:
        for _ in range(count * job.per_iteration):
            learner.step(next(stream))

    p.train_and_answer(job, iterate, lambda x: x)


if __name__ == "__main__":
    run(Iql, Td3Bc)
