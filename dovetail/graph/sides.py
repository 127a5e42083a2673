"""Side inference: a type system that assigns every value a side.

One forward pass over the equations. An equation takes the side of its inputs. Two sides in one
equation are an error that names the user's line and the boundary that would fix it. Constants have
no side and may be used anywhere.

The pass also resolves every crossing. A value sent to the side it already lives on passes through
unchanged, and the results of a `call` return to the caller's side.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from dovetail.boundaries import ACTOR, LEARNER, REPLAY, Side
from dovetail.errors import UserError
from dovetail.graph.primitives import Crossing, python_p, send_p, unroll_p, where
from dovetail.graph.traced import Traced

Atom = Var | Literal
Sides = dict[Var, Side | None]
Ends = dict[int, tuple[Side, Side]]
"""Maps the number of a crossing to its (source, target) sides."""

REMEDY = {
    (LEARNER, ACTOR): "rl.broadcast (learner → actor)",
    (ACTOR, LEARNER): "rl.gather or rl.reduce (actor → learner)",
    (ACTOR, REPLAY): "rl.insert (actor → replay)",
    (REPLAY, LEARNER): "rl.sample (replay → learner)",
    (LEARNER, REPLAY): "rl.update_priorities (learner → replay)",
    (REPLAY, ACTOR): "rl.sample and rl.broadcast (replay → learner → actor)",
}


def remedy(source: Side, target: Side) -> str:
    """The boundary that brings a value from one side to another."""
    plain = f"rl.send(…, to={target!r}) or rl.call({target!r}, …)"
    return REMEDY.get((source, target), plain)


@dataclass
class Settled:
    """An iteration whose crossings all have two different, known ends."""

    jaxpr: Jaxpr
    sides: Sides
    ends: Ends = field(default_factory=dict)


def settle(jaxpr: Jaxpr, state_sides: Sequence[Side]) -> Settled:
    """Infers the side of every variable.

    The first inputs of `jaxpr` are the leaves of the state, on `state_sides`; the others belong to
    the actors.
    """
    sides: Sides = dict.fromkeys(jaxpr.constvars)
    for position, var in enumerate(jaxpr.invars):
        sides[var] = state_sides[position] if position < len(state_sides) else ACTOR
    # `same` maps the result of a crossing to its operand where they live on the same side.
    settled, same = Settled(jaxpr, sides), dict[Var, Atom]()
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        # Reads what was sent, where sender and receiver are the same side.
        eqn = eqn.replace(invars=[_resolved(same, atom) for atom in eqn.invars])
        if eqn.primitive is send_p:
            eqns += _settle_crossing(eqn, settled, same)
            continue
        out = _side_of(eqn, sides)
        sides.update(dict.fromkeys(eqn.outvars, out))
        eqns.append(eqn)
    outvars = [_resolved(same, atom) for atom in jaxpr.outvars]
    settled.jaxpr = jaxpr.replace(eqns=eqns, outvars=outvars)
    return settled


def _resolved(same: dict[Var, Atom], atom: Atom) -> Atom:
    return atom if isinstance(atom, Literal) else same.get(atom, atom)


def _settle_crossing(eqn: JaxprEqn, settled: Settled, same: dict[Var, Atom]) -> list[JaxprEqn]:
    """Fills in the ends of a crossing and drops the values that already live at its target."""
    crossing: Crossing = eqn.params["crossing"]
    target = crossing.target
    if target is None:
        found = (v for v in eqn.invars if not isinstance(v, Literal))
        there = next((side for v in found if (side := settled.sides[v])), LEARNER)
        target = origin(crossing, settled.ends, there)
    found = [None if isinstance(v, Literal) else settled.sides[v] for v in eqn.invars]
    present = dict.fromkeys(side for side in found if side is not None and side != target)
    if crossing.source is not None:
        _expect(eqn, crossing.name, [side for side in found if side], crossing.source)
    if len(present) > 1:
        first, second = list(present)[:2]
        raise UserError(
            f"{where(eqn.source_info)}: rl.{crossing.name} takes values from one side, but was "
            f"given one on the {first} side and one on the {second} side; bring one of them over "
            f"with {remedy(first, second)} first."
        )
    source = next(iter(present), crossing.source or target)
    # A call sends the arrays of an argument with and without a batch axis as two crossings of one
    # number. One that sends only constants tells nothing about its source.
    if present or crossing.number not in settled.ends:
        settled.ends[crossing.number] = (source, target)
    for sent, var, side in zip(eqn.invars, eqn.outvars, found, strict=True):
        settled.sides[var] = target
        if side == target:
            same[var] = sent
    crossing = crossing._replace(source=source, target=target)
    # Constants stay in: they have no side, and the cut copies them.
    left = [i for i, side in enumerate(found) if side != target]
    if not left:
        return []
    invars, outvars = [eqn.invars[i] for i in left], [eqn.outvars[i] for i in left]
    return [eqn.replace(invars=invars, outvars=outvars, params={"crossing": crossing})]


def origin(crossing: Crossing, ends: Ends, there: Side) -> Side:
    """The side a `call` was made from.

    The learner, if all arguments already live on the called side, `there`.
    """
    sources = [ends[number][0] for number in crossing.call if number in ends]
    return next((source for source in sources if source != there), LEARNER)


def check_outputs(jaxpr: Jaxpr, sides: Sides, traced: Traced) -> None:
    """Checks that every part of the new state lives on its own side and metrics on the learner."""
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    for (what, wanted), var in zip(_output_names(traced), jaxpr.outvars, strict=False):
        side = None if isinstance(var, Literal) else sides[var]
        if what and side is not None and side != wanted:
            assert isinstance(var, Var)
            raise UserError(
                f"{_made_at(var, makers)}iteration returns {what}, which lives on the {side} side; "
                f"bring it over with {remedy(side, wanted)} first."
            )


def check_marks(traced: Traced, used: Collection[Side | None]) -> None:
    """Checks that every side with marked state runs something."""
    for (what, _), side in zip(_output_names(traced), traced.state_sides, strict=False):
        if side not in used and side != LEARNER:
            raise UserError(
                f"init marks {what} as living on the side {side!r}, but iteration runs nothing "
                f"there: call a function there with rl.call({side!r}, …), or leave the mark out."
            )


def _output_names(traced: Traced) -> list[tuple[str, Side]]:
    """The outputs of the iteration as (description, side); no description for actor state."""
    state = traced.state_tree.unflatten(range(traced.state_tree.num_leaves))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    names = [f"state{jax.tree_util.keystr(path)}" for path, _ in leaves]
    outputs = list(zip(names, traced.state_sides, strict=True))
    outputs += [("", ACTOR)] * traced.actor_tree.num_leaves
    return outputs + [(f"the metric {name!r}", LEARNER) for name in traced.metric_names]


def _made_at(var: Var, makers: dict[Var, JaxprEqn]) -> str:
    """The user's file and line as the start of a sentence; empty for an unchanged input."""
    while (eqn := makers.get(var)) is not None:
        place = where(eqn.source_info)
        if ":" in place:
            return f"{place}: "
        var = next(v for v in eqn.invars if isinstance(v, Var))  # inserted by Dovetail
    return ""


def _side_of(eqn: JaxprEqn, sides: Sides) -> Side | None:
    """The side of an equation's results; None if all its inputs are constants.

    Raises `UserError` if the inputs live on two sides.
    """
    found = {sides[v]: None for v in eqn.invars if not isinstance(v, Literal)}
    present = [side for side in found if side is not None]
    if eqn.primitive is unroll_p:
        _expect(eqn, "unroll", present, ACTOR)
        return ACTOR
    if eqn.primitive is python_p:
        return eqn.params["spec"].side
    if len(present) > 1:
        first, second = present[:2]
        raise UserError(
            f"{where(eqn.source_info)}: this mixes a value on the {first} side with one on the "
            f"{second} side; bring one of them over with {remedy(first, second)} or "
            f"{remedy(second, first)}."
        )
    return present[0] if present else None


def _expect(eqn: JaxprEqn, name: str, present: list[Side], wanted: Side) -> None:
    """Refuses values from any side but `wanted`."""
    wrong = next((side for side in present if side != wanted), None)
    if wrong is not None:
        raise UserError(
            f"{where(eqn.source_info)}: rl.{name} takes values from the {wanted} "
            f"side, but was given one on the {wrong} side; bring it over with "
            f"{remedy(wrong, wanted)} first."
        )
