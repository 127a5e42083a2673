"""Plans of the toys on a machine that is always the same: for tests of plans and strategies."""

from dataclasses import replace
from typing import Any

from toys import Drift, Toy

from dovetail.algorithm import Algorithm, Task
from dovetail.envs.resolve import Env, resolve
from dovetail.graph.ir import Graph
from dovetail.graph.shares import Graphs
from dovetail.plan import make_plan
from dovetail.plan.ir import Plan, Resources
from dovetail.strategies.interface import Strategy

MACHINE = Resources(devices=4, cores=2)
HOST = Env(replace(Drift.spec, threads=False), None, None)
"""Environments written in Python, as far as a plan is concerned."""
NATIVE = Env(Drift.spec, None, None)
"""Environments outside JAX that threads step side by side."""
TOY = Toy()


def planned(
    strategy: Strategy, algorithm: Algorithm = TOY, env: Any = None, machine: Resources = MACHINE
) -> tuple[Plan, Graph]:
    """The strategy's plan, and the graph it was made of."""
    found = resolve(env or Drift())
    return make_plan(
        strategy, Graphs(algorithm, Task(found.spec, algorithm.num_envs, 1000), found.jax), machine
    )
