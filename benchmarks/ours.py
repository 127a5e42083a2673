"""Dovetail's side of every comparison.

    python -m benchmarks.ours --policy fused --envs 64 --steps 2000000

Mode `speed` is a whole `dovetail.train` as a user would start it, metrics, checkpoints and all; the
speed is read from the run's `metrics.csv`, from the first eighth of the steps on, so compiling and
warming up do not count. Mode `threshold` advances the same runtime by hand, because the shared
evaluation comes at fixed numbers of steps and outside the clock.
"""

import argparse
import csv
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

import dovetail as dt
from benchmarks import protocol as p
from dovetail.algorithm import Task, Timestep
from dovetail.envs.resolve import resolve
from dovetail.planning import plan_for, prepare_backend
from dovetail.runtime.local import Runtime
from dovetail.training.start import enable_compile_cache, first_state


def algorithm() -> Any:
    return dt.algorithms.PPO(
        unroll_length=p.UNROLL,
        epochs=p.EPOCHS,
        minibatches=p.MINIBATCHES,
        hidden=p.HIDDEN,
        learning_rate=p.LEARNING_RATE,
        anneal=False,
        discount=p.DISCOUNT,
        lambda_=p.LAMBDA,
        clip=p.CLIP,
        value_coefficient=p.VALUE_COEFFICIENT,
        entropy_coefficient=p.ENTROPY_COEFFICIENT,
        max_grad_norm=p.MAX_GRAD_NORM,
    )


def distribution_policy(name: str, job: p.Job) -> Any:
    if name == "local":
        return dt.policies.Local(envs=job.envs)
    return dt.policies.Fused(envs=job.envs, devices=job.devices)


def measure_speed(job: p.Job, policy: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = dt.Settings(
            folder=str(Path(folder) / "run"),
            evaluate_every=0,
            episodes=1,
            video=False,
            display="none",
        )
        iterations = job.iterations + max(1, job.iterations // 8)
        steps = iterations * job.per_iteration
        run = dt.train(algorithm(), job.env, policy, steps=steps, seed=job.seed, settings=settings)
        with (Path(run.path) / "metrics.csv").open() as file:
            rows = [(float(r["time_s"]), float(r["env_steps"])) for r in csv.DictReader(file)]
        first = next(row for row in rows if row[1] >= steps / 8 or row is rows[-2])
        last = rows[-1]
        more = {k: run.summary[k] for k in ("compile_s", "wall_s")}
        more["reported_steps_per_s"] = run.summary["steps_per_s"]
        p.answer(job, int(last[1] - first[1]), last[0] - first[0], **more)


class Training:
    """The runtime that `train` uses, advanced from outside."""

    def __init__(self, job: p.Job, policy: Any) -> None:
        prepare_backend(policy)
        enable_compile_cache()
        found = resolve(job.env, traced=policy.traced_envs)
        planned = plan_for(algorithm(), found, policy, job.steps)
        self.algorithm = algorithm().bind(Task(found.spec, job.envs, job.steps))
        env = found.jax if found.jax is not None else found.host(job.envs)  # type: ignore[misc]
        self.runtime = Runtime(planned.graph, planned.plan, env)
        self.runtime.load(*first_state(self.algorithm, env, job.envs, job.seed, 1))
        self._greedy = jax.jit(self._choose)

    def iterate(self, count: int) -> None:
        self.runtime.advance(count)
        jax.block_until_ready(self.runtime.state)

    def greedy(self, observation: Any) -> Any:
        return self._greedy(self.algorithm.acting(self.runtime.state), observation)

    def _choose(self, params: Any, observation: Any) -> Any:
        def one(observation: Any) -> Any:
            timestep = Timestep(observation, 0.0, False)  # type: ignore[arg-type]
            return self.algorithm.greedy(params, self.algorithm.initial_carry(), timestep)[0]

        return jax.vmap(one)(observation)


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--policy", choices=("fused", "local"), default="fused")
    chosen, sys.argv[1:] = parser.parse_known_args()
    job = p.parse_job()
    policy = distribution_policy(chosen.policy, job)
    if job.mode == "speed":
        measure_speed(job, policy)
        return
    began = time.perf_counter()
    training = Training(job, policy)
    if chosen.policy == "local":  # acting compiles at its first call
        training.iterate(1)
        training = Training(job, policy)
    compile_s = time.perf_counter() - began
    p.train_and_answer(job, training.iterate, training.greedy, compile_s)


if __name__ == "__main__":
    main()
