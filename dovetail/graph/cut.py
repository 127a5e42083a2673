"""Cuts a traced iteration into fragments at its boundaries.

Every equation has a *stage*: the number of boundaries on the longest path to it. A fragment is all
equations of one stage on one side. On the learner and actor sides, an equation moves to the latest
stage that still serves its readers, to avoid needless fragments. A side that only serves others
(a replay, say) computes everything it can at each stage where it sends, and the rest at the end.
Equations without a side (constants) are copied into each fragment that reads them.
"""

from dataclasses import dataclass, field

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, subjaxprs

from dovetail.algorithm import Algorithm
from dovetail.boundaries import ACTOR, LEARNER, How, Side
from dovetail.envs.interface import EnvSpec
from dovetail.errors import UserError
from dovetail.graph.cost import flops
from dovetail.graph.ir import (
    Arrival,
    Edge,
    Fragment,
    Graph,
    Node,
    Python,
    Slots,
    Unroll,
    Value,
    value_of,
)
from dovetail.graph.primitives import (
    BOUNDARIES,
    REGIONS,
    Crossing,
    mean_p,
    send_p,
    unroll_p,
    where,
)
from dovetail.graph.sides import Atom, Sides, check_marks, check_outputs, settle
from dovetail.graph.traced import PythonSpec, Traced, UnrollSpec

Place = tuple[int, Side]
"""The stage and side of an equation, and so its fragment."""


def cut(traced: Traced, algorithm: Algorithm, env: EnvSpec) -> Graph:
    """Cuts a traced iteration into the graph of its fragments."""
    return _Cut(traced).graph(algorithm, env)


@dataclass
class _Piece:
    """A fragment under construction."""

    eqns: list[JaxprEqn] = field(default_factory=list)
    demanded: list[Atom] = field(default_factory=list)
    """Atoms without a side that this fragment must output."""


class _Cut:
    """The working tables of one cut. Equations are keyed by their `id`."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        settled = settle(traced.closed.jaxpr, traced.state_sides)
        self.jaxpr: Jaxpr = settled.jaxpr
        self.sides: Sides = settled.sides
        check_outputs(self.jaxpr, self.sides, traced)
        self.order = self._order()
        computed = [
            var for eqn in self.jaxpr.eqns if eqn.primitive is not send_p for var in eqn.outvars
        ]
        check_marks(traced, {self.sides[var] for var in computed})
        self.consts = dict(zip(self.jaxpr.constvars, traced.closed.consts, strict=True))
        self.makers = {var: eqn for eqn in self.jaxpr.eqns for var in eqn.outvars}
        self.source = self._sources()
        self.arrived_by = {
            var: _arrival(eqn)
            for eqn in self.jaxpr.eqns
            if eqn.primitive is send_p
            for var in eqn.outvars
        }
        self.fires, self.places = self._stages()
        self.values: dict[Var, Value] = {}
        self.pieces: dict[Place, _Piece] = {}
        self.constants: dict[tuple[Place, int], Value] = {}
        self._count = 0

    def graph(self, algorithm: Algorithm, env: EnvSpec) -> Graph:
        """Builds pieces, then nodes, then edges, then the inputs and outputs."""
        for var in self.jaxpr.invars:  # the inputs get the first numbers
            self._value(var)
        for eqn in self.jaxpr.eqns:
            if id(eqn) in self.places:
                self._piece(self.places[id(eqn)]).eqns.append(eqn)
        outputs = self._outputs()
        region_inputs = {
            id(eqn): [
                self._operand(v, (self.fires[id(eqn)], _region_side(eqn))) for v in eqn.invars
            ]
            for eqn in self.jaxpr.eqns
            if eqn.primitive in REGIONS
        }
        nodes = self._nodes(region_inputs)
        acts = any(isinstance(node, Unroll) for node in nodes)
        sizes = self.traced.state_tree.num_leaves, self.traced.actor_tree.num_leaves
        inputs = tuple(self._value(var) for var in self.jaxpr.invars)
        metrics = outputs[sum(sizes) : sum(sizes) + len(self.traced.metric_names)]
        return Graph(
            algorithm=type(algorithm).__name__,
            env=env.id,
            num_envs=self.traced.num_envs,
            actor_envs=self.traced.actor_envs,
            home=LEARNER,
            tables=self.traced.tables,
            correction=algorithm.correction.name,
            staleness=algorithm.correction.staleness,
            threads=env.threads,
            nodes=nodes,
            edges=self._edges(nodes),
            state=Slots(self.traced.state_tree, inputs[: sizes[0]], outputs[: sizes[0]]),
            actor=Slots(self.traced.actor_tree, inputs[sizes[0] :], outputs[sizes[0] : sum(sizes)]),
            metrics=tuple(zip(self.traced.metric_names, metrics, strict=True)),
            episodes=outputs[sum(sizes) + len(metrics) :],
            data=self.traced.data,
            offline_steps=0 if acts else algorithm.offline_steps,
        )

    def _order(self) -> list[Side]:
        """The order of sides within one stage: learner, actor, then the others."""
        found = [side for side in self.sides.values() if side is not None]
        return list(dict.fromkeys((LEARNER, ACTOR, *found)))

    def _sources(self) -> dict[Var, Atom]:
        """Maps each received variable to the atom that was sent, across several boundaries."""
        source: dict[Var, Atom] = {}
        for eqn in self.jaxpr.eqns:
            if eqn.primitive is send_p:
                for sent, received in zip(eqn.invars, eqn.outvars, strict=True):
                    self._refuse_constant(eqn, sent)
                    source[received] = sent if isinstance(sent, Literal) else source.get(sent, sent)
        return source

    def _refuse_constant(self, eqn: JaxprEqn, sent: Atom) -> None:
        """Refuses to join a constant from several copies: no fragment would send the parts."""
        crossing: Crossing = eqn.params["crossing"]
        sideless = isinstance(sent, Literal) or self.sides[sent] is None
        if crossing.how is How.JOIN and sideless and crossing.times != crossing.parts:
            raise UserError(
                f"{where(eqn.source_info)}: rl.{crossing.name} was given a constant, which none of "
                f"the {crossing.times} {crossing.source}s makes; use it on the other side as it is."
            )

    def _stages(self) -> tuple[dict[int, int], dict[int, Place]]:
        """The stage at which each boundary fires, and the place of every other equation.

        A forward pass finds the earliest stage of each equation, a backward pass the latest.
        """
        stage: dict[Var, int] = dict.fromkeys([*self.jaxpr.invars, *self.jaxpr.constvars], 0)
        fires: dict[int, int] = {}
        earliest: dict[int, int] = {}
        # Forward: an equation can run once its inputs exist; a boundary delivers one stage later.
        for eqn in self.jaxpr.eqns:
            at = max((stage[v] for v in eqn.invars if not isinstance(v, Literal)), default=0)
            boundary = eqn.primitive in BOUNDARIES
            (fires if boundary else earliest)[id(eqn)] = at
            for var in eqn.outvars:
                stage[var] = at + boundary
        last: dict[Side, int] = {}
        for eqn in self.jaxpr.eqns:
            side = self._side(eqn)
            if id(eqn) in earliest and side is not None:
                last[side] = max(last.get(side, 0), earliest[id(eqn)])
        answers = self._answers(fires)
        # Backward: an equation may run as late as its first reader.
        latest: dict[Var, int] = {}
        places: dict[int, Place] = {}
        for eqn in reversed(self.jaxpr.eqns):
            side = self._side(eqn)
            if id(eqn) in fires:
                at = fires[id(eqn)]
            elif side is None:
                continue
            elif side in answers:
                at = next((s for s in answers[side] if s >= earliest[id(eqn)]), last[side])
                places[id(eqn)] = (at, side)
            else:
                later = (latest.get(v, last[side]) for v in eqn.outvars)
                at = min(later, default=earliest[id(eqn)])
                places[id(eqn)] = (at, side)
            for var in eqn.invars:
                if not isinstance(var, Literal):
                    latest[var] = min(latest.get(var, at), at)
        self.last = {side: last.get(side, 0) for side in self.order}
        return fires, places

    def _answers(self, fires: dict[int, int]) -> dict[Side, list[int]]:
        """For every side but learner and actor, the stages at which it sends or runs Python."""
        found: dict[Side, list[int]] = {
            side: [] for side in self.order if side not in (LEARNER, ACTOR)
        }
        for eqn in self.jaxpr.eqns:
            if id(eqn) in fires and eqn.primitive is not unroll_p:
                side = eqn.params["crossing"].source if eqn.primitive is send_p else None
                found.get(side or _region_side(eqn), []).append(fires[id(eqn)])
        return {side: sorted(stages) for side, stages in found.items()}

    def _side(self, eqn: JaxprEqn) -> Side | None:
        """The side of an equation. One that only has an effect (a print) follows its inputs."""
        if eqn.outvars:
            return self.sides[eqn.outvars[0]]
        inputs = (self.sides[v] for v in eqn.invars if not isinstance(v, Literal))
        return next((side for side in inputs if side is not None), LEARNER)

    def _outputs(self) -> tuple[Value, ...]:
        """The outputs of the iteration; the last fragment of their side outputs constants."""
        places = [(self.last[LEARNER], LEARNER)] * len(self.jaxpr.outvars)
        for i, side in enumerate(self.traced.state_sides):
            if side != LEARNER:
                places[i] = (self.last[side], side)
        outputs = zip(self.jaxpr.outvars, places, strict=True)
        return tuple(self._operand(var, place) for var, place in outputs)

    def _operand(self, atom: Atom, place: Place) -> Value:
        """The value of an atom; the fragment at `place` outputs it if it has no side."""
        resolved = atom if isinstance(atom, Literal) else self.source.get(atom, atom)
        if not isinstance(resolved, Literal) and self.sides[resolved] is not None:
            return self._value(resolved)
        if (place, id(resolved)) not in self.constants:
            self._piece(place).demanded.append(resolved)
            self.constants[place, id(resolved)] = value_of(resolved.aval, self._count, place[1])
            self._count += 1
        return self.constants[place, id(resolved)]

    def _value(self, var: Var) -> Value:
        if var not in self.values:
            side = self.sides[var]
            assert side is not None
            self.values[var] = value_of(var.aval, self._count, side)
            self._count += 1
        return self.values[var]

    def _piece(self, place: Place) -> _Piece:
        return self.pieces.setdefault(place, _Piece())

    def _nodes(self, region_inputs: dict[int, list[Value]]) -> tuple[Node, ...]:
        """The nodes in execution order: by stage, and within a stage by side."""
        needed = self._needed()
        regions = [eqn for eqn in self.jaxpr.eqns if eqn.primitive in REGIONS]
        steps: list[tuple[int, int, Place | JaxprEqn]] = [
            (stage, self.order.index(side), (stage, side)) for stage, side in self.pieces
        ]
        # In its stage a region runs last: it may read the outputs of any fragment there.
        steps += [(self.fires[id(eqn)], len(self.order), eqn) for eqn in regions]
        nodes: list[Node] = []
        taken: dict[str, int] = {}
        for _, _, what in sorted(steps, key=lambda step: step[:2]):
            base = what[1] if isinstance(what, tuple) else _region_name(what)
            # The second fragment of a side is `learner.2`, and so on.
            taken[base] = taken.get(base, 0) + 1
            name = base if taken[base] == 1 else f"{base}.{taken[base]}"
            if isinstance(what, tuple):
                nodes.append(self._fragment(name, what, needed))
            elif what.primitive is unroll_p:
                nodes.append(self._unroll(name, what, region_inputs[id(what)], needed))
            else:
                nodes.append(self._python(name, what, region_inputs[id(what)]))
        return tuple(nodes)

    def _needed(self) -> set[Var]:
        """Variables read by another node or returned by the iteration.

        A fragment outputs only these; everything else stays inside its program.
        """
        readers: list[tuple[Place | None, Atom]] = [(None, v) for v in self.jaxpr.outvars]
        for eqn in self.jaxpr.eqns:
            if eqn.primitive in REGIONS:
                readers += [(None, v) for v in eqn.invars]
            elif eqn.primitive not in BOUNDARIES:
                readers += [(self.places.get(id(eqn)), v) for v in eqn.invars]
        needed: set[Var] = set()
        for reader, atom in readers:
            resolved = self._resolve(atom)
            if isinstance(resolved, Literal) or resolved not in self.makers:
                continue
            maker = self.places.get(id(self.makers[resolved]))
            if reader is None or maker != reader:
                needed.add(resolved)
        return needed

    def _resolve(self, atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else self.source.get(atom, atom)

    def _fragment(self, name: str, place: Place, needed: set[Var]) -> Fragment:
        """The fragment of a piece: its program, and the values that enter and leave it."""
        piece = self.pieces[place]
        eqns = self._with_constants(piece)
        made = {var for eqn in eqns for var in eqn.outvars}
        read = dict.fromkeys(
            v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal) and v not in made
        )
        constvars = [v for v in read if v in self.consts]
        constvars += [
            v
            for v in piece.demanded
            if isinstance(v, Var) and v in self.consts and v not in constvars
        ]
        invars = [v for v in read if v not in self.consts]
        outvars = [v for eqn in piece.eqns for v in eqn.outvars if v in needed]
        # The debug names belong to the arguments of the whole iteration, so drop them.
        program = Jaxpr(
            constvars=constvars,
            invars=invars,
            outvars=[*outvars, *piece.demanded],
            eqns=eqns,
            effects={effect for eqn in eqns for effect in eqn.effects},
            debug_info=self.jaxpr.debug_info._replace(arg_names=None, result_paths=None),
        )
        demanded = tuple(self.constants[place, id(atom)] for atom in piece.demanded)
        return Fragment(
            name=name,
            side=place[1],
            program=ClosedJaxpr(program, [self.consts[v] for v in constvars]),
            inputs=tuple(self._value(self._resolve_var(v)) for v in invars),
            arrivals=tuple(self.arrived_by.get(v) for v in invars),
            outputs=tuple(self._value(v) for v in outvars) + demanded,
            flops=flops(program),
            means=_count_means(program),
        )

    def _resolve_var(self, var: Var) -> Var:
        resolved = self._resolve(var)
        assert isinstance(resolved, Var)
        return resolved

    def _with_constants(self, piece: _Piece) -> list[JaxprEqn]:
        """The piece's equations, preceded by the constants they read, in program order."""
        eqns = [self._without_constant_crossings(eqn) for eqn in piece.eqns]
        wanted = {v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal)}
        wanted |= {v for v in piece.demanded if not isinstance(v, Literal)}
        copies: list[JaxprEqn] = []
        for eqn in reversed(self.jaxpr.eqns):
            # Equations without a side were given no place.
            sideless = id(eqn) not in self.places and eqn.primitive not in BOUNDARIES
            if sideless and any(v in wanted for v in eqn.outvars):
                copies.append(self._without_constant_crossings(eqn))
                wanted |= {v for v in copies[-1].invars if not isinstance(v, Literal)}
        return copies[::-1] + eqns

    def _without_constant_crossings(self, eqn: JaxprEqn) -> JaxprEqn:
        """Makes an equation read a sent constant directly, since no edge carries it."""
        direct = []
        for atom in eqn.invars:
            resolved = self._resolve(atom)
            sideless = isinstance(resolved, Literal) or self.sides[resolved] is None
            direct.append(resolved if sideless else atom)
        return eqn.replace(invars=direct)

    def _unroll(self, name: str, eqn: JaxprEqn, operands: list[Value], needed: set[Var]) -> Unroll:
        """The node of an `unroll` equation; `operands` are the values it reads."""
        spec: UnrollSpec = eqn.params["spec"]
        size = spec.trajectory_tree.num_leaves
        outputs = [self._value(var) for var in eqn.outvars]
        ends = size + self.traced.actor_tree.num_leaves
        return Unroll(
            name=name,
            side=ACTOR,
            length=spec.length,
            act=spec.act,
            step=spec.step,
            bootstrap=spec.bootstrap,
            reset=spec.reset,
            inputs=tuple(operands[: spec.num_inputs]),
            actor_inputs=tuple(operands[spec.num_inputs :]),
            trajectory=tuple(outputs[:size]),
            actor_outputs=tuple(outputs[size:ends]),
            episodes=tuple(outputs[ends:]),
            live=tuple(var in needed for var in eqn.outvars[:size]),
            trajectory_tree=spec.trajectory_tree,
            initial_carry=spec.initial_carry,
            carry_tree=spec.carry_tree,
            per_step_bytes=spec.per_step_bytes,
        )

    def _python(self, name: str, eqn: JaxprEqn, operands: list[Value]) -> Python:
        """The node of a `python` equation; `operands` are the values it reads."""
        spec: PythonSpec = eqn.params["spec"]
        arrivals = [None if isinstance(v, Literal) else self.arrived_by.get(v) for v in eqn.invars]
        return Python(
            name=name,
            side=spec.side,
            function=spec.function,
            in_tree=spec.in_tree,
            out_tree=spec.out_tree,
            inputs=tuple(operands),
            arrivals=tuple(arrivals),
            outputs=tuple(self._value(var) for var in eqn.outvars),
            where=where(eqn.source_info),
            reach=spec.reach,
        )

    def _edges(self, nodes: tuple[Node, ...]) -> tuple[Edge, ...]:
        """The edges of all crossings.

        A crossing whose values come from several nodes becomes one edge for each of them.
        """
        maker = {value.id: node.name for node in nodes for value in node.outputs}
        edges: list[Edge] = []
        for eqn in self.jaxpr.eqns:
            if eqn.primitive is not send_p:
                continue
            crossed = [self._resolve(v) for v in eqn.invars]
            # A value that is sent twice crosses once; a constant does not cross.
            values = [
                self._value(v)
                for v in dict.fromkeys(a for a in crossed if isinstance(a, Var))
                if self.sides[v] is not None
            ]
            by_source: dict[str, list[Value]] = {}
            for value in values:
                by_source.setdefault(maker.get(value.id, "state"), []).append(value)
            edges += [_edge(eqn, source, sent, nodes) for source, sent in by_source.items()]
        return tuple(edges)


def _edge(eqn: JaxprEqn, source: str, values: list[Value], nodes: tuple[Node, ...]) -> Edge:
    """The edge that carries one source's values over one boundary."""
    crossing: Crossing = eqn.params["crossing"]
    assert crossing.source is not None and crossing.target is not None
    numbers = {value.id for value in values}
    targets = [
        node.name
        for node in nodes
        if node.side == crossing.target and any(value.id in numbers for value in node.inputs)
    ]
    return Edge(
        boundary=crossing.name,
        source=source,
        targets=tuple(targets),
        from_side=crossing.source,
        to_side=crossing.target,
        how=crossing.how,
        values=tuple(values),
        where=where(eqn.source_info),
    )


def _arrival(eqn: JaxprEqn) -> Arrival:
    crossing: Crossing = eqn.params["crossing"]
    assert crossing.source is not None
    return Arrival(crossing.name, crossing.source, crossing.how)


def _region_side(eqn: JaxprEqn) -> Side:
    """The side of an `unroll` or `python` equation."""
    return ACTOR if eqn.primitive is unroll_p else eqn.params["spec"].side


def _region_name(eqn: JaxprEqn) -> str:
    return "unroll" if eqn.primitive is unroll_p else eqn.params["spec"].name


def _count_means(jaxpr: Jaxpr) -> int:
    here = sum(eqn.primitive is mean_p for eqn in jaxpr.eqns)
    return here + sum(_count_means(inner) for inner in subjaxprs(jaxpr))
