"""Whatever the loop, its graph run node by node gives what the plain loop gives.

So do two actors and a learner that meet whenever the loop lets them.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from small import Started
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
from dovetail.runtime.iterations import iteration as whole_iteration
from dovetail.strategies import ActorLearner
from dovetail.training.start import first_state

SIDES = ("learner", "actor", "constant")
ANYWHERE = ("sin", "add", "loop", "cross", "constant")
ENVS = 4

Op = tuple[str, str, int, int]
"""What to do, with values of which side, and which two of them."""


@dataclass(frozen=True)
class Program(Toy):
    """A loop that carries out `ops` on the values made so far, float32[3] each."""

    num_envs: int = ENVS
    ops: tuple[Op, ...] = ()
    apart: bool = False
    """Whether actors see only their own environments, so that these are told to the learner."""

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
            case "cross" if side == "actor" and (j % 2 == 0 or self.apart):
                values["learner"].append(rl.reduce(x))
            case "cross" if side == "actor":
                values["learner"].append(rl.gather(jnp.outer(x, jnp.ones(ENVS)))[:, j % ENVS])
            case "cross":
                values["actor"].extend(rl.broadcast([x, y]))
            case "unroll" if self.apart:
                rewards = rl.gather(self._rewards(rl, x, y)[0])
                values["learner"].append(jnp.concatenate([rewards.mean(1), rewards[0, 1:2]]))
            case "unroll":
                rewards, bias = self._rewards(rl, x, y)
                values["actor"].append(rewards[:, :3].mean(0) + bias)
            case _:
                raise ValueError(kind)

    def _rewards(self, rl: RL, weights: jax.Array, captured: jax.Array) -> Any:
        def act(params: Any, carry: Any, timestep: Any, key: jax.Array) -> Any:
            bias = (params * captured).sum()
            return (timestep.observation.sum() > bias).astype(jnp.int32), bias, carry

        trajectory = rl.unroll(act, weights, 2)
        return trajectory.reward, trajectory.extras.sum()


def ops(*kinds: str, most: int) -> st.SearchStrategy[list[Op]]:
    number = st.integers(0, 7)
    return st.lists(
        st.tuples(st.sampled_from(kinds), st.sampled_from(SIDES), number, number), max_size=most
    )


def assert_as_interpreted(program: Program, compiled: bool) -> None:
    bound = program.bind(drift_task(ENVS))
    graph = trace(program, drift_task(ENVS), Drift())
    state, actor = bound.init(jax.random.key(0)), drift_actor(bound, ENVS)
    run = whole_iteration(graph, Drift())
    found = (jax.jit(run) if compiled else run)(jax.tree.leaves(state), jax.tree.leaves(actor))
    new_state, metrics, new_actor, _ = interpret(bound, drift_step, state, actor)
    leaves_close(found[0], jax.tree.leaves(new_state), 1e-4)
    leaves_close(found[1], jax.tree.leaves(new_actor), 1e-4)
    leaves_close(found[2], [metrics[name] for name, _ in graph.metrics], 1e-4)
    for node in graph.nodes:
        if isinstance(node, Fragment):
            assert {value.side for value in node.outputs} == {node.side}


def assert_two_actors_as_interpreted(program: Program) -> None:
    bound = program.bind(drift_task(ENVS))
    state, actor = first_state(bound, Drift(), ENVS, seed=0)
    metrics: Metrics = {}
    for _ in range(2):
        state, metrics, actor, _ = interpret(bound, drift_step, state, actor)
    with Started(program, Drift(), ActorLearner(actors=2, staleness=0)) as running:
        running.advance(1)
        report = running.advance(1)
    leaves_close(running.state, state, 1e-4)
    leaves_close(running.actor, actor, 1e-4)
    leaves_close(report.metrics, metrics, 1e-4)


def around_unrolls(before: list[Op], between: list[Op], after: list[Op], i: int) -> tuple[Op, ...]:
    weights: Op = ("cross", "learner", i, i)
    unroll: Op = ("unroll", "actor", i, i + 1)
    again = (weights, unroll) if i % 2 else (unroll,)
    return (*before, weights, unroll, *between, *again, *after, ("cross", "actor", -1, 2 * i))


@pytest.mark.slow
@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(ops(*ANYWHERE, most=14))
def test_programs_without_unrolls(program: list[Op]) -> None:
    assert_as_interpreted(Program(ops=tuple(program)), compiled=False)


@pytest.mark.slow
@settings(max_examples=4, deadline=None, database=None, derandomize=True)
@given(ops(*ANYWHERE, most=5), ops(*ANYWHERE, most=4), st.integers(0, 7))
def test_programs_with_unrolls(before: list[Op], between: list[Op], i: int) -> None:
    assert_as_interpreted(Program(ops=around_unrolls(before, between, [], i)), compiled=True)


@pytest.mark.slow
@settings(
    max_examples=6,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],  # to shrink what hangs would take minutes
)
@given(*[ops(*ANYWHERE, most=4)] * 3, st.integers(0, 7))
def test_programs_of_two_actors(
    before: list[Op], between: list[Op], after: list[Op], i: int
) -> None:
    ops = around_unrolls(before, between, after, i)
    assert_two_actors_as_interpreted(Program(ops=ops, apart=True))
