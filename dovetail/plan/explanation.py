"""A graph with its plan, in the forms that `explain` and a run folder show."""

import json
from dataclasses import dataclass

from dovetail.graph import show as graph_show
from dovetail.graph.ir import Graph
from dovetail.plan import serial
from dovetail.plan import show as plan_show
from dovetail.plan.ir import Plan
from dovetail.plan.svg import svg


@dataclass(frozen=True)
class Explanation:
    """A graph and its plan, as text, SVG or JSON."""

    graph: Graph
    plan: Plan

    def __str__(self) -> str:
        return f"{graph_show.text(self.graph)}\n{plan_show.text(self.plan, self.graph)}"

    def svg(self) -> str:
        """The graph and the plan as an SVG drawing."""
        return svg(self.graph, self.plan)

    def json(self) -> str:
        """Both as one JSON object: {"graph": …, "plan": …}."""
        both = {"graph": graph_show.to_json(self.graph), "plan": serial.to_json(self.plan)}
        return json.dumps(both, indent=2)
