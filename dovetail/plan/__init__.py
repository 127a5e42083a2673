"""Plans: what a distribution policy makes of a graph, checked before anything runs it."""

from typing import TYPE_CHECKING

from dovetail.graph.ir import Graph
from dovetail.graph.shares import Graphs
from dovetail.plan.check import check, check_placement
from dovetail.plan.ir import Plan, Resources
from dovetail.plan.passes import PASSES

if TYPE_CHECKING:
    from dovetail.policies.interface import Policy


def make_plan(policy: "Policy", graphs: Graphs, resources: Resources) -> tuple[Plan, Graph]:
    """The policy's plan, refused unless it is sound, and the graph of its copies' shares."""
    plan = policy.plan(graphs.whole, resources)
    check_placement(plan, graphs.whole, resources.devices)
    graph = graphs.at(plan.traced_copies, plan.update_envs, plan.batch or None)
    for one_pass in PASSES:
        plan = one_pass(plan, graph, resources)
    check(plan, graph, resources.devices)
    return plan, graph
