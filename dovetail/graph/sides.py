"""Side inference: which role every value lives on, as a type check.

One forward pass over the equations. An equation takes the side of its inputs; two sides in one
equation are an error that names the user's line and the boundary that would mend it. Values that
depend on neither side (constants) have none, and may be used anywhere.
"""

from collections.abc import Sequence

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from dovetail.errors import UserError
from dovetail.graph.ir import Side
from dovetail.graph.primitives import BOUNDARIES, CROSSINGS, unroll_p, where
from dovetail.graph.traced import Traced

Sides = dict[Var, Side | None]

REMEDY = {
    (Side.LEARNER, Side.ACTOR): "rl.broadcast (learner → actor)",
    (Side.ACTOR, Side.LEARNER): "rl.gather or rl.reduce (actor → learner)",
    (Side.ACTOR, Side.REPLAY): "rl.insert (actor → replay)",
    (Side.REPLAY, Side.LEARNER): "rl.sample (replay → learner)",
    (Side.LEARNER, Side.REPLAY): "rl.update_priorities (learner → replay)",
    (Side.REPLAY, Side.ACTOR): "rl.sample and rl.broadcast (replay → learner → actor)",
}


def infer_sides(jaxpr: Jaxpr, state_sides: Sequence[Side]) -> Sides:
    """The side of every variable; the first inputs are those of the state, the rest the actors'."""
    sides: Sides = dict.fromkeys(jaxpr.constvars)
    for position, var in enumerate(jaxpr.invars):
        sides[var] = state_sides[position] if position < len(state_sides) else Side.ACTOR
    for eqn in jaxpr.eqns:
        out = _side_of(eqn, sides)
        for var in eqn.outvars:
            sides[var] = out
    return sides


def check_outputs(jaxpr: Jaxpr, sides: Sides, traced: Traced) -> None:
    """The learner's new state and the metrics must live on the learner's side, what a replay holds
    on its own."""
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    for (what, wanted), var in zip(_output_names(traced), jaxpr.outvars, strict=False):
        side = None if isinstance(var, Literal) else sides[var]
        if what and side is not None and side is not wanted:
            assert isinstance(var, Var)
            raise UserError(
                f"{_made_at(var, makers)}iteration returns {what}, which lives on the {side} side; "
                f"bring it over with {REMEDY[side, wanted]} first."
            )


def _output_names(traced: Traced) -> list[tuple[str, Side]]:
    """What the learner gets back, in words, and on which side; empty for what the actors keep."""
    state = traced.state_tree.unflatten(range(traced.state_tree.num_leaves))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    names = [f"state{jax.tree_util.keystr(path)}" for path, _ in leaves]
    outputs = list(zip(names, traced.state_sides, strict=True))
    outputs += [("", Side.ACTOR)] * traced.actor_tree.num_leaves
    return outputs + [(f"the metric {name!r}", Side.LEARNER) for name in traced.metric_names]


def _made_at(var: Var, makers: dict[Var, JaxprEqn]) -> str:
    """The user's file and line, as the start of a sentence; empty if it came in as it is."""
    while (eqn := makers.get(var)) is not None:
        place = where(eqn.source_info)
        if ":" in place:
            return f"{place}: "
        var = next(v for v in eqn.invars if isinstance(v, Var))  # a conversion of ours
    return ""


def _side_of(eqn: JaxprEqn, sides: Sides) -> Side | None:
    found = {sides[v]: None for v in eqn.invars if not isinstance(v, Literal)}
    present = [side for side in found if side is not None]
    if eqn.primitive is unroll_p:
        _expect(eqn, present, Side.ACTOR)
        return Side.ACTOR
    if eqn.primitive in BOUNDARIES:
        source, target = CROSSINGS[eqn.primitive.name]
        _expect(eqn, present, source)
        return target
    if len(present) > 1:
        first, second = present[:2]
        raise UserError(
            f"{where(eqn.source_info)}: this mixes a value on the {first} side with one on the "
            f"{second} side; bring one of them over with {REMEDY[first, second]} or "
            f"{REMEDY[second, first]}."
        )
    return present[0] if present else None


def _expect(eqn: JaxprEqn, present: list[Side], wanted: Side) -> None:
    """A boundary takes values from one side only."""
    wrong = next((side for side in present if side is not wanted), None)
    if wrong is not None:
        raise UserError(
            f"{where(eqn.source_info)}: rl.{eqn.primitive.name} takes values from the {wanted} "
            f"side, but was given one on the {wrong} side; bring it over with "
            f"{REMEDY[wrong, wanted]} first."
        )
