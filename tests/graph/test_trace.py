"""What tracing allows, what it refuses, and with which words."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from toys import Drift, RecurrentToy, Toy, drift_task, line_of, with_iteration

from dovetail.algorithm import RL, Task
from dovetail.envs.interface import Continuous, EnvSpec, MultiDiscrete
from dovetail.errors import UserError
from dovetail.graph.ir import Fragment
from dovetail.graph.trace import trace


def refusal(algorithm: Toy, task: Task | None = None) -> str:
    with pytest.raises(UserError) as caught:
        trace(algorithm, task or drift_task(), Drift())
    return str(caught.value)


def in_jit(self: Any, rl: RL, state: Any) -> Any:
    jax.jit(lambda p: rl.broadcast(p))(state.params)  # here
    return state, {}


def in_scan(self: Any, rl: RL, state: Any) -> Any:
    def body(params: Any, _: Any) -> Any:
        return rl.broadcast(params), None  # here

    jax.lax.scan(body, state.params, None, 2)
    return state, {}


def in_cond(self: Any, rl: RL, state: Any) -> Any:
    def sent() -> Any:
        return rl.gather(state.params)  # here

    jax.lax.cond(state.updates > 0, sent, lambda: state.params)
    return state, {}


def in_vmap(self: Any, rl: RL, state: Any) -> Any:
    jax.vmap(rl.reduce)(state.params)  # here
    return state, {}


def unroll_in_jit(self: Any, rl: RL, state: Any) -> Any:
    params = rl.broadcast(state.params)
    jax.jit(lambda p: rl.unroll(self.act, p, 2))(params)  # here
    return state, {}


@pytest.mark.parametrize(
    ("iteration", "boundary"),
    [
        (in_jit, "broadcast"),
        (in_scan, "broadcast"),
        (in_cond, "gather"),
        (in_vmap, "reduce"),
        (unroll_in_jit, "unroll"),
    ],
)
def test_a_boundary_inside_a_transformation_is_refused(iteration: Any, boundary: str) -> None:
    found = refusal(with_iteration(iteration))
    assert found.startswith(line_of(iteration) + ":")
    assert found.endswith(
        f"rl.{boundary} stands inside jit, scan, cond or vmap, where the graph cannot be cut; "
        "call it in iteration itself."
    )


def test_mean_may_stand_inside_jit_and_scan() -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        def body(params: Any, _: Any) -> Any:
            return rl.mean(params), None

        params, _ = jax.lax.scan(body, state.params, None, 3)
        params = jax.jit(lambda p: rl.mean(p))(params)
        return state._replace(params=params), {}

    (learner,) = trace(with_iteration(iteration), drift_task(), Drift()).nodes
    assert isinstance(learner, Fragment)
    assert learner.means == 2


def test_the_algorithm_sees_the_whole_task_and_the_trace_one_share() -> None:
    seen: list[int] = []

    def iteration(self: Any, rl: RL, state: Any) -> Any:
        trajectory = rl.unroll(self.act, rl.broadcast(state.params), 2)
        seen.extend([self.task.num_envs, trajectory.reward.shape[1]])
        return state, {}

    graph = trace(with_iteration(iteration), drift_task(12), Drift(), {"learner": 3, "actor": 3})
    assert seen == [12, 4]
    assert (graph.num_envs, graph.actor_envs) == (12, 4)
    assert graph.steps_per_iteration == 24


def test_environments_that_cannot_be_split() -> None:
    with pytest.raises(UserError, match=r"10 environments cannot be split evenly among 4 replicas"):
        trace(Toy(), drift_task(10), Drift(), {"learner": 4})


def test_next_observation_is_recorded_only_if_somebody_reads_it() -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        trajectory = rl.gather(rl.unroll(self.act, rl.broadcast(state.params), 2))
        read = trajectory.next_observation if self.rate else trajectory.observation
        return state, {"sum": read.sum()}

    def live(algorithm: Toy) -> dict[str, bool]:
        (unroll,) = trace(algorithm, drift_task(), Drift()).unrolls
        return unroll.trajectory_tree.unflatten(unroll.live)._asdict()

    algorithm = with_iteration(iteration)
    reads_next, reads_now = live(algorithm), live(type(algorithm)(rate=0.0))
    assert (reads_next["next_observation"], reads_next["observation"]) == (True, False)
    assert (reads_now["next_observation"], reads_now["observation"]) == (False, True)
    assert not reads_now["reward"]


def test_what_an_iteration_must_return() -> None:
    assert "Altered.iteration must return (state, metrics), but returned " in refusal(
        with_iteration(lambda self, rl, state: state.params)
    )
    assert refusal(with_iteration(lambda self, rl, state: (state, [1.0]))).endswith(
        "with metrics a dict of scalars, but its metrics are a list."
    )


def test_a_metric_that_is_no_scalar() -> None:
    vector = with_iteration(lambda self, rl, state: (state, {"v": jnp.zeros(3)}))
    assert refusal(vector).startswith("metric 'v' has shape [3]; metrics are scalars")
    word = with_iteration(lambda self, rl, state: (state, {"v": "high"}))
    assert refusal(word) == "metric 'v' is 'high'; metrics are scalars, each a number."


def test_a_state_of_another_structure_shape_or_dtype() -> None:
    structure = with_iteration(lambda self, rl, state: (state.params, {}))
    assert "Altered.iteration returns no state.params['w'], which init makes." in refusal(structure)
    shape = with_iteration(
        lambda self, rl, state: (state._replace(params={"w": state.params["w"][:3]}), {})
    )
    assert refusal(shape).endswith(
        "Altered.iteration changes state.params['w'] from float32[4, 2] to float32[3, 2]; "
        "keep its shape and dtype."
    )
    dtype = with_iteration(
        lambda self, rl, state: (state._replace(updates=state.updates + 1.0), {})
    )
    assert "changes state.updates from int32[] to float32[]" in refusal(dtype)


def acting(act: Any) -> Any:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        rl.unroll(act, rl.broadcast(state.params), 2)
        return state, {}

    return iteration


def test_a_carry_of_another_structure_or_shape() -> None:
    structure = acting(lambda params, carry, timestep, key: (jnp.int32(0), (), (carry,)))
    told = refusal(with_iteration(structure, RecurrentToy))
    assert "Altered.act returns no carry['memory'], which initial_carry makes." in told
    assert f"{__file__}:" in told
    shape = acting(
        lambda params, carry, timestep, key: (
            jnp.int32(0),
            (),
            {**carry, "memory": jnp.zeros(3)},
        )
    )
    assert refusal(with_iteration(shape, RecurrentToy)).endswith(
        "Altered.act changes carry['memory'] from shape [4] to [3]; keep its shape."
    )


def test_an_action_that_the_environment_does_not_take() -> None:
    floats = acting(lambda params, carry, timestep, key: (jnp.zeros(3), (), carry))
    assert refusal(with_iteration(floats)).endswith(
        "Altered.act returns the action float32[3], but toy:Drift takes Discrete(n=2): "
        "a whole number of shape []."
    )
    observation = Drift.spec.observation
    for space, wanted in (
        (MultiDiscrete((2, 3)), "a whole number of shape [2]"),
        (Continuous(5, True), "a float of shape [5]"),
    ):
        task = Task(EnvSpec("toy:Other", observation, space), 4, 1000)
        with pytest.raises(UserError) as caught:
            trace(with_iteration(floats), task)
        assert str(caught.value).endswith(f"{wanted}.")


@pytest.mark.parametrize("length", [0, -1, 2.5])
def test_an_unroll_of_no_length(length: Any) -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        rl.unroll(self.act, rl.broadcast(state.params), length)  # here
        return state, {}

    found = refusal(with_iteration(iteration))
    assert found.startswith(line_of(iteration) + ":")
    assert found.endswith(f"at least 1, but its length is {length}.")


def test_host_environments_have_no_step_program() -> None:
    (unroll,) = trace(Toy(), drift_task()).unrolls
    assert unroll.step.program is None
    assert unroll.per_step_bytes == (4 * 4, 4 * (4 * 4 + 4 + 1 + 1))


def test_acting_in_several_calls_costs_what_one_call_costs() -> None:
    (whole,), (halves,) = (trace(Toy(), drift_task(), None, None, n).unrolls for n in (None, 2))
    # What does not depend on the batch is computed in each call.
    assert 0 < whole.act.flops <= halves.act.flops < 1.1 * whole.act.flops


def test_plain_python_says_what_it_returns() -> None:
    class Sized:
        shape = (4,)

    def iteration(self: Any, rl: RL, state: Any) -> Any:
        rl.call("judge", jnp.sum, state.params["w"], host=True, result=Sized())
        return state, {}

    assert "needs to know what it returns: give result=" in refusal(with_iteration(iteration))


def test_plain_python_without_a_connection_reaches_nothing() -> None:
    def iteration(self: Any, rl: RL, state: Any) -> Any:
        one = jax.ShapeDtypeStruct((), jnp.float32)
        return state, {
            "sum": rl.call("judge", lambda w: w.sum(), state.params["w"], host=True, result=one)
        }

    graph = trace(with_iteration(iteration), drift_task(), Drift())
    assert graph.reaching == ()
    assert graph.sides == ("learner", "judge")
