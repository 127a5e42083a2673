"""Whatever the loop, its graph run node by node gives what the plain loop gives."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import (
    Drift,
    Toy,
    ToyState,
    drift_actor,
    drift_step,
    drift_task,
    leaves_close,
)

from dovetail.algorithm import RL, Metrics
from dovetail.graph.interpret import interpret
from dovetail.graph.ir import Fragment
from dovetail.graph.trace import trace
from dovetail.runtime.programs import iteration as whole_iteration

SIDES = ("learner", "actor", "constant")
ANYWHERE = ("sin", "add", "loop", "cross", "constant")

Op = tuple[str, str, int, int]
"""What to do, with values of which side, and which two of them."""


@dataclass(frozen=True)
class Program(Toy):
    """A loop that carries out `ops` on the values made so far, float32[3] each."""

    ops: tuple[Op, ...] = ()

    def init(self, key: jax.Array) -> ToyState:
        return ToyState({"w": jnp.array([0.3, -0.2, 0.9])}, jnp.int32(0))

    def iteration(self, rl: RL, state: ToyState) -> tuple[ToyState, Metrics]:
        values: dict[str, list[jax.Array]] = {
            "learner": [state.params["w"]],
            "actor": [],
            "constant": [jnp.array([1.0, 0.5, 0.25])],
        }
        for op in self.ops:
            self._carry_out(rl, values, op)
        learner, constants = values["learner"], values["constant"]
        metrics = {"last": learner[-1].sum(), "constant": constants[-1].sum()}
        return state._replace(params={"w": sum(learner, jnp.zeros(3))}), metrics

    def _carry_out(self, rl: RL, values: dict[str, list[jax.Array]], op: Op) -> None:
        kind, side, i, j = op
        mine = values[side]
        if not mine:
            return
        others = mine + values["constant"]
        x, y = mine[i % len(mine)], others[j % len(others)]
        match kind:
            case "sin":
                mine.append(jnp.sin(x))
            case "add":
                mine.append(x + 0.5 * y)
            case "loop":
                mine.append(
                    jax.lax.scan(lambda c, _: (rl.mean(jnp.cos(c + y)), None), x, None, 2)[0]
                )
            case "constant":
                values["constant"].append(jnp.full(3, 0.1 * j) + values["constant"][-1])
            case "cross" if side == "actor":
                values["learner"].append((rl.gather if j % 2 else rl.reduce)(x))
            case "cross":
                values["actor"].extend(rl.broadcast([x, y]))
            case "unroll":
                values["actor"].append(self._unrolled(rl, x, y))
            case _:
                raise ValueError(kind)

    def _unrolled(self, rl: RL, weights: jax.Array, captured: jax.Array) -> jax.Array:
        def act(params: Any, carry: Any, timestep: Any, key: jax.Array) -> Any:
            bias = (params * captured).sum()
            return (timestep.observation.sum() > bias).astype(jnp.int32), bias, carry

        trajectory = rl.unroll(act, weights, 2)
        return trajectory.reward[:, :3].mean(0) + trajectory.extras.sum()


def ops(*kinds: str, most: int) -> st.SearchStrategy[list[Op]]:
    number = st.integers(0, 7)
    return st.lists(
        st.tuples(st.sampled_from(kinds), st.sampled_from(SIDES), number, number), max_size=most
    )


def assert_as_interpreted(program: Program, compiled: bool) -> None:
    bound = program.bind(drift_task())
    graph = trace(program, drift_task(), Drift())
    state, actor = bound.init(jax.random.key(0)), drift_actor(bound, 4)
    run = whole_iteration(graph, Drift())
    found = (jax.jit(run) if compiled else run)(jax.tree.leaves(state), jax.tree.leaves(actor))
    new_state, metrics, new_actor, _ = interpret(bound, drift_step, state, actor)
    leaves_close(found[0], jax.tree.leaves(new_state), 1e-4)
    leaves_close(found[1], jax.tree.leaves(new_actor), 1e-4)
    leaves_close(found[2], [metrics[name] for name, _ in graph.metrics], 1e-4)
    for node in graph.nodes:
        if isinstance(node, Fragment):
            assert {value.side for value in node.outputs} == {node.side}


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(ops(*ANYWHERE, most=14))
def test_programs_without_unrolls(program: list[Op]) -> None:
    assert_as_interpreted(Program(ops=tuple(program)), compiled=False)


@settings(max_examples=4, deadline=None, database=None, derandomize=True)
@given(ops(*ANYWHERE, most=5), ops(*ANYWHERE, most=4), st.integers(0, 7))
def test_programs_with_unrolls(before: list[Op], after: list[Op], i: int) -> None:
    weights: Op = ("cross", "learner", i, i)
    unroll: Op = ("unroll", "actor", i, i + 1)
    assert_as_interpreted(
        Program(ops=(*before, weights, unroll, *after, unroll, ("cross", "actor", -1, i))), True
    )
