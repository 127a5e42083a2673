"""Plans: what a strategy makes of a graph, checked before anything runs it."""

from typing import TYPE_CHECKING

from dovetail.graph.ir import Graph
from dovetail.graph.shares import Graphs
from dovetail.plan.check import check, check_placement
from dovetail.plan.ir import Plan, Resources
from dovetail.plan.passes import PASSES

if TYPE_CHECKING:
    from dovetail.strategies.interface import Strategy


def make_plan(strategy: "Strategy", graphs: Graphs, resources: Resources) -> tuple[Plan, Graph]:
    """The strategy's plan, refused unless it is sound, and the graph of its copies' shares."""
    plan = strategy.plan(graphs.whole, resources)
    check_placement(plan, graphs.whole, resources.devices)
    graph = graphs.at(plan.traced_copies, plan.update_envs, plan.batch or None)
    for one_pass in PASSES:
        plan = one_pass(plan, graph, resources)
    check(plan, graph, resources.devices)
    return plan, graph
