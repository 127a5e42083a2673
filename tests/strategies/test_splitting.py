"""What strategies refuse before anything is traced or run, each with a sentence.

And what they make of the numbers that they take.
"""

from collections.abc import Callable

import pytest
from placed import HOST, TOY, planned
from toys import ActorGradients, Drift

from dovetail import strategies
from dovetail.algorithm import Algorithm
from dovetail.algorithms import A2C, A3C, IMPALA, PPO
from dovetail.envs.resolve import resolve
from dovetail.errors import UserError
from dovetail.plan.ir import Resources
from dovetail.strategies import (
    STRATEGIES,
    ActorLearner,
    CentralInference,
    DataParallel,
    Environments,
    Fused,
    Local,
    ParameterServer,
    SplitDevices,
)
from dovetail.strategies.interface import Strategy, shares
from dovetail.training.config import name_of
from dovetail.training.planning import plan_for

ONE_DEVICE = Resources(devices=1, cores=2)


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        make()
    sentence = str(caught.value)
    assert sentence.endswith(".") and "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("strategy", "parts", "whom"),
    [
        (Fused(6, devices=4), 4, "devices"),
        (ActorLearner(9, actors=2), 2, "actors"),
        (CentralInference(10, workers=4), 4, "workers"),
        (SplitDevices(6, threads=4), 4, "actor threads"),
        (DataParallel(5, devices=2), 2, "devices"),
        (ParameterServer(16, workers=3), 3, "workers"),
        (Environments(6, workers=4), 4, "workers"),
    ],
)
def test_environments_that_do_not_divide(strategy: Strategy, parts: int, whom: str) -> None:
    algorithm = ActorGradients() if isinstance(strategy, ParameterServer) else TOY
    sentence = refusal(lambda: plan_for(algorithm, resolve(Drift()), strategy, 1000))
    assert sentence == (
        f"{strategy.num_envs} environments cannot be split evenly among {parts} {whom}: choose a "
        f"multiple of {parts} environments (--num-envs)."
    )


@pytest.mark.parametrize(
    ("make", "option", "value", "wanted"),
    [
        (lambda: Local(0), "--num-envs", 0, "1 or more"),
        (lambda: ActorLearner(-2), "--num-envs", -2, "1 or more"),
        (lambda: ActorLearner(8, actors=0), "--actors", 0, "1 or more"),
        (lambda: ActorLearner(8, staleness=-1), "--staleness", -1, "0 or more"),
        (lambda: CentralInference(8, workers=0), "--workers", 0, "1 or more"),
        (lambda: CentralInference(8, wait=-1.0), "--wait", -1.0, "0 or more seconds"),
        (lambda: CentralInference(8, staleness=-1), "--staleness", -1, "0 or more"),
        (lambda: SplitDevices(8, actor_devices=0), "--actor-devices", 0, "1 or more"),
        (lambda: SplitDevices(8, learner_devices=0), "--learner-devices", 0, "1 or more"),
        (lambda: SplitDevices(8, threads=0), "--threads", 0, "1 or more"),
        (lambda: SplitDevices(8, staleness=-1), "--staleness", -1, "0 or more"),
        (lambda: DataParallel(8, devices=0), "--devices", 0, "1 or more"),
        (lambda: Fused(8, devices=0), "--devices", 0, "1 or more"),
        (lambda: ParameterServer(8, workers=0), "--workers", 0, "1 or more"),
        (lambda: ParameterServer(8, staleness=0), "--staleness", 0, "1 or more"),
        (lambda: Environments(8, workers=0), "--workers", 0, "1 or more"),
    ],
)
def test_numbers_that_make_no_sense(
    make: Callable[[], Strategy], option: str, value: float, wanted: str
) -> None:
    assert refusal(make) == f"{option} is {value}: give {wanted}."


def test_actor_threads_that_do_not_divide_among_the_learners() -> None:
    assert refusal(lambda: SplitDevices(12, 1, 2, threads=3)) == (
        "3 actor threads cannot be split evenly among 2 learner devices: choose a multiple of 2 "
        "(--actor-devices × --threads)."
    )


@pytest.mark.parametrize("batch", [0, 3, 6, 16])
def test_a_batch_that_is_not_of_whole_workers(batch: int) -> None:
    strategy = CentralInference(8, workers=2, batch=batch)
    assert refusal(lambda: planned(strategy)) == (
        f"A batch of {batch} environments is not that of whole workers, of which each has 4: "
        "choose a multiple of 4 up to 8 (--batch)."
    )


@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [(Fused(8, devices=2), 2), (DataParallel(8, devices=4), 4), (SplitDevices(8, 1, 2), 3)],
)
def test_more_devices_than_there_are(strategy: Strategy, wanted: int) -> None:
    assert strategy.devices_wanted == wanted
    assert refusal(lambda: planned(strategy, machine=ONE_DEVICE)) == (
        f"{type(strategy).__name__} was asked for {wanted} devices, but this machine has 1: ask "
        f"for fewer, or on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count={wanted}."
    )


@pytest.mark.parametrize(
    ("algorithm", "strategy", "tolerated"),
    [
        (PPO(), ActorLearner(8, staleness=3), "3 versions old, but PPO corrects with the clipped"),
        (A2C(), ActorLearner(8, staleness=1), "A2C corrects with nothing and tolerates 0; lower"),
        (A2C(), SplitDevices(8, staleness=1), "A2C corrects with nothing and tolerates 0; lower"),
        (PPO(), CentralInference(8, staleness=2), "tolerates 1; lower --staleness to 1, or use"),
    ],
)
def test_staleness_that_the_algorithm_cannot_take(
    algorithm: Algorithm, strategy: Strategy, tolerated: str
) -> None:
    sentence = refusal(lambda: plan_for(algorithm, resolve("dovetail:Chain-v0"), strategy, 1000))
    assert tolerated in sentence
    assert sentence.endswith("or use an algorithm with V-trace (impala, appo).")


@pytest.mark.parametrize(
    ("algorithm", "strategy", "staleness", "ordered"),
    [
        (A2C(), ActorLearner(8), 0, True),
        (PPO(), ActorLearner(8), 1, False),
        (IMPALA(), ActorLearner(8), 2, False),
        (IMPALA(), ActorLearner(8, staleness=9), 9, False),
        (IMPALA(), ActorLearner(8, staleness=0), 0, True),
        (A2C(), SplitDevices(8), 0, True),
        (PPO(), SplitDevices(8), 1, True),
        (IMPALA(), SplitDevices(8, staleness=3), 3, True),
        (IMPALA(), CentralInference(8), 0, True),
        (PPO(), CentralInference(8, staleness=1), 1, True),
        (A3C(), ParameterServer(8, workers=4), 8, False),
        (A3C(), ParameterServer(8, staleness=3), 3, False),
        (A3C(), ParameterServer(8, synchronous=True), 0, True),
    ],
)
def test_unless_asked_actors_run_ahead_as_far_as_the_algorithm_bears(
    algorithm: Algorithm, strategy: Strategy, staleness: int, ordered: bool
) -> None:
    plan = plan_for(algorithm, resolve("dovetail:Chain-v0"), strategy, 1000).plan
    assert (plan.staleness, plan.ordered) == (staleness, ordered)


def test_averaged_gradients_are_never_old() -> None:
    assert refusal(lambda: ParameterServer(8, synchronous=True, staleness=2)) == (
        "--staleness 2 is for gradients that are applied as they come, but --synchronous averages "
        "new ones: leave one out."
    )


def test_a_jax_environment_needs_no_process() -> None:
    for strategy in (
        ActorLearner(8, staleness=0, processes=True),
        CentralInference(8, processes=True),
        Environments(8, processes=True),
    ):
        assert refusal(lambda strategy=strategy: planned(strategy)) == (
            "toy:Drift is a JAX environment, which no other process needs to step: leave "
            "--processes out."
        )


def test_a_host_environment_cannot_be_compiled_in() -> None:
    sentence = refusal(lambda: planned(Fused(8), env=HOST))
    assert sentence.startswith(
        "Fused compiles the environment into its program, but toy:Drift steps on the host: use "
        "--strategy local"
    )


@pytest.mark.parametrize(
    ("strategy", "learners", "actors", "joined"),
    [
        (Local(8), 1, 1, 1),
        (Environments(8), 1, 1, 1),
        (Fused(8, devices=4), 4, 4, 4),
        (DataParallel(8, devices=2), 2, 2, 2),
        (ActorLearner(8, actors=4), 1, 4, 4),
        (SplitDevices(8, 2, 1, threads=2), 1, 4, 4),
        (SplitDevices(8, 2, 2, threads=2), 2, 4, 4),
        (ParameterServer(8, workers=4), 1, 4, 1),
        (ParameterServer(8, workers=4, synchronous=True), 1, 4, 4),
    ],
)
def test_how_many_copies_a_plan_has(
    strategy: Strategy, learners: int, actors: int, joined: int
) -> None:
    plan, graph = planned(strategy, A3C(), resolve("dovetail:Chain-v0"))
    assert (plan.replicas, plan.actors, plan.joined) == (learners, actors, joined)
    assert graph.actor_envs * actors == plan.num_envs == 8
    assert graph.num_envs == plan.update_envs


@pytest.mark.parametrize(
    ("strategy", "batch"),
    [
        (CentralInference(8, workers=4), 6),
        (CentralInference(8, workers=2), 4),
        (CentralInference(9, workers=3), 6),  # two of three workers
        (CentralInference(8, workers=1), 8),
        (CentralInference(8, workers=4, batch=2), 2),
    ],
)
def test_how_many_environments_one_call_of_acting_serves(strategy: Strategy, batch: int) -> None:
    assert planned(strategy)[0].batch == batch


def test_equal_shares_in_order() -> None:
    assert shares(0, 6, 3, "actors") == [(0, 2), (2, 4), (4, 6)]
    assert shares(4, 4, 2, "actors") == [(4, 6), (6, 8)]
    assert "among 0 actors" in refusal(lambda: shares(0, 6, 0, "actors"))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_called_as_on_the_command_line(name: str) -> None:
    strategy = getattr(strategies, STRATEGIES[name].partition(":")[2])()
    assert strategy.name == name == name_of(strategy, STRATEGIES)


def test_a_strategy_without_a_plan() -> None:
    class Empty(Strategy):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty does not define plan\(graph"):
        planned(Empty(8))
