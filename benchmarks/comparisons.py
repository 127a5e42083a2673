"""What is compared with what, and the figure to reach: the table that `run.py` works through."""

from dataclasses import dataclass
from typing import Literal

Metric = Literal["steps_per_s", "time_to_threshold_s", "env_steps_to_threshold"]


@dataclass(frozen=True)
class Contestant:
    name: str
    python: str
    """`dovetail`, or a peer of `interpreters.py`."""
    module: str
    arguments: tuple[str, ...]
    steps: int
    """Measured environment steps, or the most that is trained on the way to the threshold."""


@dataclass(frozen=True)
class Comparison:
    name: str
    title: str
    ours: tuple[Contestant, ...]
    """Variants of ours; the best counts."""
    others: tuple[Contestant, ...]
    """The best of these is what we are compared with."""
    metrics: tuple[tuple[Metric, float], ...]
    """What is measured, and how many times better than the others' best we want to be."""
    threshold: bool = False
    """Whether each repeat trains to the threshold with its own seed, instead of for a time."""


def ours(name: str, policy: str, envs: int, env: str, steps: int, devices: int = 1) -> Contestant:
    arguments = ("--policy", policy, "--envs", str(envs), "--env", env, "--devices", str(devices))
    return Contestant(name, "dovetail", "benchmarks.ours", arguments, steps)


def hand(module: str, envs: int, steps: int) -> Contestant:
    path = f"benchmarks.handwritten.{module}"
    return Contestant("hand-written", "dovetail", path, ("--envs", str(envs)), steps)


def gymnax_peers(steps: int) -> tuple[Contestant, ...]:
    envs = ("--envs", "64")
    pure = "benchmarks.handwritten.purejaxrl_ppo"
    return (
        Contestant("rejax", "rejax", "benchmarks.peers.rejax_ppo", envs, steps),
        Contestant("PureJaxRL-style", "rejax", pure, envs, steps),
    )


def torch_peer(name: str, module: str, steps: int) -> tuple[Contestant, ...]:
    return tuple(
        Contestant(
            f"{name}, {threads} thread{'s' * (threads > 1)}",
            "sb3",
            module,
            ("--envs", "8", "--threads", str(threads)),
            steps,
        )
        for threads in (1, 2)
    )


def stable_baselines(steps: int) -> tuple[Contestant, ...]:
    return torch_peer("stable-baselines3", "benchmarks.peers.sb3_ppo", steps)


def cleanrl(steps: int) -> tuple[Contestant, ...]:
    return torch_peer("CleanRL-style", "benchmarks.handwritten.cleanrl_ppo", steps)


OWN, GYMNAX, GYMNASIUM = "dovetail:CartPole-v1", "gymnax:CartPole-v1", "gymnasium:CartPole-v1"

COMPARISONS = (
    Comparison(
        "fused-64",
        "Fused against the same PPO written by hand, 64 environments",
        (ours("Fused", "fused", 64, OWN, 2_000_000),),
        (hand("fused_ppo", 64, 2_000_000),),
        (("steps_per_s", 0.97),),
    ),
    Comparison(
        "fused-2048",
        "Fused against the same PPO written by hand, 2048 environments",
        (ours("Fused", "fused", 2048, OWN, 4_000_000),),
        (hand("fused_ppo", 2048, 4_000_000),),
        (("steps_per_s", 0.97),),
    ),
    Comparison(
        "local-8",
        "Local against the same PPO written by hand, 8 Gymnasium environments",
        (ours("Local", "local", 8, GYMNASIUM, 250_000),),
        (hand("local_ppo", 8, 250_000),),
        (("steps_per_s", 0.95),),
    ),
    Comparison(
        "gymnax",
        "Fused against fused peers, Gymnax CartPole, 64 environments",
        (
            ours("Fused", "fused", 64, GYMNAX, 2_000_000),
            ours("Fused, 2 devices", "fused", 64, GYMNAX, 2_000_000, devices=2),
        ),
        gymnax_peers(1_000_000),
        (("steps_per_s", 1.8),),
    ),
    Comparison(
        "gymnax-threshold",
        "The same, until the mean greedy return is 475",
        (ours("Fused", "fused", 64, GYMNAX, 1_000_000),),
        gymnax_peers(1_000_000),
        (("env_steps_to_threshold", 1.0), ("time_to_threshold_s", 1.0)),
        threshold=True,
    ),
    Comparison(
        "sb3",
        "Local against stable-baselines3, 8 Gymnasium environments",
        (ours("Local", "local", 8, GYMNASIUM, 250_000),),
        stable_baselines(20_000),
        (("steps_per_s", 10.0),),
    ),
    Comparison(
        "cleanrl",
        "Local against CleanRL-style torch, 8 Gymnasium environments",
        (ours("Local", "local", 8, GYMNASIUM, 250_000),),
        cleanrl(40_000),
        (("steps_per_s", 5.0),),
    ),
    Comparison(
        "torch-threshold",
        "The same, until the mean greedy return is 475",
        (ours("Local", "local", 8, GYMNASIUM, 500_000),),
        (*stable_baselines(500_000)[:1], *cleanrl(500_000)[:1]),
        (("time_to_threshold_s", 1.0), ("env_steps_to_threshold", 1.0)),
        threshold=True,
    ),
)
