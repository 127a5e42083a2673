"""Values that are used on the wrong side: the sentence names the line, the sides and the remedy."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from toys import Drift, drift_task, line_of, with_iteration

from dovetail.algorithm import RL
from dovetail.errors import UserError
from dovetail.graph.trace import trace

BROADCAST = "rl.broadcast (learner → actor)"
GATHER = "rl.gather or rl.reduce (actor → learner)"


def refusal(iteration: Any) -> str:
    with pytest.raises(UserError) as caught:
        trace(with_iteration(iteration), drift_task(), Drift())
    return str(caught.value)


def test_a_learner_value_used_with_an_actor_value() -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        trajectory = rl.unroll(self.act, rl.broadcast(state.params), 2)
        mixed = trajectory.reward.sum() * state.params["w"].sum()  # here
        return state, {"mixed": mixed}

    assert re.fullmatch(
        re.escape(line_of(iteration))
        + r":\d+: this mixes a value on the actor side with one on the learner side; bring one of "
        + re.escape(f"them over with {GATHER} or {BROADCAST}."),
        refusal(iteration),
    )


def test_an_unroll_with_weights_that_were_not_broadcast() -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        rl.unroll(self.act, state.params, 2)  # here
        return state, {}

    found = refusal(iteration)
    assert found.startswith(line_of(iteration) + ":")
    assert found.endswith(
        "rl.unroll takes values from the actor side, but was given one on the learner side; "
        f"bring it over with {BROADCAST} first."
    )


def test_act_captures_a_learner_value() -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        def act(params: Any, carry: Any, timestep: Any, key: jax.Array) -> Any:
            return self.act(state.params, carry, timestep, key)

        rl.unroll(act, rl.broadcast(state.params), 2)  # here
        return state, {}

    found = refusal(iteration)
    assert found.startswith(line_of(iteration) + ":")
    assert "given one on the learner side" in found


def test_gather_of_a_learner_value() -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        found = rl.gather(jnp.ones((1, 4)) * state.updates)  # here
        return state, {"found": found.sum()}

    found = refusal(iteration)
    assert found.startswith(line_of(iteration) + ":")
    assert "rl.gather takes values from the actor side" in found


@pytest.mark.parametrize("as_type", [jnp.float32, jnp.int32])
def test_a_metric_left_on_the_actor_side(as_type: Any) -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        trajectory = rl.unroll(self.act, rl.broadcast(state.params), 2)
        return state, {"reward": trajectory.reward.sum().astype(as_type)}  # here

    found = refusal(iteration)
    assert found.startswith(line_of(iteration) + ":")
    assert found.endswith(
        "iteration returns the metric 'reward', which lives on the actor side; "
        f"bring it over with {GATHER} first."
    )


def test_a_state_that_holds_an_actor_value() -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        sent = rl.broadcast(state.params)
        return state._replace(params={"w": sent["w"] + 1}), {}  # here

    found = refusal(iteration)
    assert found.startswith(line_of(iteration) + ":")
    assert found.endswith(
        "iteration returns state.params['w'], which lives on the actor side; "
        f"bring it over with {GATHER} first."
    )
