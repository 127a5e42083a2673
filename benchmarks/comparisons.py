"""What is compared with what, and the figure to reach: the table that `run.py` works through."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.contestants import (
    ENVPOOL,
    ENVPOOL_PONG,
    GYMNASIUM,
    GYMNAX,
    OWN,
    PONG,
    SLOW,
    Contestant,
    alone,
    atari_peer,
    baselines,
    cleanrl,
    control,
    distributed,
    gymnax_peers,
    hand,
    impala,
    offline,
    ours,
    pong,
    pong_impala,
    rejax_control,
    rllib,
    sample_factory,
    stable_baselines,
    threads,
    torch_offline,
)

Metric = Literal["steps_per_s", "time_to_threshold_s", "env_steps_to_threshold"]


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
    turn: int = 0
    """Steps of a turn, if all train side by side, and each waits while another one goes on."""


def async_gymnasium(steps: int) -> tuple[Contestant, ...]:
    """IMPALA under ActorLearner on Gymnasium's CartPole, acting and stepping in threads."""
    return (
        impala("ActorLearner, 1 actor", 1, 128, GYMNASIUM, steps, "processes=False"),
        impala("ActorLearner, 2 actors", 2, 128, GYMNASIUM, steps, "processes=False"),
    )


def pong_ppo(steps: int) -> tuple[Contestant, ...]:
    return (
        pong("Local, ALE", "local", PONG, steps),
        pong("Local, EnvPool", "local", ENVPOOL_PONG, steps),
    )


def slow_local(steps: int) -> Contestant:
    return ours("Local", "local", 8, SLOW, steps, "--algorithm", "impala", "--unroll", "32")


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
            ours("Fused, 2 devices", "fused", 64, GYMNAX, 2_000_000, settings=("devices=2",)),
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
    Comparison(
        "async-rllib",
        "Asynchronous IMPALA against RLlib's, Gymnasium CartPole",
        async_gymnasium(2_000_000),
        (rllib(2, 20_000), rllib(32, 60_000)),
        (("steps_per_s", 5.0),),
    ),
    Comparison(
        "async-sample-factory",
        "Asynchronous IMPALA against Sample Factory's APPO, Gymnasium CartPole",
        async_gymnasium(2_000_000),
        (sample_factory("CartPole-v1", 40, 60_000),),
        (("steps_per_s", 3.0),),
    ),
    Comparison(
        "async-sebulba",
        "Asynchronous IMPALA against the same as hand-written threads over EnvPool, CartPole",
        (
            impala("ActorLearner, EnvPool, 1 actor", 1, 128, ENVPOOL, 2_000_000),
            impala("ActorLearner, EnvPool, 2 actors", 2, 128, ENVPOOL, 2_000_000),
            impala("ActorLearner, Gymnasium", 1, 128, GYMNASIUM, 2_000_000, "processes=False"),
        ),
        (
            threads("Sebulba-style, 1 actor", 1, 128, ENVPOOL, 2_000_000),
            threads("Sebulba-style, 2 actors", 2, 128, ENVPOOL, 2_000_000),
        ),
        (("steps_per_s", 1.0),),
    ),
    Comparison(
        "async-threshold",
        "Asynchronous, until the mean greedy return is 475: wall time, evaluations included",
        (
            impala("ActorLearner, 32 environments", 1, 32, GYMNASIUM, 3_000_000, "processes=False"),
            impala("ActorLearner, 64 environments", 1, 64, GYMNASIUM, 3_000_000, "processes=False"),
            impala("ActorLearner, EnvPool, 64", 1, 64, ENVPOOL, 3_000_000),
        ),
        (
            rllib(2, 500_000),
            rllib(32, 1_000_000),
            sample_factory("CartPole-v1", 40, 2_000_000),
            threads("Sebulba-style, EnvPool, 64", 1, 64, ENVPOOL, 3_000_000),
        ),
        (("time_to_threshold_s", 1.0),),
        threshold=True,
    ),
    Comparison(
        "atari-cleanrl",
        "PPO on Atari Pong against CleanRL-style torch and EnvPool; a step is 4 frames",
        pong_ppo(8192),
        (atari_peer("CleanRL-style", "benchmarks.handwritten.cleanrl_atari_ppo", 8192),),
        (("steps_per_s", 1.5),),
    ),
    Comparison(
        "atari-sb3",
        "PPO on Atari Pong against stable-baselines3; a step is 4 frames",
        pong_ppo(8192),
        (atari_peer("stable-baselines3", "benchmarks.peers.sb3_atari_ppo", 8192),),
        (("steps_per_s", 1.5),),
    ),
    Comparison(
        "atari-sample-factory",
        "APPO on Atari Pong against Sample Factory's, 4 epochs each; a step is 4 frames",
        (
            pong("ActorLearner", "actor-learner", PONG, 8192, "actors=1"),
            *pong_ppo(8192),
        ),
        (sample_factory("atari_pong", 8, 6144),),
        (("steps_per_s", 1.5),),
    ),
    Comparison(
        "atari-impala",
        "IMPALA (a pass over the samples) on Atari Pong against the others' PPO (4 epochs)",
        (
            pong_impala("IMPALA, Local", "local", 8192),
            pong_impala("IMPALA, ActorLearner", "actor-learner", 8192, "actors=1"),
        ),
        (
            atari_peer("CleanRL-style", "benchmarks.handwritten.cleanrl_atari_ppo", 8192),
            atari_peer("stable-baselines3", "benchmarks.peers.sb3_atari_ppo", 8192),
            sample_factory("atari_pong", 8, 6144),
        ),
        (("steps_per_s", 1.5),),
    ),
    Comparison(
        "links-threads",
        "ActorLearner against the same as two hand-written threads, Gymnasium CartPole",
        async_gymnasium(3_000_000)[:1],
        (threads("hand-written threads", 1, 128, GYMNASIUM, 3_000_000),),
        (("steps_per_s", 0.97),),
    ),
    Comparison(
        "cluster-impala",
        "2 actors and a learner as Ray processes against the same in threads, 64 × 32 unrolls",
        (distributed("Ray", "--cluster", "local"),),
        (distributed("threads"),),
        (("steps_per_s", 0.7),),
    ),
    Comparison(
        "scaling-actor-learner",
        "2 actors with processes against Local, 8 environments of 2 ms a step",
        (
            ours(
                "ActorLearner, 2 actors",
                "actor-learner",
                8,
                SLOW,
                8192,
                *("--algorithm", "impala", "--unroll", "32"),
                settings=("actors=2", "processes=True"),
            ),
        ),
        (slow_local(8192),),
        (("steps_per_s", 1.8),),
    ),
    Comparison(
        "scaling-environments",
        "2 environment workers against Local, 8 environments of 2 ms a step",
        (
            ours(
                "Environments, 2 workers",
                "environments",
                8,
                SLOW,
                8192,
                *("--algorithm", "impala", "--unroll", "32"),
                settings=("workers=2", "processes=True"),
            ),
        ),
        (slow_local(8192),),
        (("steps_per_s", 1.8),),
    ),
    *(
        comparison
        for name, env, sbx, sb3, turn in (
            ("sac", "Pendulum", 1.5, 4.0, 100),
            ("td3", "Pendulum", 1.5, 4.0, 100),
            ("dqn", "CartPole", 2.0, 5.0, 1000),
        )
        for comparison in (
            Comparison(
                f"{name}-rejax",
                f"Fused {name.upper()} against rejax's, Gymnax {env}, an update per step",
                (control("Fused", name, "fused", 8000),),
                (rejax_control(name, 4000),),
                (("steps_per_s", 1.2),),
            ),
            Comparison(
                f"{name}-sbx",
                f"Local {name.upper()} against sbx's, one Gymnasium {env}, an update per step",
                (control("Local", name, "local", 8000),),
                baselines("sbx", name, 4000),
                (("steps_per_s", sbx),),
                turn=turn,
            ),
            Comparison(
                f"{name}-sb3",
                f"Local {name.upper()} against stable-baselines3's, as before",
                (control("Local", name, "local", 8000),),
                baselines("stable_baselines3", name, 2000),
                (("steps_per_s", sb3),),
                turn=turn,
            ),
        )
    ),
    *(
        Comparison(
            f"{name}-torch-{style}",
            f"{title} on recorded data against a torch loop, {how}; a step is a gradient step",
            offline(name, 4000),
            torch_offline(name, 2000, module),
            (("steps_per_s", 2.0),),
            turn=100,
        )
        for name, title in (("iql", "IQL"), ("td3-bc", "TD3+BC"))
        for style, how, module in (
            ("plain", "as it is usually written", "torch_offline_plain"),
            ("tuned", "written for speed", "torch_offline"),
        )
    ),
    *(
        Comparison(
            f"{name}-alone",
            f"{name.upper()}'s gradient steps in one loop, nothing else, against sbx's whole steps",
            (alone(name),),
            baselines("sbx", name, 4000),
            (("steps_per_s", 1.5),),
            turn=100,
        )
        for name in ("sac", "td3")
    ),
    Comparison(
        "sac-high-ratio",
        "Local SAC against sbx's, one Gymnasium Pendulum, 20 updates per step in one call",
        (control("Local", "sac-high-ratio", "local", 800),),
        baselines("sbx", "sac", 400, updates=20),
        (("steps_per_s", 3.0),),
        turn=10,
    ),
)
