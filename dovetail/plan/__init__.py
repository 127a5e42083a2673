"""Plans: what a distribution policy makes of a graph, checked before anything runs it."""

from typing import TYPE_CHECKING

from dovetail.graph.ir import Graph
from dovetail.plan.check import check, check_placement
from dovetail.plan.ir import Plan, Resources
from dovetail.plan.passes import PASSES

if TYPE_CHECKING:
    from dovetail.policies.interface import Policy


def make_plan(policy: "Policy", graph: Graph, resources: Resources) -> Plan:
    """The policy's plan for the graph, refused unless it is sound."""
    plan = policy.plan(graph, resources)
    check_placement(plan, graph, resources.devices)
    for one_pass in PASSES:
        plan = one_pass(plan, graph, resources)
    check(plan, graph, resources.devices)
    return plan
