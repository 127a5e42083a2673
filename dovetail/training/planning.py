"""Traces an algorithm and plans it with a strategy, for `train` and `explain`."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.algorithm import Algorithm, Task
from dovetail.algorithms import ALGORITHMS
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
    """A plan, the graph that it places (traced for one copy of each side), and the environment."""

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
    """Traces the loop and plans it for this machine or for `resources`.

    `data` are recorded steps to learn from. If not `online`, nothing acts and the environment is
    not compiled. `wanted` selects the part of trajectories to tap; `served` are the servers that
    hold the replay.
    """
    # Else its reset would be traced into the actors' state, which nobody uses.
    env = env if online else dataclasses.replace(env, jax=None)
    graphs = graphs_of(algorithm, env, steps, data, online, wanted, served, strategy.devices_wanted)
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
    steps: int,
    data: DataSpec | None = None,
    online: bool = True,
    wanted: Wanted | None = None,
    served: Served | None = None,
    devices: int = 1,
) -> Graphs:
    """The graphs of an algorithm on an environment, each traced on demand.

    Where nobody acts, the number of environments means nothing, so any number of `devices` divides
    it; what they divide is the batch.
    """
    envs = algorithm.num_envs
    envs = envs if online or envs % devices == 0 else envs * devices
    # An environment that cannot be created in another process has to step in threads.
    spec = dataclasses.replace(env.spec, threads=env.spec.threads or env.process is None)
    task = Task(spec, envs, steps, data=data, online=online, served=served)
    return Graphs(algorithm, task, env.jax, wanted)


def trace(algorithm: Algorithm | str, env: Any, steps: int = 200_000) -> Graph:
    """Returns the graph of `algorithm` on `env`, the input of every strategy."""
    found, loop = resolve(env), resolve_algorithm(algorithm)
    return trace_task(loop, Task(found.spec, loop.num_envs, steps), found.jax)


def prepare_backend(strategy: Strategy, devices: int | None = None) -> None:
    """Configures JAX's CPU backend for a strategy; no effect on results or once JAX has started.

    Creates as many CPU devices as the strategy wants, or `devices`. With host environments it turns
    off asynchronous dispatch: handing a call to another thread takes three times as long as a small
    policy network.
    """
    import jax

    wanted = strategy.devices_wanted if devices is None else devices
    forced = "--xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    with contextlib.suppress(RuntimeError):  # JAX has already started
        if wanted > 1 and not forced:
            most = max(2, os.cpu_count() or 1)  # users may set more devices with XLA_FLAGS
            jax.config.update("jax_num_cpu_devices", min(wanted, most))
        if not strategy.traced_envs:
            jax.config.update("jax_cpu_enable_async_dispatch", False)


def machine() -> Resources:
    """The devices and cores of this machine."""
    import jax

    return Resources(devices=len(jax.devices()), cores=os.cpu_count() or 1)


def resolve_strategy(strategy: Strategy | str | None, env: Any) -> Strategy:
    """Returns the strategy for an object, a name, file.py:Name, or None (the default)."""
    return default_strategy(env) if strategy is None else _made(strategy, "strategy", STRATEGIES)


def resolve_algorithm(algorithm: Algorithm | str | type[Algorithm]) -> Algorithm:
    """Returns the algorithm for an object, a name, file.py:Name, or a class: the last three with
    default options."""
    return _made(algorithm, "algorithm", ALGORITHMS)


def _made(given: Any, what: str, known: Mapping[str, str]) -> Any:
    """The algorithm or strategy, whichever way it is given."""
    made = given
    if isinstance(given, str) and ":" not in given and given.lower() not in known:
        raise UserError(f"There is no {what} {given!r}: {nearest(given, known)}")
    if isinstance(given, str):
        made = load_object(known.get(given.lower(), given), what)
    made = made() if isinstance(made, type) else made
    if not isinstance(made, Algorithm if what == "algorithm" else Strategy):
        example = "dt.algorithms.PPO()" if what == "algorithm" else "dt.strategies.Local()"
        raise UserError(f"The {what} is a {type(made).__name__}: give one, such as {example}.")
    return made


def default_strategy(env: Any) -> Strategy:
    """Fused for a JAX environment, Local for a host environment."""
    return Local() if resolve(env).jax is None else Fused()
