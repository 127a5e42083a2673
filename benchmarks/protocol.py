"""What every contestant is asked, and how it answers: one JSON object on its last line.

The question is a `Job`. In mode `speed` a contestant trains for `steps` environment steps after
everything was compiled and warmed up; in mode `turns` it does so again and again, each time that it
gets a line, and answers each time; in mode `threshold` it trains until the shared evaluation
reaches `THRESHOLD`, and neither compiling nor evaluating counts as training time. Actors that run
ahead go on while the learner is evaluated, so for asynchronous contestants evaluating does count.
Standard library and numpy only: this file is imported in the peers' own environments.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

UNROLL = 128
EPOCHS = 4
MINIBATCHES = 4
HIDDEN = (64, 64)
LEARNING_RATE = 5e-4
"""Chosen of 5e-4, 1e-3 and 2e-3 after looking at all three: RESULTS.md shows what each gives."""
DISCOUNT = 0.99
LAMBDA = 0.95
CLIP = 0.2
VALUE_COEFFICIENT = 0.5
ENTROPY_COEFFICIENT = 0.01
MAX_GRAD_NORM = 0.5
ADAM_EPSILON = 1e-5

IMPALA_UNROLL = 32
IMPALA_LEARNING_RATE = 2e-3
"""Of ours and of the hand-written threads; the peers have the rates that they recommend."""

CONTROL_HIDDEN = (256, 256)
CONTROL_BATCH = 256
DQN_HIDDEN = (64, 64)
DQN_BATCH = 64
CONTROL_LEARNING_RATE = 3e-4
CONTROL_TARGET_RATE = 0.005
CONTROL_CAPACITY = 100_000
CONTROL_BEGIN_AT = 100
"""Of SAC and TD3: the defaults of stable-baselines3, but for a smaller replay."""
HIGH_RATIO = 20
"""Gradient steps for each step of the environment, where that is compared."""

OFFLINE_STEPS = 100_000
OFFLINE_OBSERVATION, OFFLINE_ACTION = 17, 6
"""Recorded transitions, random numbers of HalfCheetah's sizes."""
IQL_EXPECTILE = 0.7
IQL_INVERSE_TEMPERATURE = 3.0
TD3_BC_VALUE_WEIGHT = 2.5

ATARI_LEARNING_RATE = 2.5e-4
FRAMES_PER_STEP = 4
"""Emulator frames in which an action is repeated."""

READY = "ready"
"""What a contestant says before its first turn."""

THRESHOLD = 475.0
EVALUATE_EVERY = 8192
"""Environment steps between two evaluations."""
EVALUATE_SECONDS = 0.5
"""About how long an asynchronous contestant trains between two evaluations."""
EVALUATION_EPISODES = 100


@dataclass(frozen=True)
class Job:
    mode: Literal["speed", "turns", "threshold"]
    envs: int
    steps: int
    """In mode `turns`, of a turn; in mode `threshold`, the most that is trained."""
    seed: int
    threads: int
    """Of torch; JAX has one pool for all cores."""
    devices: int
    env: str
    """Used by contestants that have the choice."""
    unroll: int = UNROLL
    """Steps of each environment between two updates."""
    actors: int = 1
    """Threads or processes that act, where a contestant has such."""

    @property
    def per_iteration(self) -> int:
        """Environment steps between two updates."""
        return self.unroll * self.envs

    @property
    def iterations(self) -> int:
        return max(1, self.steps // self.per_iteration)


def parse_job() -> Job:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("speed", "turns", "threshold"), default="speed")
    parser.add_argument("--num-envs", dest="envs", type=int, default=8)
    parser.add_argument("--total-steps", dest="steps", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--env", default="dovetail:CartPole-v1")
    parser.add_argument("--unroll", type=int, default=UNROLL)
    parser.add_argument("--actors", type=int, default=1)
    return Job(**vars(parser.parse_args()))


def answer(job: Job, steps: int, seconds: float, **more: Any) -> None:
    """Prints the contestant's one line."""
    line = {"steps": steps, "seconds": seconds, "steps_per_s": steps / seconds, **more}
    print(json.dumps({"mode": job.mode, "envs": job.envs, "seed": job.seed, **line}), flush=True)


class Turns:
    """The turns of a contestant that is ready: it says so, and waits for the first."""

    def __init__(self, job: Job) -> None:
        self._job = job
        print(READY, flush=True)
        self._began, self._used = self._begin()

    def end(self, steps: int) -> None:
        """Answers for a turn, and waits for the next; when there is none, the process ends."""
        seconds, used = time.perf_counter() - self._began, time.process_time() - self._used
        answer(self._job, steps, seconds, processor_s=used)
        self._began, self._used = self._begin()

    def _begin(self) -> tuple[float, float]:
        if not sys.stdin.readline():
            raise SystemExit
        return time.perf_counter(), time.process_time()


def train_and_answer(
    job: Job,
    iterate: Callable[[int], None],
    greedy: Callable[[Any], Any],
    compile_s: float = 0.0,
) -> None:
    """Runs a contestant that can be advanced by a number of iterations.

    `iterate(n)` trains n iterations and returns when they are done; `greedy` maps observations
    [N, 4] to actions [N], both numpy.
    """
    if job.mode == "speed":
        iterate(max(1, job.iterations // 8))
        began, used = time.perf_counter(), time.process_time()
        iterate(job.iterations)
        seconds, used = time.perf_counter() - began, time.process_time() - used
        steps = job.iterations * job.per_iteration
        answer(job, steps, seconds, processor_s=used, compile_s=compile_s)
        return
    if job.mode == "turns":
        turns = Turns(job)
        while True:
            iterate(job.iterations)
            turns.end(job.iterations * job.per_iteration)
    chunk = max(1, EVALUATE_EVERY // job.per_iteration)
    steps, seconds, mean = 0, 0.0, 0.0
    while mean < THRESHOLD and steps < job.steps:
        began = time.perf_counter()
        iterate(chunk)
        seconds += time.perf_counter() - began
        steps += chunk * job.per_iteration
        mean = evaluate(greedy, job.seed)
    answer(job, steps, seconds, compile_s=compile_s, **reached(mean, steps, seconds))


def train_on_the_clock(
    job: Job,
    iterate: Callable[[int], int],
    greedy: Callable[[Any], Any],
    compile_s: float = 0.0,
) -> None:
    """Runs an asynchronous contestant to the threshold: evaluations are part of the time.

    `iterate(n)` trains about n iterations and returns the environment steps that they took.
    """
    steps, count, mean = 0, 1, 0.0
    began = time.perf_counter()
    while mean < THRESHOLD and steps < job.steps:
        before = time.perf_counter()
        steps += iterate(count)
        took = time.perf_counter() - before
        mean = evaluate(greedy, job.seed)
        count = max(1, min(2 * count, round(count * EVALUATE_SECONDS / max(took, 1e-6))))
    seconds = time.perf_counter() - began
    answer(job, steps, seconds, compile_s=compile_s, **reached(mean, steps, seconds))


def reached(mean: float, steps: int, seconds: float) -> dict[str, float | None]:
    """The fields that say when the threshold was reached, if it was."""
    solved = mean >= THRESHOLD
    return {
        "final_return": mean,
        "time_to_threshold_s": seconds if solved else None,
        "env_steps_to_threshold": steps if solved else None,
    }


def evaluate(greedy: Callable[[Any], Any], seed: int) -> float:
    """The mean return of the first episode in each of 100 fresh Gymnasium CartPoles."""
    import numpy as np
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

    envs = CartPoleVectorEnv(num_envs=EVALUATION_EPISODES)
    observation, _ = envs.reset(seed=10_000 + seed)
    returns = np.zeros(EVALUATION_EPISODES)
    going = np.ones(EVALUATION_EPISODES, bool)
    while going.any():
        action = np.asarray(greedy(observation.astype(np.float32)))
        observation, reward, terminated, truncated, _ = envs.step(action)
        returns += going * reward
        going &= ~(terminated | truncated)
    envs.close()
    return float(returns.mean())
