"""What follows from a placement: the link of every edge, and what a reader is told."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from placed import HOST, MACHINE, NATIVE, TOY, planned
from toys import ActorGradients, Drift, Toy, ToyState, TwoUnrolls, with_iteration

from dovetail.algorithm import RL, Algorithm, Correction
from dovetail.plan.ir import LinkKind, Plan, Resources
from dovetail.strategies import (
    ActorLearner,
    CentralInference,
    DataParallel,
    Environments,
    Fused,
    Local,
    ParameterServer,
    SplitDevices,
)
from dovetail.strategies.interface import Strategy

F, H, Q, M = LinkKind.FUSED, LinkKind.HANDOFF, LinkKind.QUEUE, LinkKind.SHARED_MEMORY
JAX = Drift()


class Bearing(ActorGradients):
    """Takes gradients of any age."""

    correction = Correction("nothing", None)


class Lagging(Toy):
    """Takes trajectories of the version before."""

    correction = Correction("a little", 1)


def kinds(plan: Plan) -> tuple[LinkKind, ...]:
    """Of the weights' link, the results', the actions' and the observations'."""
    weights, results, action, observation = (link.kind for link in plan.links)
    return weights, results, action, observation


@pytest.mark.parametrize(
    ("strategy", "env", "expected"),
    [
        (Fused(), JAX, (F, F, F, F)),
        (Fused(devices=4), JAX, (F, F, F, F)),
        (Local(), JAX, (H, H, H, H)),
        (Local(), HOST, (H, H, H, H)),
        (ActorLearner(staleness=0), JAX, (Q, Q, F, F)),
        (ActorLearner(staleness=0, processes=False), HOST, (Q, Q, H, H)),
        (ActorLearner(staleness=0, processes=True), HOST, (Q, Q, M, M)),
        (CentralInference(), JAX, (Q, Q, Q, Q)),
        (CentralInference(processes=False), HOST, (Q, Q, Q, Q)),
        (CentralInference(processes=True), HOST, (Q, Q, M, M)),
        (DataParallel(), JAX, (F, F, F, F)),
        (DataParallel(), HOST, (Q, Q, H, H)),
        (SplitDevices(staleness=0), JAX, (Q, Q, F, F)),
        (SplitDevices(staleness=0), HOST, (Q, Q, H, H)),
        (Environments(), JAX, (H, H, Q, Q)),
        (Environments(processes=False), HOST, (H, H, Q, Q)),
        (Environments(processes=True), HOST, (H, H, M, M)),
    ],
)
def test_every_edge_gets_the_cheapest_link_that_its_ends_allow(
    strategy: Strategy, env: Any, expected: tuple[LinkKind, ...]
) -> None:
    plan, _ = planned(strategy, Toy(), env)
    assert [link.boundary for link in plan.links] == [
        "broadcast",
        "gather",
        "action",
        "observation",
    ]
    assert kinds(plan) == expected
    assert plan.fused == (set(expected) == {F})


@pytest.mark.parametrize(("env", "stepping"), [(JAX, F), (HOST, H)], ids=["jax", "host"])
def test_gradients_go_to_a_master_by_queues(env: Any, stepping: LinkKind) -> None:
    for synchronous in (True, False):
        strategy = ParameterServer(synchronous=synchronous)
        algorithm = Bearing() if not synchronous else ActorGradients()
        plan, _ = planned(strategy, algorithm, env)
        found = [(link.boundary, link.source, link.target, link.kind) for link in plan.links]
        assert found == [
            ("broadcast", "learner", "unroll.act", Q),
            ("reduce", "actor", "learner.2", Q),
            ("action", "unroll.act", "unroll.step", stepping),
            ("observation", "unroll.step", "unroll.act", stepping),
        ]


@pytest.mark.parametrize(
    "strategy", [ActorLearner(staleness=0), CentralInference(), Environments()]
)
def test_environments_that_hold_pythons_lock_get_processes(strategy: Strategy) -> None:
    for env, stepping in ((JAX, "thread"), (NATIVE, "thread"), (HOST, "process")):
        plan, _ = planned(strategy, Toy(), env)
        steps = {plan.worker(i.worker).kind for i in plan.instances_of("unroll.step")}
        acts = {plan.worker(i.worker).kind for i in plan.instances_of("unroll.act")}
        assert (steps, acts) == ({stepping}, {"thread"})


def test_links_count_what_crosses_over_all_actors() -> None:
    """The weights are 4 × 2 numbers; an environment's row 4 + 1 + 1 + 1 (see `Toy`)."""
    row = 4 * (4 + 1 + 1 + 1)
    for strategy, joined in ((Local(), 1), (ActorLearner(actors=4, staleness=0), 4)):
        weights, results, action, observation = planned(strategy)[0].links
        assert (weights.nbytes, weights.transfers) == (32, joined)
        assert (results.nbytes, results.transfers) == (3 * (8 // joined) * row, joined)
        assert (action.nbytes, action.transfers) == (4 * (8 // joined), 3 * joined)
        assert (observation.nbytes, observation.transfers) == (22 * (8 // joined), 3 * joined)
    *_, action, observation = planned(Environments(workers=4))[0].links
    assert (action.nbytes, action.transfers) == (4 * 2, 3 * 4)
    assert (observation.nbytes, observation.transfers) == (22 * 2, 3 * 4)


@pytest.mark.parametrize(
    ("strategy", "algorithm", "programs"),
    [
        (Fused(), Toy(), {"main": [("unroll.act", "unroll.step", "learner")]}),
        (
            ActorLearner(staleness=0),
            Toy(),
            {"learner": [("learner",)], "actor-0": [("unroll.act", "unroll.step")]},
        ),
        (
            ParameterServer(synchronous=True),
            ActorGradients(),
            {
                "master": [("learner",), ("learner.2",)],
                "worker-1": [("unroll.act", "unroll.step"), ("actor",)],
            },
        ),
        (
            SplitDevices(staleness=0),
            TwoUnrolls(),
            {
                "learner": [("learner",), ("learner.2",)],
                "actor-1": [
                    ("unroll.act", "unroll.step"),
                    ("unroll.2.act", "unroll.2.step"),
                    ("actor",),
                ],
            },
        ),
    ],
)
def test_what_fused_links_join_is_compiled_together(
    strategy: Strategy, algorithm: Algorithm, programs: dict[str, list[tuple[str, ...]]]
) -> None:
    plan, _ = planned(strategy, algorithm)
    for worker, expected in programs.items():
        assert plan.programs(worker) == expected


def judged(self: Toy, rl: RL, state: ToyState) -> tuple[ToyState, Any]:
    """Asks a side of its own before the unroll, and again after it."""
    updates = rl.call("judge", lambda n: n + 1, state.updates)
    params = rl.broadcast(state.params)
    batch = rl.gather(rl.unroll(self.act, params, 3, bootstrap=self.value))
    scale = rl.call("judge", jnp.mean, batch.reward)
    gradients = rl.mean(jax.grad(self.loss)(state.params, batch))
    return self.updated(state, gradients), {"updates": updates, "scale": scale}


TOGETHER = ("learner", "judge.2", "learner.2")


@pytest.mark.parametrize(
    ("strategy", "over_the_unroll", "next_to_it", "worker", "programs"),
    [
        (Local(), H, F, "main", [TOGETHER]),
        (ActorLearner(staleness=0), H, F, "learner", [TOGETHER]),
        (
            SplitDevices(actor_devices=2, learner_devices=1, staleness=0),
            H,
            F,
            "learner",
            [TOGETHER],
        ),
        (
            SplitDevices(actor_devices=2, learner_devices=2, staleness=0),
            H,
            H,
            "learner",
            [(name,) for name in TOGETHER],
        ),
        (Local(sides=("judge",)), Q, Q, "judge", [("judge",), ("judge.2",)]),
    ],
    ids=["local", "actors", "one device", "two devices", "a worker of its own"],
)
def test_a_side_is_compiled_with_the_learner_unless_actors_are_between(
    strategy: Strategy,
    over_the_unroll: LinkKind,
    next_to_it: LinkKind,
    worker: str,
    programs: list[tuple[str, ...]],
) -> None:
    """The first answer waits until the unroll is over, so it is handed over; the second does not.
    Over several devices each program is compiled for itself."""
    plan, graph = planned(strategy, with_iteration(judged))
    assert [node.name for node in graph.nodes] == [
        "judge",
        "unroll",
        "learner",
        "judge.2",
        "learner.2",
    ]
    links = {(link.source, link.target): link.kind for link in plan.links}
    assert links["judge", "learner.2"] is over_the_unroll
    assert links["learner", "judge.2"] is links["judge.2", "learner.2"] is next_to_it
    assert plan.programs(worker)[-len(programs) :] == programs


def notes(
    strategy: Strategy, algorithm: Algorithm = TOY, machine: Resources = MACHINE
) -> list[str]:
    return list(planned(strategy, algorithm, machine=machine)[0].notes)


def test_a_reader_is_told_of_staleness_collectives_and_crowded_cores() -> None:
    enough = Resources(devices=4, cores=64)
    (told,) = notes(ParameterServer(), Bearing(), enough)
    assert "at most 4 versions old" in told and "Bearing corrects with nothing" in told
    (told,) = notes(SplitDevices(staleness=1), Lagging(), enough)
    assert "exactly 1 version old (less at the start)" in told
    assert told.endswith("; Lagging corrects with a little")
    (told,) = notes(SplitDevices(actor_devices=2, learner_devices=2, staleness=0), Toy(), enough)
    assert told == "mean is an all-reduce over 2 devices"
    assert notes(ActorLearner(staleness=0), Toy(), enough) == []
    assert notes(ActorLearner(staleness=0)) == ["3 workers share 2 cores"]
