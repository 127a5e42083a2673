"""Plans: what a distribution policy makes of a graph, checked before anything runs it."""

from typing import TYPE_CHECKING

from dovetail.graph.ir import Graph
from dovetail.plan.check import check
from dovetail.plan.ir import Plan

if TYPE_CHECKING:
    from dovetail.policies.interface import Policy, Resources


def make_plan(policy: "Policy", graph: Graph, resources: "Resources") -> Plan:
    """The policy's plan for the graph, refused unless it is sound."""
    plan = policy.plan(graph, resources)
    check(plan, graph, resources.devices)
    return plan
