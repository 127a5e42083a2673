"""Who can be compared: ours with its options, the programs written by hand, and the peers."""

from dataclasses import dataclass, replace

from benchmarks.protocol import IMPALA_UNROLL


@dataclass(frozen=True)
class Contestant:
    name: str
    python: str
    """`dovetail`, or an environment of `interpreters.py`."""
    module: str
    arguments: tuple[str, ...]
    steps: int
    """Measured environment steps, or the most that is trained on the way to the threshold."""


OWN, GYMNAX, GYMNASIUM = "dovetail:CartPole-v1", "gymnax:CartPole-v1", "gymnasium:CartPole-v1"
ENVPOOL = "envpool:CartPole-v1?num_threads=1"
"""The learner needs the other core: with a thread for each it is half as fast."""
PONG = "ale:pong?max_num_frames_per_episode=4000"
"""Cut early so that a run's one evaluation, after its training, is not the longest part of it."""
ENVPOOL_PONG = "envpool:Pong-v5?max_episode_steps=1000"
PENDULUM, GYMNAX_PENDULUM = "gymnasium:Pendulum-v1", "gymnax:Pendulum-v1"
SLOW = "benchmarks/slow_env.py:Slow"


def ours(
    name: str,
    strategy: str,
    envs: int,
    env: str,
    steps: int,
    *more: str,
    settings: tuple[str, ...] = (),
) -> Contestant:
    """A run of Dovetail; `settings` are options of the strategy (and `num_envs`, if it is not the
    job's), `more` those of the job."""
    python = "envpool" if env.startswith("envpool:") else "dovetail"
    arguments = ("--strategy", strategy, "--num-envs", str(envs), "--env", env, *more)
    arguments += tuple(part for setting in settings for part in ("--set", setting))
    return Contestant(name, python, "benchmarks.ours", arguments, steps)


def impala(name: str, actors: int, envs: int, env: str, steps: int, *settings: str) -> Contestant:
    """IMPALA, asynchronous."""
    return ours(
        name,
        "actor-learner",
        envs,
        env,
        steps,
        *("--algorithm", "impala", "--unroll", str(IMPALA_UNROLL)),
        settings=(f"actors={actors}", *settings),
    )


def distributed(name: str, *more: str) -> Contestant:
    """IMPALA with unrolls of 64 steps of 32 environments, where Ray is installed."""
    made = impala(name, 2, 64, GYMNASIUM, 2_000_000, "processes=False")
    return replace(made, python="ray", arguments=(*made.arguments, "--unroll", "64", *more))


def hand(module: str, envs: int, steps: int) -> Contestant:
    path = f"benchmarks.handwritten.{module}"
    return Contestant("hand-written", "dovetail", path, ("--num-envs", str(envs)), steps)


def threads(name: str, actors: int, envs: int, env: str, steps: int) -> Contestant:
    """IMPALA as threads and queues."""
    python = "envpool" if env.startswith("envpool:") else "dovetail"
    arguments = ("--num-envs", str(envs), "--actors", str(actors), "--env", env)
    arguments += ("--unroll", str(IMPALA_UNROLL))
    return Contestant(name, python, "benchmarks.handwritten.threaded_impala", arguments, steps)


def gymnax_peers(steps: int) -> tuple[Contestant, ...]:
    envs = ("--num-envs", "64")
    pure = "benchmarks.handwritten.purejaxrl_ppo"
    return (
        Contestant("rejax", "rejax", "benchmarks.peers.rejax_ppo", envs, steps),
        Contestant("PureJaxRL-style", "rejax", pure, envs, steps),
    )


def torch_peer(name: str, module: str, steps: int) -> tuple[Contestant, ...]:
    return tuple(
        Contestant(
            f"{name}, {count} thread{'s' * (count > 1)}",
            "sb3",
            module,
            ("--num-envs", "8", "--threads", str(count)),
            steps,
        )
        for count in (1, 2)
    )


def stable_baselines(steps: int) -> tuple[Contestant, ...]:
    return torch_peer("stable-baselines3", "benchmarks.peers.sb3_ppo", steps)


def cleanrl(steps: int) -> tuple[Contestant, ...]:
    return torch_peer("CleanRL-style", "benchmarks.handwritten.cleanrl_ppo", steps)


def control(name: str, algorithm: str, strategy: str, steps: int) -> Contestant:
    """Ours on Pendulum, or DQN on CartPole; one environment, an update after every step."""
    pendulum = GYMNAX_PENDULUM if strategy == "fused" else PENDULUM
    cartpole = GYMNAX if strategy == "fused" else GYMNASIUM
    env = cartpole if algorithm == "dqn" else pendulum
    return ours(name, strategy, 1, env, steps, "--algorithm", algorithm, "--unroll", "1")


def baselines(library: str, algorithm: str, steps: int, updates: int = 1) -> tuple[Contestant, ...]:
    """stable-baselines3 with one torch thread and with two; sbx, which has XLA's."""
    python, name = ("sbx", "sbx") if library == "sbx" else ("sb3", "stable-baselines3")
    arguments = ("--library", library, "--algorithm", algorithm, "--updates", str(updates))
    arguments += ("--num-envs", "1", "--unroll", "1")
    return tuple(
        Contestant(
            name if library == "sbx" else f"{name}, {count} thread{'s' * (count > 1)}",
            python,
            "benchmarks.peers.baselines_control",
            (*arguments, "--threads", str(count)),
            steps,
        )
        for count in ((1,) if library == "sbx" else (1, 2))
    )


def alone(algorithm: str) -> Contestant:
    """Our gradient steps in one compiled loop, and nothing else."""
    arguments = ("--algorithm", algorithm, "--num-envs", "1", "--unroll", "1")
    return Contestant("gradient steps alone", "dovetail", "benchmarks.alone", arguments, 4000)


def rejax_control(algorithm: str, steps: int) -> Contestant:
    unroll = "2" if algorithm == "td3" else "1"
    arguments = ("--algorithm", algorithm, "--num-envs", "1", "--unroll", unroll)
    return Contestant("rejax", "rejax", "benchmarks.peers.rejax_control", arguments, steps)


def offline(algorithm: str, steps: int) -> tuple[Contestant, ...]:
    """Ours on recorded data, 50 gradient steps in a call, on one device and on two; a step is a
    gradient step. Nobody acts, but Fused has an environment for each device."""
    more = ("--algorithm", algorithm, "--unroll", "50")
    return tuple(
        ours(
            f"Fused, {count} device{'s' * (count > 1)}",
            "fused",
            1,
            "gymnasium:HalfCheetah-v5",
            steps,
            *more,
            settings=(f"num_envs={count}", f"devices={count}"),
        )
        for count in (1, 2)
    )


def torch_offline(
    algorithm: str, steps: int, module: str = "torch_offline"
) -> tuple[Contestant, ...]:
    """The same in torch, with one thread and with two."""
    arguments = ("--algorithm", algorithm, "--num-envs", "1", "--unroll", "1")
    return tuple(
        Contestant(
            f"torch, {count} thread{'s' * (count > 1)}",
            "sb3",
            f"benchmarks.handwritten.{module}",
            (*arguments, "--threads", str(count)),
            steps,
        )
        for count in (1, 2)
    )


def rllib(envs: int, steps: int) -> Contestant:
    """Two environment runners; with one environment each it is RLlib's own example."""
    arguments = ("--actors", "2", "--num-envs", str(envs), "--unroll", "50", "--threads", "1")
    return Contestant(
        f"RLlib, {envs} environments", "rllib", "benchmarks.peers.rllib_impala", arguments, steps
    )


def sample_factory(env: str, envs: int, steps: int) -> Contestant:
    """Two rollout workers."""
    arguments = ("--env", env, "--actors", "2", "--num-envs", str(envs))
    module = "benchmarks.peers.sample_factory_appo"
    return Contestant("Sample Factory", "sample_factory", module, arguments, steps)


def pong(name: str, strategy: str, env: str, steps: int, *settings: str) -> Contestant:
    """Ours on Atari Pong, 8 environments."""
    algorithm = "atari-appo" if strategy == "actor-learner" else "atari-ppo"
    return ours(name, strategy, 8, env, steps, "--algorithm", algorithm, settings=settings)


def pong_impala(name: str, strategy: str, steps: int, *settings: str) -> Contestant:
    """IMPALA with the same network on Atari Pong, 8 environments."""
    more = ("--algorithm", "atari-impala", "--unroll", str(IMPALA_UNROLL))
    return ours(name, strategy, 8, PONG, steps, *more, settings=settings)


def atari_peer(name: str, module: str, steps: int) -> Contestant:
    return Contestant(name, "sb3", module, ("--num-envs", "8", "--threads", "2"), steps)
