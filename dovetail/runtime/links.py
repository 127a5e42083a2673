"""The links between the workers of a plan, and what each worker takes from them and puts to them.

Where the learner speaks to its actors once per iteration and then hears from them, everything that
crosses goes in one exchange; otherwise every edge has its own, in lockstep. A replay that is apart
is reached by errands, one for each part of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dovetail.graph.ir import Edge, Graph, Node, Side
from dovetail.graph.primitives import COLLECTED
from dovetail.plan.ir import Plan
from dovetail.runtime.errands import Errands
from dovetail.runtime.exchange import Exchange
from dovetail.runtime.hosting import Role, actors_apart, replay_apart
from dovetail.runtime.programs import Values
from dovetail.runtime.wire import pack_all
from dovetail.runtime.worker import (
    Ask,
    Operation,
    PutAnswer,
    PutResults,
    PutWeights,
    TakeAnswers,
    TakeErrand,
    TakeResults,
    TakeWeights,
)

ERRAND = -1_000_000
"""Where what a worker elsewhere is asked for lies among the values of a turn."""


class Links:
    """Every link between the workers of a plan."""

    def __init__(
        self, graph: Graph, plan: Plan, share: Callable[[Values], Any] | None = None
    ) -> None:
        """`share` puts values where other processes find them, if workers are there; what it
        returns stands for them."""
        self._graph, self._plan, self._share = graph, plan, share
        apart = replay_apart(graph, plan)
        self.errands = [Errands() for _ in range(plan.shards if apart else 0)]
        """To each part of the replay, if it is apart."""
        self._unread: dict[int, list[Callable[[], None]]] = {}
        """By turn, what to call when the workers that keep a replay have read what actors sent."""
        self._exchanges: list[Exchange] = []
        self._report: Exchange | None = None
        """What ends an actor's iteration where every edge has an exchange of its own."""
        self._by_edge = self._made() if actors_apart(graph, plan) else {}

    def _made(self) -> dict[int, Exchange]:
        """The exchange of each edge between the learner's and the actors' workers, by its
        position."""
        sides = [(edge.from_side, edge.to_side) for edge in self._graph.edges]
        crossing = [i for i, ends in enumerate(sides) if Side.ACTOR in ends]
        if _meets_once(self._graph):
            return dict.fromkeys(crossing, self._exchange())
        self._report = self._exchange()
        return {i: self._exchange() for i in crossing}

    def _exchange(self) -> Exchange:
        plan, groups = self._plan, max(1, len(self.errands))
        made = Exchange(plan.actors, plan.joined, plan.staleness, plan.ordered, groups)
        self._exchanges.append(made)
        return made

    @property
    def _once(self) -> bool:
        """Whether everything that crosses goes in one exchange."""
        return len(self._exchanges) == 1

    @property
    def dropped(self) -> int:
        """Parcels that came too late to be learned from."""
        return sum(exchange.dropped for exchange in self._exchanges)

    def begin_at(self, turn: int) -> None:
        """The number of the first turn; before any."""
        for link in (*self._exchanges, *self.errands):
            link.begin_at(turn)

    def close(self) -> None:
        """Wakes who waits."""
        for link in (*self._exchanges, *self.errands):
            link.close()

    def takes(self, node: Node, role: Role, taken: set[int]) -> list[Operation]:
        """What a node needs of actors, or of the learner, and nobody has `taken` yet."""
        operations: list[Operation] = []
        if role.learns and role.acts:
            return operations
        for i, edge in enumerate(self._graph.edges):
            exchange = self._by_edge.get(i)
            if exchange is None or node.name not in edge.targets or id(exchange) in taken:
                continue
            taken.add(id(exchange))
            name = self._boundaries(outward=not role.learns) if self._once else edge.boundary
            if role.learns:
                alone = self._plan.joined == self._plan.replicas == 1
                operations.append(TakeResults(exchange, alone, name))
            else:
                operations.append(TakeWeights(exchange, not self._plan.ordered, name))
        return operations

    def puts(self, source: str, role: Role) -> list[Operation]:
        """What is sent to actors, or to the learner, once a node has run."""
        operations: list[Operation] = []
        for i, edge in enumerate(self._graph.edges):
            exchange = self._by_edge.get(i)
            if exchange is None or edge.source != source:
                continue
            numbers = tuple(value.id for value in edge.values)
            if role.learns and edge.to_side is Side.ACTOR:
                if not self._once or i == self._last_outward():
                    whole = self._outward() if self._once else numbers
                    names = self._boundaries(outward=True) if self._once else edge.boundary
                    operations.append(PutWeights(exchange, whole, self._sharing(exchange), names))
            elif role.acts and not role.learns and edge.from_side is Side.ACTOR and not self._once:
                operations.append(PutResults(exchange, numbers, self._graph, False, edge.boundary))
        return operations

    def ends(self, role: Role) -> list[Operation]:
        """What ends an iteration: an actor sends its state; in lockstep, the learner takes it."""
        if role.acts and not role.learns:
            return [self._last_put()]
        if role.learns and self._report is not None:
            return [TakeResults(self._report, alone=False, name="report")]
        return []

    def _last_put(self) -> Operation:
        if not self._once:
            assert self._report is not None
            return PutResults(self._report, (), self._graph, True, "report")
        inward = [edge for edge in self._graph.edges if edge.from_side is Side.ACTOR]
        numbers = dict.fromkeys(value.id for edge in inward for value in edge.values)
        names = self._boundaries(outward=False)
        return PutResults(self._exchanges[0], tuple(numbers), self._graph, True, names)

    def asks(self, node: Node) -> list[Operation]:
        """What the learner does where a node runs on the workers that keep the replay."""
        inputs = {value.id for value in node.inputs}
        coming = [edge for edge in self._graph.edges if node.name in edge.targets]

        def sent(side: Side) -> tuple[int, ...]:
            values = [v for edge in coming if edge.from_side is side for v in edge.values]
            return tuple(dict.fromkeys(v.id for v in values if v.id in inputs))

        errands, unread, acted = tuple(self.errands), self._unread, sent(Side.ACTOR)
        names = _joined_names(coming)
        asks: list[Operation] = [Ask(errands, node.name, acted, sent(Side.LEARNER), unread, names)]
        numbers = self._answered(node)
        if numbers or acted:
            ahead = self._plan.prefetch
            asks.append(TakeAnswers(errands, node.name, numbers, ahead, unread, COLLECTED))
        return asks

    def takes_errand(self, node: Node, shard: int, away: bool) -> Operation:
        """What a worker that keeps a part of the replay, perhaps `away`, does before a node."""
        coming = [edge for edge in self._graph.edges if node.name in edge.targets]
        wrap = _wrapped if away else dict
        return TakeErrand(self.errands[shard], node.name, wrap, _joined_names(coming))

    def answers(self, node: Node, shard: int) -> Operation:
        """What it does after the node."""
        return PutAnswer(self.errands[shard], node.name, self._answered(node))

    def standing(self, operations: Sequence[Operation]) -> list[int]:
        """Where what stands for the values that a worker elsewhere takes by these lies among the
        values of a turn."""
        weights = [self._place(o.exchange) for o in operations if isinstance(o, TakeWeights)]
        return [*weights, *(ERRAND for o in operations if isinstance(o, TakeErrand))]

    def _place(self, exchange: Exchange) -> int:
        return -1 - next(i for i, known in enumerate(self._exchanges) if known is exchange)

    def _sharing(self, exchange: Exchange) -> Callable[[Values], Values]:
        """What actors take from an exchange: the values; elsewhere, what stands for them."""
        if self._share is None:
            return dict
        share, place = self._share, self._place(exchange)
        return lambda values: {place: share(values)}

    def _last_outward(self) -> int:
        """The last edge to the actors: with it all that is broadcast is there."""
        order, edges = _order(self._graph), self._graph.edges
        outward = [i for i, edge in enumerate(edges) if edge.to_side is Side.ACTOR]
        return max(outward, key=lambda i: (order[edges[i].source], i))

    def _outward(self) -> tuple[int, ...]:
        edges = [edge for edge in self._graph.edges if edge.to_side is Side.ACTOR]
        return tuple(dict.fromkeys(value.id for edge in edges for value in edge.values))

    def _boundaries(self, outward: bool) -> str:
        """The boundaries whose values go to the actors, or come from them, in one message."""
        edges = self._graph.edges
        return _joined_names(
            [e for e in edges if (e.to_side if outward else e.from_side) is Side.ACTOR]
        )

    def _answered(self, node: Node) -> tuple[int, ...]:
        """What goes from a replay's node to the learner."""
        made = {value.id for value in node.outputs}
        edges = [edge for edge in self._graph.edges if edge.from_side is Side.REPLAY]
        return tuple(dict.fromkeys(v.id for e in edges for v in e.values if v.id in made))


def _wrapped(values: Values) -> Values:
    """What a worker elsewhere is asked for, as it is sent there."""
    return {ERRAND: {number: pack_all(leaf) for number, leaf in values.items()}}


def _joined_names(edges: Sequence[Edge]) -> str:
    """The boundaries of edges that go in one message."""
    return "+".join(dict.fromkeys(edge.boundary for edge in edges))


def _meets_once(graph: Graph) -> bool:
    """Whether all that goes to the actors is sent before anything comes back from them."""
    order = _order(graph)
    out = [order[edge.source] for edge in graph.edges if edge.to_side is Side.ACTOR]
    back = [order[t] for e in graph.edges if e.from_side is Side.ACTOR for t in e.targets]
    return bool(out) and bool(back) and max(out) < min(back)


def _order(graph: Graph) -> dict[str, int]:
    """When each source of an edge is done."""
    return {"state": -1} | {node.name: i for i, node in enumerate(graph.nodes)}
