"""Environments in two processes of ours against Gymnasium's AsyncVectorEnv, a process for each.

    python -m benchmarks.env_processes [--repeats N] [--quick]

All contestants are there from the beginning and take turns in every round, so that whatever the
machine does meets all. A ratio is taken in each round, and its median counts.
"""

import argparse
import json
import statistics
import time
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from dovetail.envs.gymnasium_cartpole import CartPoles
from dovetail.envs.makers import synchronous
from dovetail.envs.processes import ProcessVectorEnv

ENVS, PROCESSES = 16, 2
RESETS = AutoresetMode.SAME_STEP
TARGETS = {"cartpole": 3.0, "busy": 1.0, "empty": 10.0}
OURS, ASYNC = f"ours, {PROCESSES} processes", f"AsyncVectorEnv, {ENVS} processes"


class Busy(gymnasium.Env):
    """A step takes a millisecond of the processor's time, however many share the processor."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    seen = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.seen, {}

    def step(self, action: Any) -> Any:
        end = time.thread_time() + 1e-3
        while time.thread_time() < end:
            pass
        return self.seen, 1.0, False, False, {}


class Empty(VectorEnv):
    """A step does nothing."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.seen = np.zeros((num_envs, 4), np.float32)
        self.reward, self.no = np.zeros(num_envs), np.zeros(num_envs, np.bool_)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.seen, {}

    def step(self, actions: Any) -> Any:
        return self.seen, self.reward, self.no, self.no, {}


def contestants(one: Any) -> dict[str, VectorEnv]:
    """The same single environments, stepped in three ways."""
    many = [one] * ENVS
    return {
        OURS: ProcessVectorEnv(
            partial(synchronous, one, RESETS), ENVS, "ours", processes=PROCESSES
        ),
        ASYNC: AsyncVectorEnv(
            many, context="spawn", shared_memory=True, copy=False, autoreset_mode=RESETS
        ),
        "SyncVectorEnv": SyncVectorEnv(many, copy=False, autoreset_mode=RESETS),
    }


def rate(env: VectorEnv, steps: int) -> float:
    """Environment steps per second."""
    action = np.tile([0, 1], env.num_envs)[: env.num_envs]
    began = time.perf_counter()
    for _ in range(steps):
        env.step(action)
    return steps * env.num_envs / (time.perf_counter() - began)


def measure(envs: dict[str, VectorEnv], steps: int, repeats: int) -> dict[str, list[float]]:
    """The rate of each in every round."""
    for env in envs.values():
        env.reset(seed=list(range(env.num_envs)))
        rate(env, max(1, steps // 10))
    rates: dict[str, list[float]] = {name: [] for name in envs}
    for _ in range(repeats):
        for name, env in envs.items():
            rates[name].append(rate(env, steps))
    for env in envs.values():
        env.close()
    return rates


def compare(name: str, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Ours against AsyncVectorEnv; the others are shown beside them."""
    for contestant, found in rates.items():
        print(f"{name:9} {contestant:32} {statistics.median(found):12,.0f} steps/s")
    ratio = statistics.median(a / b for a, b in zip(rates[OURS], rates[ASYNC], strict=True))
    return verdict(name, ratio, ratio >= TARGETS[name], f"{ratio:.2f} × {ASYNC}", rates)


def verdict(name: str, value: float, met: bool, text: str, rates: Any) -> dict[str, Any]:
    target = TARGETS[name]
    print(f"{name:9} {text}; target {target:g}: {'reached' if met else 'MISSED'}")
    return {"value": value, "target": target, "met": met, "rates": rates}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    repeats, share = (3, 5) if options.quick else (options.repeats, 1)
    results: dict[str, Any] = {}

    one = partial(gymnasium.make, "CartPole-v1", disable_env_checker=True)
    envs = contestants(one)
    envs["ours, vector entry point"] = ProcessVectorEnv(
        CartPoles, ENVS, "ours", processes=PROCESSES, seeding=list
    )
    results["cartpole"] = compare("cartpole", measure(envs, 1500 // share, repeats))

    results["busy"] = compare("busy", measure(contestants(Busy), 60 // share, repeats))

    empty = ProcessVectorEnv(Empty, 1, "ours")
    rates = measure({"ours": empty}, 20_000 // share, repeats)
    trip = 1e6 / statistics.median(rates["ours"])
    met = trip <= TARGETS["empty"]
    results["empty"] = verdict("empty", trip, met, f"a round trip of {trip:.1f} µs", rates)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
