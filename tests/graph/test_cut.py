"""Which fragments and edges a loop is cut into, and what stays out of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import (
    ActorGradients,
    Drift,
    RecurrentToy,
    Toy,
    ToyState,
    TwoUnrolls,
    drift_actor,
    drift_step,
    drift_task,
    leaves_close,
    line_of,
    with_iteration,
)

from dovetail.algorithm import RL
from dovetail.errors import UserError
from dovetail.graph.interpret import interpret
from dovetail.graph.ir import Fragment, Graph
from dovetail.graph.trace import trace
from dovetail.runtime.iterations import iteration as whole_iteration


def graph_of(algorithm: Toy) -> Graph:
    return trace(algorithm, drift_task(), Drift())


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def edges(graph: Graph) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(edge.boundary, edge.source, edge.targets) for edge in graph.edges]


def primitives(fragment: Any) -> list[str]:
    assert isinstance(fragment, Fragment)
    return [eqn.primitive.name for eqn in fragment.program.jaxpr.eqns]


def assert_as_interpreted(algorithm: Toy) -> dict[str, float]:
    """The graph, run node by node, computes what the plain loop computes; returns the metrics."""
    graph, bound = graph_of(algorithm), algorithm.bind(drift_task())
    state, actor = bound.init(jax.random.key(1)), drift_actor(bound, 4)
    run = jax.jit(whole_iteration(graph, Drift()))
    found = run(jax.tree.leaves(state), jax.tree.leaves(actor))
    new_state, metrics, new_actor, episodes = interpret(bound, drift_step, state, actor)
    leaves_close(found[0], jax.tree.leaves(new_state))
    leaves_close(found[1], jax.tree.leaves(new_actor))
    leaves_close(found[2], [jnp.asarray(metrics[name]) for name, _ in graph.metrics])
    leaves_close(found[3], list(episodes) if graph.episodes else [])
    return {name: float(value) for (name, _), value in zip(graph.metrics, found[2], strict=True)}


@pytest.mark.slow
def test_a_plain_loop() -> None:
    graph = graph_of(Toy())
    assert names(graph) == ["unroll", "learner"]
    assert edges(graph) == [
        ("broadcast", "state", ("unroll",)),
        ("gather", "unroll", ("learner",)),
    ]
    assert graph.fragments == ("unroll.act", "unroll.step", "learner")
    assert [edge.nbytes for edge in graph.edges] == [4 * 4 * 2, 3 * 4 * (4 * 4 + 4 + 4 + 4)]
    assert [name for name, _ in graph.metrics] == ["loss"]
    assert_as_interpreted(Toy())


def test_gradients_on_the_actor_side() -> None:
    graph = graph_of(ActorGradients())
    assert names(graph) == ["learner", "unroll", "actor", "learner.2"]
    assert edges(graph) == [
        ("broadcast", "learner", ("unroll", "actor")),
        ("reduce", "actor", ("learner.2",)),
    ]
    assert_as_interpreted(ActorGradients())


def test_the_learner_splits_only_where_a_boundary_needs_it() -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        apart = jnp.cos(state.params["w"])  # needed only at the end
        sent = jnp.sin(state.params["w"])  # needed by the actors
        trajectory = rl.unroll(self.act, rl.broadcast({"w": sent}), 2)
        reward = rl.gather(trajectory.reward).mean()
        return state._replace(params={"w": apart * reward}), {"reward": reward}

    graph = graph_of(with_iteration(iteration))
    before, _, after = graph.nodes
    assert names(graph) == ["learner", "unroll", "learner.2"]
    assert primitives(before) == ["sin"]
    assert "cos" in primitives(after) and "sin" not in primitives(after)
    assert_as_interpreted(with_iteration(iteration))


def test_two_unrolls_in_one_iteration() -> None:
    graph = graph_of(TwoUnrolls())
    assert [node.name for node in graph.unrolls] == ["unroll", "unroll.2"]
    assert names(graph).index("learner") < names(graph).index("unroll.2")
    assert graph.steps_per_iteration == 2 * 3 * 4
    assert_as_interpreted(TwoUnrolls())


def test_act_may_capture_values_of_the_iteration() -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        params = rl.broadcast(state.params)
        noise = params["w"][0, 0] * 2  # on the actor side
        table = jnp.arange(4.0) * 0.1  # on no side

        def act(params: Any, carry: Any, timestep: Any, key: jax.Array) -> Any:
            moved = timestep._replace(observation=timestep.observation + table)
            action, log_prob, carry = self.act({"w": params["w"] + noise}, carry, moved, key)
            return action, log_prob * noise, carry

        def value(params: Any, carry: Any, timestep: Any) -> jax.Array:
            return self.value(params, carry, timestep) * noise

        trajectory = rl.unroll(act, params, 3, bootstrap=value)
        seen = rl.gather((trajectory.extras, trajectory.bootstrap))
        return state, {"extras": seen[0].sum(), "bootstrap": seen[1].sum()}

    (unroll,) = graph_of(with_iteration(iteration)).unrolls
    assert unroll.act.captured == 2
    assert unroll.bootstrap is not None and unroll.bootstrap.captured == 1
    assert len(unroll.inputs) == 2 + 1 + 1
    assert_as_interpreted(with_iteration(iteration))


def test_constants_cross_boundaries_without_an_edge() -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        scale = rl.broadcast(jnp.arange(1.0, 5.0)[:, None] * 2)
        three, five = rl.gather(jnp.full((1, 4), 3.0))[0, 0], rl.reduce(jnp.float32(5))
        trajectory = rl.unroll(self.act, {"w": rl.broadcast(state.params)["w"] * scale}, 2)
        reward = rl.reduce(trajectory.reward.mean() + scale.sum())
        return state, {"reward": reward, "three": three, "four": three + 1, "five": five}

    algorithm = with_iteration(iteration)
    assert [edge[0] for edge in edges(graph_of(algorithm))] == ["broadcast", "reduce"]
    metrics = assert_as_interpreted(algorithm)
    assert (metrics["three"], metrics["four"], metrics["five"]) == (3.0, 4.0, 5.0)


def test_what_goes_there_and_back_goes_through_the_other_side() -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        there = rl.broadcast((jnp.full((1, 4), 3.0), state.params["w"]))
        constant, weights = rl.gather(there[0]), rl.reduce(there[1])
        back = rl.reduce(rl.broadcast(rl.reduce(there[1].sum())))
        return state._replace(params={"w": weights}), {"three": constant.mean(), "sum": back}

    graph = graph_of(with_iteration(iteration))
    for boundary, source, targets in edges(graph):
        to = "actor" if boundary == "broadcast" else "learner"
        assert source == "state" or graph.node(source).side != to
        assert targets and all(graph.node(target).side == to for target in targets)
    assert assert_as_interpreted(with_iteration(iteration))["three"] == 3.0


def test_an_unroll_whose_weights_are_all_constant() -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        trajectory = rl.unroll(self.act, {"w": jnp.ones((4, 2))}, 2)
        return state, {"reward": rl.gather(trajectory.reward).mean()}

    assert_as_interpreted(with_iteration(iteration))


def test_metrics_that_are_constants() -> None:
    algorithm = with_iteration(lambda self, rl, state: (state, {"one": 1.0, "two": jnp.int32(2)}))
    assert assert_as_interpreted(algorithm) == {"one": 1.0, "two": 2.0}


class Square(Toy):
    """Its weights have an axis as long as there are environments."""

    def init(self, key: jax.Array) -> ToyState:
        return ToyState({"w": jax.random.normal(key, (3, 4))}, jnp.int32(0))


def test_a_value_may_leave_as_it_came_through_a_fragment_of_its_own() -> None:
    """Several actors' pieces are joined by whoever takes them, so somebody must."""

    def gathered(self: Any, rl: RL, state: Any) -> Any:
        weights = rl.broadcast(state.params)["w"] + 1
        return state._replace(params={"w": rl.gather(weights)}), {}

    def reduced(self: Any, rl: RL, state: Any) -> Any:
        return state, {"total": rl.reduce(rl.broadcast(state.params)["w"].sum())}

    for boundary, iteration in (("gather", gathered), ("reduce", reduced)):
        graph = graph_of(with_iteration(iteration, Square))
        assert edges(graph) == [
            ("broadcast", "state", ("actor",)),
            (boundary, "actor", ("learner",)),
        ]
        assert_as_interpreted(with_iteration(iteration, Square))


def test_what_is_gathered_has_an_axis_for_the_environments() -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        trajectory = rl.unroll(self.act, rl.broadcast(state.params), 2)
        return state, {"reward": rl.gather(trajectory.reward.sum(1)).sum()}  # here

    with pytest.raises(UserError) as caught:
        graph_of(with_iteration(iteration))
    assert str(caught.value).startswith(f"{line_of(iteration)}:")
    assert str(caught.value).endswith(
        "rl.gather joins actors along axis 1, the environments', but was given an array of shape "
        "[2] from actors with 4 environments; bring it over with rl.reduce, or put the "
        "environments on axis 1."
    )


def test_an_iteration_that_does_nothing() -> None:
    algorithm = with_iteration(lambda self, rl, state: (state, {}))
    assert graph_of(algorithm).nodes == ()
    assert assert_as_interpreted(algorithm) == {}


def test_prints_stay_on_the_side_of_what_they_print() -> None:
    seen: list[tuple[str, float]] = []

    def iteration(self: Any, rl: RL, state: Any) -> Any:
        trajectory = rl.unroll(self.act, rl.broadcast(state.params), 2)
        jax.debug.callback(lambda x: seen.append(("actor", float(x))), trajectory.reward.sum())
        batch = rl.reduce(trajectory.reward.sum())
        jax.debug.callback(lambda x: seen.append(("learner", float(x))), batch * 2)
        return state, {"reward": batch}

    graph = graph_of(with_iteration(iteration))
    assert "debug_callback" in primitives(graph.node("actor"))
    assert "debug_callback" in primitives(graph.node("learner"))
    metrics = assert_as_interpreted(with_iteration(iteration))
    jax.effects_barrier()
    assert dict(seen) == pytest.approx(
        {"actor": metrics["reward"], "learner": 2 * metrics["reward"]}
    )


def test_every_value_of_a_fragment_is_on_its_side() -> None:
    for algorithm in (Toy(), TwoUnrolls(), ActorGradients(), RecurrentToy()):
        for node in graph_of(algorithm).nodes:
            assert {value.side for value in node.outputs} == {node.side}


@pytest.mark.slow
def test_carries_are_reset_where_an_episode_begins() -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        trajectory = rl.gather(rl.unroll(self.act, rl.broadcast(state.params), 12))
        steps = trajectory.extras[1]["steps"]
        first = trajectory.first
        age = jax.lax.associative_scan(
            lambda a, b: (jnp.where(b[1], b[0], a[0] + b[0]), a[1] | b[1]),
            (jnp.where(first, 0, 1), first),
        )[0]
        return state, {"episodes": first.sum(), "wrong": (steps != age).sum()}

    metrics = assert_as_interpreted(with_iteration(iteration, RecurrentToy))
    assert metrics["episodes"] > 4  # more than the four with which the environments began
    assert metrics["wrong"] == 0


def test_sides_of_edges() -> None:
    gather = graph_of(Toy()).edges[1]
    assert (gather.from_side, gather.to_side) == ("actor", "learner")
    shapes = [(value.shape, value.dtype) for value in gather.values]
    assert shapes == [
        ((3, 4, 4), np.float32),
        ((3, 4), np.int32),
        ((3, 4), np.float32),
        ((3, 4), np.float32),
    ]
