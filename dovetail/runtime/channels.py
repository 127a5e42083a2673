"""The channels of a plan: one for each edge between different workers."""

from dovetail.boundaries import How, Side
from dovetail.graph.ir import Edge, Graph
from dovetail.plan.ir import Plan
from dovetail.runtime.arrivals import Arrivals, Arriving, Weights
from dovetail.runtime.channel import REPORT, Channel, ChannelEdge, Lockstep
from dovetail.runtime.placement import givers, home_of, workers_of


class Channels:
    """All channels of a plan and the workers at their ends."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self._graph, self._plan = graph, plan
        self.arrivals = self._make_arrivals()
        """Shared by the channels of asynchronous actors; None in lockstep."""
        self.of_edge: dict[int, Channel] = {}
        """By the position of the edge in the graph."""
        crossing = [i for i, edge in enumerate(graph.edges) if self._joins_workers(edge)]
        # The last put to the acting sides completes a version of the weights.
        weights = [i for i in crossing if graph.edges[i].to_side in graph.acting]
        for i in crossing:
            self.of_edge[i] = self._make(i, graph.edges[i], last=i == max(weights, default=-1))
        self.report = self._make_report()
        """The report channel; None if the home worker is the only one that acts."""

    @property
    def all(self) -> list[Channel]:
        """All channels, including the report."""
        reports = [] if self.report is None else [self.report]
        return [*self.of_edge.values(), *reports]

    @property
    def dropped(self) -> int:
        """Number of unrolls dropped because they exceeded the staleness bound."""
        return 0 if self.arrivals is None else self.arrivals.dropped

    def begin_at(self, turn: int) -> None:
        """Sets the number of the first turn, before any runs."""
        for channel in self.all:
            channel.begin_at(turn)

    def close(self) -> None:
        """Wakes all waiting workers, which raise `Closed`."""
        for channel in self.all:
            channel.close()

    def ends(self, edge: Edge) -> tuple[list[str], list[str]]:
        """The (sending, receiving) workers of an edge, in the order of their copies."""
        graph, plan = self._graph, self._plan
        return workers_of(graph, plan, edge.from_side), workers_of(graph, plan, edge.to_side)

    def _joins_workers(self, edge: Edge) -> bool:
        """Whether an edge is read and connects different workers."""
        senders, takers = self.ends(edge)
        return bool(edge.targets) and (len({*senders, *takers}) > 1)

    def _make_arrivals(self) -> Arrivals | None:
        graph, plan = self._graph, self._plan
        # Arrivals give a whole unroll one version, so all weights must cross before anything comes
        # back.
        if plan.ordered or not _meets_once(graph) or not self._acts_apart():
            return None
        groups = max([givers(graph, plan, edge.to_side) for edge in self._outward()], default=1)
        return Arrivals(plan.copies_of(*graph.acting), plan.joined, plan.staleness, groups)

    def _outward(self) -> list[Edge]:
        """The edges out of the acting sides."""
        return [edge for edge in self._graph.edges if edge.from_side in self._graph.acting]

    def _acts_apart(self) -> bool:
        graph, plan = self._graph, self._plan
        acting = [name for side in graph.acting for name in workers_of(graph, plan, side)]
        return any(name != home_of(graph, plan) for name in acting)

    def _make(self, position: int, edge: Edge, last: bool) -> Channel:
        """The channel of an edge; `last` if it completes the weights of a version."""
        graph, plan = self._graph, self._plan
        numbers = tuple(value.id for value in edge.values)
        acts, weights = edge.from_side in graph.acting, edge.to_side in graph.acting
        if self.arrivals is not None and weights:
            made = ChannelEdge(edge.boundary, numbers, edge.how, 1, plan.copies_of(edge.to_side))
            return Weights(made, self.arrivals, position, last)
        made = ChannelEdge(
            edge.boundary, numbers, edge.how, *self._sizes(edge.from_side, edge.to_side)
        )
        if self.arrivals is not None and acts:
            return Arriving(made, self.arrivals, position, last=False)
        # Staleness is the lag of the weights, prefetch that of samples. The depth keeps actors at
        # most `staleness` turns ahead of the learner.
        lag = plan.staleness if weights else 0
        if edge.from_side in graph.tables and edge.to_side == graph.home:
            lag = plan.prefetch
        return Lockstep(made, lag, plan.staleness + 1 if acts else None)

    def _sizes(self, source: Side, target: Side) -> tuple[int, int]:
        graph, plan = self._graph, self._plan
        return givers(graph, plan, source), givers(graph, plan, target)

    def _make_report(self) -> Channel | None:
        """The channel on which acting copies report to the home side."""
        graph, plan = self._graph, self._plan
        if not self._acts_apart():
            return None
        numbers = tuple(v.id for v in (*graph.actor.outputs, *graph.episodes))
        made = ChannelEdge(REPORT, numbers, How.JOIN, plan.joined, 1)
        if self.arrivals is not None:
            # No edge has this number. The report comes last in a turn, so it completes an unroll.
            return Arriving(made, self.arrivals, len(graph.edges), last=True)
        return Lockstep(made, depth=plan.staleness + 1)


def _meets_once(graph: Graph) -> bool:
    """Whether the home side sends everything to the acting sides before it receives from them."""
    order = {"state": -1} | {node.name: i for i, node in enumerate(graph.nodes)}
    inward = [edge for edge in graph.edges if edge.to_side in graph.acting]
    outward = [edge for edge in graph.edges if edge.from_side in graph.acting]
    sent = [order[edge.source] for edge in inward]
    back = [order[target] for edge in outward for target in edge.targets]
    from_home = all(edge.from_side == graph.home for edge in inward)
    return from_home and bool(sent) and bool(back) and max(sent) < min(back)
