"""Dovetail's side of every comparison.

    python -m benchmarks.ours --strategy fused --num-envs 64 --total-steps 2000000
    python -m benchmarks.ours --algorithm impala --strategy actor-learner --set actors=2

Mode `speed` is a whole `dovetail.train` as a user would start it, metrics, checkpoints and all.
Only the moments at which iterations are done are noted from outside; the speed is that from the
first eighth of the steps on, or from when learning has begun, so compiling and warming up do not
count. Mode `turns` is the same training, which pauses between its turns. Mode `threshold` advances
the same runtime by hand: in step with the shared evaluation, which comes at fixed numbers of steps
and outside the clock, or, where actors run ahead, with evaluations on the clock.
"""

import argparse
import ast
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import jax

import dovetail as dt
from benchmarks import protocol as p
from benchmarks.data_stream import make
from dovetail.algorithm import Task, Timestep
from dovetail.envs.resolve import resolve
from dovetail.runtime.local import LocalRuntime
from dovetail.training.place import Place
from dovetail.training.planning import plan_for, prepare_backend, resolve_strategy
from dovetail.training.start import enable_compile_cache, first_state

ALGORITHMS = (
    *("ppo", "impala", "atari-ppo", "atari-appo", "atari-impala"),
    *("sac", "td3", "sac-high-ratio", "dqn"),
    *("iql", "td3-bc"),
)
OFFLINE = ("iql", "td3-bc")
"""Those that learn from recorded data alone: their steps are gradient steps, `unroll` of them in a
call."""
FOREVER = 10**9
"""Steps of a training that ends when it gets no more turns."""
MEASURED = ("share_", "staleness", "dropped", "act_batch", "message_ms")
"""Columns of metrics.csv that say where the time went, by how they begin."""


def algorithm(name: str = "ppo", unroll: int = p.UNROLL) -> Any:
    """The algorithm with the options that are the same for everybody."""
    if name == "dqn":
        return dqn(unroll)
    if name in ("sac", "td3", "sac-high-ratio"):
        return control(name, unroll)
    if name in OFFLINE:
        return offline(name, unroll)
    shared = {
        "unroll_length": unroll,
        "hidden_sizes": p.HIDDEN,
        "anneal_lr": False,
        "gamma": p.DISCOUNT,
        "vf_coef": p.VALUE_COEFFICIENT,
        "ent_coef": p.ENTROPY_COEFFICIENT,
        "max_grad_norm": p.MAX_GRAD_NORM,
    }
    if name == "impala":
        return dt.algorithms.IMPALA(learning_rate=p.IMPALA_LEARNING_RATE, **shared)
    ppo = {
        "epochs": p.EPOCHS,
        "num_minibatches": p.MINIBATCHES,
        "gae_lambda": p.LAMBDA,
        "clip_range": p.CLIP,
    }
    if name.startswith("atari"):  # the Nature CNN's 512 features go straight into the two heads
        shared |= {"hidden_sizes": (), "learning_rate": p.ATARI_LEARNING_RATE}
        if name == "atari-impala":
            return dt.algorithms.IMPALA(**shared)
        if name == "atari-appo":
            ppo["vtrace_lambda"] = ppo.pop("gae_lambda")
            return dt.algorithms.APPO(**shared, **ppo)
        return dt.algorithms.PPO(**shared, **ppo)
    return dt.algorithms.PPO(learning_rate=p.LEARNING_RATE, **shared, **ppo)


def control(name: str, unroll: int) -> Any:
    """SAC or TD3 with as many gradient steps as steps, or 20 for each."""
    kind = dt.algorithms.TD3 if name == "td3" else dt.algorithms.SAC
    return kind(
        unroll_length=unroll,
        gradient_steps=p.HIGH_RATIO * unroll if name == "sac-high-ratio" else 0,
        batch_size=p.CONTROL_BATCH,
        learning_rate=p.CONTROL_LEARNING_RATE,
        gamma=p.DISCOUNT,
        buffer_size=p.CONTROL_CAPACITY,
        learning_starts=p.CONTROL_BEGIN_AT,
        tau=p.CONTROL_TARGET_RATE,
        hidden_sizes=p.CONTROL_HIDDEN,
    )


def offline(name: str, unroll: int) -> Any:
    """IQL or TD3+BC with the options of the torch loops."""
    shared: dict[str, Any] = {
        "gradient_steps": unroll,
        "batch_size": p.CONTROL_BATCH,
        "learning_rate": p.CONTROL_LEARNING_RATE,
        "gamma": p.DISCOUNT,
        "tau": p.CONTROL_TARGET_RATE,
        "hidden_sizes": p.CONTROL_HIDDEN,
    }
    if name == "td3-bc":
        return dt.algorithms.TD3BC(alpha=p.TD3_BC_VALUE_WEIGHT, **shared)
    return dt.algorithms.IQL(
        expectile=p.IQL_EXPECTILE, inverse_temperature=p.IQL_INVERSE_TEMPERATURE, **shared
    )


def dqn(unroll: int) -> Any:
    """DQN as it was published, with as many gradient steps as steps."""
    return dt.algorithms.DQN(
        unroll_length=unroll,
        gradient_steps=unroll,
        batch_size=p.DQN_BATCH,
        learning_rate=p.CONTROL_LEARNING_RATE,
        gamma=p.DISCOUNT,
        buffer_size=p.CONTROL_CAPACITY,
        learning_starts=p.CONTROL_BEGIN_AT,
        tau=p.CONTROL_TARGET_RATE,
        double=False,
        hidden_sizes=p.DQN_HIDDEN,
    )


class Clocked:
    """A runtime, which notes when how many iterations were done.

    The times in metrics.csv will not do: where one thread does everything, a report is written only
    after the iterations that follow it.
    """

    done: ClassVar[list[tuple[float, int]]] = []
    noted: ClassVar[Callable[[], None]] = lambda: None
    """Called after each."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def advance(self, iterations: int) -> Any:
        return Noted(self._runtime.advance(iterations), iterations)


class Noted:
    def __init__(self, pending: Any, iterations: int) -> None:
        self._pending, self._iterations = pending, iterations

    def wait(self) -> Any:
        report = self._pending.wait()
        before = Clocked.done[-1][1] if Clocked.done else 0
        Clocked.done.append((time.perf_counter(), before + self._iterations))
        Clocked.noted()
        return report


def waits_for(chosen: Any) -> int:
    """Steps before anything is learned."""
    return 0 if chosen.needs_data else getattr(chosen, "learning_starts", 0)


class Pauses:
    """Ends a turn of a training when enough iterations are done."""

    def __init__(self, job: p.Job, warm_up: int) -> None:
        self._job, self._next, self._since = job, warm_up, 0
        self._turns: p.Turns | None = None

    def __call__(self) -> None:
        done = Clocked.done[-1][1]
        if done < self._next:
            return
        if self._turns is None:
            self._turns = p.Turns(self._job)
        else:
            self._turns.end((done - self._since) * self._job.per_iteration)
        self._since, self._next = done, done + self._job.iterations


def measure_speed(job: p.Job, chosen: Any, strategy: Any, cluster: str | None) -> None:
    place: Any = Place
    made = place.runtime
    place.runtime = lambda *arguments: Clocked(made(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        settings = dt.Settings(
            folder=str(Path(folder) / "run"),
            evaluate_every=0,
            episodes=1,
            video=False,
            display="none",
        )
        warm_up = max(1, job.iterations // 8, 2 * waits_for(chosen) // job.per_iteration)
        steps = (job.iterations + warm_up) * job.per_iteration
        if job.mode == "turns":
            Clocked.noted, steps = Pauses(job, warm_up), FOREVER
        told = {"total_steps": steps, "seed": job.seed, "cluster": cluster, "settings": settings}
        if chosen.needs_data:
            told["data"] = Path(folder) / "data"
            make(told["data"], p.OFFLINE_STEPS)
        run = dt.train(chosen, job.env, strategy, **told)
        more: dict[str, Any] = {k: run.summary[k] for k in ("compile_s", "wall_s")}
        more["reported_steps_per_s"] = run.summary["steps_per_s"]
        last_row = {name: column[-1] for name, column in run.metrics.items()}
        more["measured"] = {k: float(v) for k, v in last_row.items() if k.startswith(MEASURED)}
    began, first = next(row for row in Clocked.done if row[1] >= warm_up)
    ended, last = Clocked.done[-1]
    p.answer(job, (last - first) * job.per_iteration, ended - began, **more)


class Training:
    """The runtime that `train` uses, advanced from outside. Close it."""

    def __init__(self, job: p.Job, chosen: Any, strategy: Any) -> None:
        prepare_backend(strategy)
        enable_compile_cache()
        found = resolve(job.env, traced=strategy.traced_envs)
        planned = plan_for(chosen, found, strategy, job.steps)
        plan = planned.plan
        self.algorithm = chosen.bind(Task(found.spec, plan.update_envs, job.steps))
        self.runtime = LocalRuntime(planned.graph, plan, found)
        state, actor = first_state(self.algorithm, found.jax, plan.num_envs, job.seed, 1)
        self.state = state
        self._per_iteration = planned.graph.steps_per_iteration * plan.replicas
        self._greedy = jax.jit(self._choose)
        self.runtime.load(state, actor)

    def iterate(self, count: int) -> int:
        self.state = self.runtime.advance(count).wait().state()
        jax.block_until_ready(self.state)
        return count * self._per_iteration

    def greedy(self, observation: Any) -> Any:
        return self._greedy(self.algorithm.acting(self.state), observation)

    def close(self) -> None:
        self.runtime.close()

    def _choose(self, params: Any, observation: Any) -> Any:
        def one(observation: Any) -> Any:
            timestep = Timestep(observation, 0.0, False)  # type: ignore[arg-type]
            return self.algorithm.greedy(params, self.algorithm.initial_carry(), timestep)[0]

        return jax.vmap(one)(observation)


def train_to_threshold(job: p.Job, chosen: Any, strategy: Any) -> None:
    began = time.perf_counter()
    training = Training(job, chosen, strategy)
    if not strategy.traced_envs:  # acting, and what is greedy, compile at their first call
        training.iterate(1)
        p.evaluate(training.greedy, job.seed)
        training.close()
        training = Training(job, chosen, strategy)
    compile_s = time.perf_counter() - began
    asynchronous = training.runtime.plan.staleness > 0
    drive = p.train_on_the_clock if asynchronous else p.train_and_answer
    drive(job, training.iterate, training.greedy, compile_s)
    training.close()


def strategy_of(name: str, env: str, options: dict[str, Any]) -> Any:
    """The strategy of that name, with its options."""
    return type(resolve_strategy(name, env))(**options)


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="ppo")
    parser.add_argument("--strategy", default="fused")
    parser.add_argument("--cluster", help="on Ray; only for speed")
    parser.add_argument("--set", action="append", default=[], metavar="option=value")
    options, sys.argv[1:] = parser.parse_known_args()
    job = p.parse_job()
    pairs = [setting.split("=", 1) for setting in options.set]
    given = {name: ast.literal_eval(value) for name, value in pairs}
    envs = given.pop("num_envs", job.envs)
    chosen = dataclasses.replace(algorithm(options.algorithm, job.unroll), num_envs=envs)
    strategy = strategy_of(options.strategy, job.env, given)
    if job.mode != "threshold":
        measure_speed(job, chosen, strategy, options.cluster)
    else:
        train_to_threshold(job, chosen, strategy)


if __name__ == "__main__":
    main()
