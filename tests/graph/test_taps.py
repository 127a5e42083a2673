"""A tap shows values of the unroll on the home side, and changes nothing else."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from toys import Drift, Toy, TwoUnrolls, drift_actor, drift_task, leaves_close

from dovetail.algorithm import Trajectory
from dovetail.boundaries import ACTOR, LEARNER, How
from dovetail.graph.ir import Fragment, Graph
from dovetail.graph.show import text
from dovetail.graph.taps import CannotTap, tap
from dovetail.graph.trace import trace
from dovetail.runtime.iterations import iteration


def wanted(trajectory: Trajectory) -> Any:
    return {"after": trajectory.next_observation, "reward": trajectory.reward}


def graph_of(copies: int = 1) -> Graph:
    return trace(Toy(), drift_task(), Drift(), {ACTOR: copies})


def test_what_nobody_read_is_shown_and_the_rest_stays_the_same() -> None:
    plain = graph_of()
    tapped = tap(plain, wanted)
    [unroll], [before] = tapped.unrolls, plain.unrolls
    fields = [unroll.trajectory_tree.unflatten(u.live).next_observation for u in (before, unroll)]
    assert fields == [False, True]
    assert tapped.tap is not None
    assert tapped.tap.tree.unflatten([v.shape for v in tapped.tapped]) == {
        "after": (3, 4, 4),
        "reward": (3, 4),
    }
    bound = Toy().bind(drift_task())
    leaves = [jax.tree.leaves(x) for x in (bound.init(jax.random.key(1)), drift_actor(bound, 4))]
    found, same = (jax.jit(iteration(graph, Drift()))(*leaves) for graph in (tapped, plain))
    leaves_close(jax.tree.leaves(found[:4]), jax.tree.leaves(same[:4]))
    after, reward = found[4]
    assert np.ptp(np.asarray(after)) > 0 and np.ptp(np.asarray(reward)) > 0
    assert same[4] == []


def test_an_edge_carries_it_home_from_all_copies() -> None:
    tapped = tap(graph_of(2), wanted)
    edge = tapped.edges[-1]
    assert (edge.boundary, edge.source, edge.targets) == ("record", "unroll", ("learner.record",))
    assert (edge.from_side, edge.to_side, edge.how) == (ACTOR, LEARNER, How.JOIN)
    assert [value.shape[1] for value in edge.values] == [2, 2]  # of one copy,
    assert [value.shape[1] for value in tapped.tapped] == [4, 4]  # and of both
    shown = tapped.node("learner.record")
    assert isinstance(shown, Fragment) and (shown.flops, shown.means) == (0, 0)
    assert "record" in text(tapped) and "record" not in text(graph_of(2))


def test_there_must_be_one_unroll() -> None:
    with pytest.raises(CannotTap, match="TwoUnrolls unrolls 2 times in an iteration, and --record"):
        tap(trace(TwoUnrolls(), drift_task(), Drift()), wanted)
    none = replace(graph_of(), nodes=())
    with pytest.raises(CannotTap, match="Toy does not unroll, so there is nothing to --record"):
        tap(none, wanted)
