"""Plans: a strategy's placement of a graph, completed by passes and checked before it runs."""

from typing import TYPE_CHECKING, cast

from dovetail.errors import UserError, defined_at
from dovetail.graph.ir import Graph
from dovetail.graph.shares import Graphs
from dovetail.plan.check import check, check_placement
from dovetail.plan.ir import Plan, Resources
from dovetail.plan.passes import PASSES

if TYPE_CHECKING:
    from dovetail.strategies.interface import Strategy


def make_plan(strategy: "Strategy", graphs: Graphs, resources: Resources) -> tuple[Plan, Graph]:
    """Returns the checked plan of a strategy, and the graph traced for one share of each side.

    Raises `UserError` if the plan is not sound.
    """
    made = cast(object, strategy.plan(graphs.whole, resources))  # a user's own may return anything
    if not isinstance(made, Plan):
        kind = "nothing" if made is None else f"a {type(made).__name__}"
        raise UserError(
            f"{defined_at(strategy.plan)}{type(strategy).__name__}.plan must return a Plan, as "
            f"self.place(graph, workers, instances) makes it, but returned {kind}."
        )
    plan = made
    # First, because tracing the shares divides by the plan's numbers of copies.
    check_placement(plan, graphs.whole, resources.devices)
    graph = graphs.at(plan.traced_copies, plan.update_envs, plan.batch or None)
    for one_pass in PASSES:
        plan = one_pass(plan, graph, resources)
    check(plan, graph, resources.devices)
    return plan, graph
