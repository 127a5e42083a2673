"""From an algorithm, an environment and a strategy to a graph and a plan, for `train` and
`explain`."""

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from dovetail.algorithm import Algorithm, Task
from dovetail.envs.resolve import Env, resolve
from dovetail.errors import UserError, nearest
from dovetail.graph.ir import Graph
from dovetail.graph.shares import Graphs
from dovetail.graph.taps import Wanted
from dovetail.graph.trace import trace as trace_task
from dovetail.loading import load_object
from dovetail.plan import make_plan
from dovetail.plan.ir import Plan, Resources, WorkerKind
from dovetail.replay.data import DataSpec
from dovetail.replay.service.remote import Served
from dovetail.strategies import STRATEGIES
from dovetail.strategies.fused import Fused
from dovetail.strategies.interface import Strategy
from dovetail.strategies.local import Local


@dataclass(frozen=True)
class Planned:
    """An algorithm's graph (a copy's share of each side), where it goes, and the environment."""

    graph: Graph
    plan: Plan
    env: Env


def plan_for(
    algorithm: Algorithm,
    env: Env,
    strategy: Strategy,
    steps: int,
    resources: Resources | None = None,
    data: DataSpec | None = None,
    online: bool = True,
    wanted: Wanted | None = None,
    served: Served | None = None,
) -> Planned:
    """Traces the loop, and places it on this machine, or on `resources`.

    `data` are recorded steps to learn from; if not `online`, nobody acts, and nothing of the
    environment is compiled. What is `wanted` of the trajectories is tapped; `served` are the
    servers that keep the replay.
    """
    env = env if online else dataclasses.replace(env, jax=None)
    graphs = graphs_of(algorithm, env, strategy.num_envs, steps, data, online, wanted, served)
    plan, graph = make_plan(strategy, graphs, machine() if resources is None else resources)
    stepping = {i.worker for i in plan.instances if i.fragment.endswith(".step")}
    processes = [w for w in plan.workers if w.kind is WorkerKind.PROCESS and w.name in stepping]
    if env.process is None and processes:
        raise UserError(
            f"{env.spec.id} cannot be stepped in a process of its own: leave --processes out, or "
            f"give Dovetail a gymnasium.Env class that can be imported."
        )
    return Planned(graph, plan, env)


def graphs_of(
    algorithm: Algorithm,
    env: Env,
    envs: int,
    steps: int,
    data: DataSpec | None = None,
    online: bool = True,
    wanted: Wanted | None = None,
    served: Served | None = None,
) -> Graphs:
    """The graphs of an algorithm on so many environments, each traced when it is asked for."""
    # where no process can be made, threads have to do
    spec = dataclasses.replace(env.spec, threads=env.spec.threads or env.process is None)
    task = Task(spec, envs, steps, data=data, online=online, served=served)
    return Graphs(algorithm, task, env.jax, wanted)


def trace(algorithm: Algorithm, env: Any, num_envs: int = 8, steps: int = 200_000) -> Graph:
    """The graph of `algorithm` on `env`: what every strategy starts from."""
    found = resolve(env)
    return trace_task(algorithm, Task(found.spec, num_envs, steps), found.jax)


def prepare_backend(strategy: Strategy, devices: int | None = None) -> None:
    """Sets up the CPU for a strategy; only before JAX has started, and changing no result.

    A plan gets as many `devices` as it names, unless they are elsewhere. Where environments step on
    the host, a call runs in the calling thread: handing it to another takes three times as long as
    a small policy does.
    """
    import jax

    wanted = strategy.devices_wanted if devices is None else devices
    forced = "--xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    with contextlib.suppress(RuntimeError):
        if wanted > 1 and not forced:
            most = max(2, os.cpu_count() or 1)  # more than cores only by the user's own XLA_FLAGS
            jax.config.update("jax_num_cpu_devices", min(wanted, most))
        if not strategy.traced_envs:
            jax.config.update("jax_cpu_enable_async_dispatch", False)


def machine() -> Resources:
    """What this machine has."""
    import jax

    return Resources(devices=len(jax.devices()), cores=os.cpu_count() or 1)


def resolve_strategy(strategy: Strategy | str | None, env: Any) -> Strategy:
    """The strategy that an object, a name or nothing stands for."""
    if strategy is None:
        return default_strategy(env)
    if not isinstance(strategy, str):
        return strategy
    if ":" in strategy:
        return load_object(strategy, "strategy")()
    if strategy not in STRATEGIES:
        raise UserError(f"There is no strategy {strategy!r}: {nearest(strategy, STRATEGIES)}")
    import dovetail.strategies as strategies

    return getattr(strategies, STRATEGIES[strategy].partition(":")[2])()


def default_strategy(env: Any) -> Strategy:
    """Fused for an environment written in JAX, Local for one on the host."""
    return Local() if resolve(env).jax is None else Fused()
