"""What strategies refuse before anything is traced or run, each with a sentence.

And what they make of the numbers that they take.
"""

from collections.abc import Callable
from dataclasses import fields

import pytest
from placed import HOST, planned
from toys import ActorGradients, Drift, Toy

from dovetail import strategies
from dovetail.algorithm import Algorithm
from dovetail.algorithms import A2C, A3C, IMPALA, PPO
from dovetail.envs.resolve import resolve
from dovetail.errors import UserError
from dovetail.graph.show import count
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
    ("strategy", "envs", "sentence"),
    [
        (Fused(devices=4), 6, "4 devices: use --num-envs 4 or 8, or 3 or 6 instead of 4 devices."),
        (
            ActorLearner(actors=2),
            9,
            "2 actors: use --num-envs 8 or 10, or 1 or 3 instead of 2 actors.",
        ),
        (
            CentralInference(workers=4),
            10,
            "4 workers: use --num-envs 8 or 12, or 2 or 5 instead of 4 workers.",
        ),
        (
            SplitDevices(threads=4),
            1,
            "4 actor threads: use --num-envs 4, or 1 instead of 4 actor threads.",
        ),
        (
            DataParallel(devices=2),
            5,
            "2 devices: use --num-envs 4 or 6, or 1 or 5 instead of 2 devices.",
        ),
        (
            ParameterServer(workers=3),
            16,
            "3 workers: use --num-envs 15 or 18, or 2 or 4 instead of 3 workers.",
        ),
        (
            Environments(workers=4),
            6,
            "4 workers: use --num-envs 4 or 8, or 3 or 6 instead of 4 workers.",
        ),
    ],
)
def test_environments_that_do_not_divide(strategy: Strategy, envs: int, sentence: str) -> None:
    kind = ActorGradients if isinstance(strategy, ParameterServer) else Toy
    algorithm, these = kind(num_envs=envs), count(envs, "environment")
    told = refusal(lambda: plan_for(algorithm, resolve(Drift()), strategy, 1000))
    assert told == f"{these} cannot be split evenly among {sentence}"


@pytest.mark.parametrize(
    ("make", "option", "value", "wanted"),
    [
        (lambda: planned(Local(), Toy(num_envs=0)), "--num-envs", 0, "1 or more"),
        (lambda: planned(ActorLearner(), Toy(num_envs=-2)), "--num-envs", -2, "1 or more"),
        (lambda: ActorLearner(actors=0), "--actors", 0, "1 or more"),
        (lambda: ActorLearner(staleness=-1), "--staleness", -1, "0 or more"),
        (lambda: CentralInference(workers=0), "--workers", 0, "1 or more"),
        (lambda: CentralInference(wait=-1.0), "--wait", -1.0, "0 or more seconds"),
        (lambda: CentralInference(staleness=-1), "--staleness", -1, "0 or more"),
        (lambda: SplitDevices(actor_devices=0), "--actor-devices", 0, "1 or more"),
        (lambda: SplitDevices(learner_devices=0), "--learner-devices", 0, "1 or more"),
        (lambda: SplitDevices(threads=0), "--threads", 0, "1 or more"),
        (lambda: SplitDevices(staleness=-1), "--staleness", -1, "0 or more"),
        (lambda: DataParallel(devices=0), "--devices", 0, "1 or more"),
        (lambda: Fused(devices=0), "--devices", 0, "1 or more"),
        (lambda: ParameterServer(workers=0), "--workers", 0, "1 or more"),
        (lambda: ParameterServer(staleness=0), "--staleness", 0, "1 or more"),
        (lambda: Environments(workers=0), "--workers", 0, "1 or more"),
    ],
)
def test_numbers_that_make_no_sense(
    make: Callable[[], Strategy], option: str, value: float, wanted: str
) -> None:
    assert refusal(make) == f"{option} is {value}: give {wanted}."


def test_actor_threads_that_do_not_divide_among_the_learners() -> None:
    assert refusal(lambda: SplitDevices(actor_devices=1, learner_devices=2, threads=3)) == (
        "3 actor threads cannot be split evenly among 2 learner devices: choose a multiple of 2 "
        "(--actor-devices × --threads)."
    )


@pytest.mark.parametrize("batch", [0, 3, 6, 16])
def test_a_batch_that_is_not_of_whole_workers(batch: int) -> None:
    strategy = CentralInference(workers=2, batch=batch)
    assert refusal(lambda: planned(strategy)) == (
        f"A batch of {batch} environments is not that of whole workers, of which each has 4: "
        "choose a multiple of 4 up to 8 (--batch)."
    )


@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [
        (Fused(devices=2), 2),
        (DataParallel(devices=4), 4),
        (SplitDevices(actor_devices=1, learner_devices=2), 3),
    ],
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
        (PPO(), ActorLearner(staleness=3), "3 versions old, but PPO corrects with the clipped"),
        (A2C(), ActorLearner(staleness=1), "A2C corrects with nothing and tolerates 0; lower"),
        (A2C(), SplitDevices(staleness=1), "A2C corrects with nothing and tolerates 0; lower"),
        (PPO(), CentralInference(staleness=2), "tolerates 1; lower --staleness to 1, or use"),
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
        (A2C(), ActorLearner(), 0, True),
        (PPO(), ActorLearner(), 1, False),
        (IMPALA(), ActorLearner(), 2, False),
        (IMPALA(), ActorLearner(staleness=9), 9, False),
        (IMPALA(), ActorLearner(staleness=0), 0, True),
        (A2C(), SplitDevices(), 0, True),
        (PPO(), SplitDevices(), 1, True),
        (IMPALA(), SplitDevices(staleness=3), 3, True),
        (IMPALA(), CentralInference(), 0, True),
        (PPO(), CentralInference(staleness=1), 1, True),
        (A3C(), ParameterServer(workers=4), 8, False),
        (A3C(), ParameterServer(staleness=3), 3, False),
        (A3C(), ParameterServer(synchronous=True), 0, True),
    ],
)
def test_unless_asked_actors_run_ahead_as_far_as_the_algorithm_bears(
    algorithm: Algorithm, strategy: Strategy, staleness: int, ordered: bool
) -> None:
    plan = plan_for(algorithm, resolve("dovetail:Chain-v0"), strategy, 1000).plan
    assert (plan.staleness, plan.ordered) == (staleness, ordered)


def test_averaged_gradients_are_never_old() -> None:
    assert refusal(lambda: ParameterServer(synchronous=True, staleness=2)) == (
        "--staleness 2 is for gradients that are applied as they come, but --synchronous averages "
        "new ones: leave one out."
    )


def test_a_jax_environment_needs_no_process() -> None:
    for strategy in (
        ActorLearner(staleness=0, processes=True),
        CentralInference(processes=True),
        Environments(processes=True),
    ):
        assert refusal(lambda strategy=strategy: planned(strategy)) == (
            "toy:Drift is a JAX environment, which no other process needs to step: leave "
            "--processes out."
        )


def test_a_host_environment_cannot_be_compiled_in() -> None:
    sentence = refusal(lambda: planned(Fused(), env=HOST))
    assert sentence.startswith(
        "Fused compiles the environment into its program, but toy:Drift steps on the host: use "
        "--strategy local"
    )


@pytest.mark.parametrize(
    ("strategy", "learners", "actors", "joined"),
    [
        (Local(), 1, 1, 1),
        (Environments(), 1, 1, 1),
        (Fused(devices=4), 4, 4, 4),
        (DataParallel(devices=2), 2, 2, 2),
        (ActorLearner(actors=4), 1, 4, 4),
        (SplitDevices(actor_devices=2, learner_devices=1, threads=2), 1, 4, 4),
        (SplitDevices(actor_devices=2, learner_devices=2, threads=2), 2, 4, 4),
        (ParameterServer(workers=4), 1, 4, 1),
        (ParameterServer(workers=4, synchronous=True), 1, 4, 4),
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
        (CentralInference(workers=4), 6),
        (CentralInference(workers=2), 4),
        (CentralInference(workers=8), 6),
        (CentralInference(workers=1), 8),
        (CentralInference(workers=4, batch=2), 2),
    ],
)
def test_how_many_environments_one_call_of_acting_serves(strategy: Strategy, batch: int) -> None:
    assert planned(strategy)[0].batch == batch


def test_one_worker_of_three_steps_meanwhile() -> None:
    assert planned(CentralInference(workers=3), Toy(num_envs=9))[0].batch == 6


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_strategy_chooses_the_number_of_environments(name: str) -> None:
    kind = getattr(strategies, STRATEGIES[name].partition(":")[2])
    assert not [field.name for field in fields(kind) if "envs" in field.name]
    sentence = refusal(lambda: kind(num_envs=64))
    assert sentence.startswith(f"{kind.__name__} has no option num_envs")
    assert sentence.endswith("give it to the algorithm, as in PPO(num_envs=64).")


def test_equal_shares_in_order() -> None:
    assert shares(0, 6, 3, "actors") == [(0, 2), (2, 4), (4, 6)]
    assert shares(4, 4, 2, "actors") == [(4, 6), (6, 8)]
    assert refusal(lambda: shares(0, 6, 0, "actors")) == "--actors is 0: give 1 or more."


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_called_as_on_the_command_line(name: str) -> None:
    strategy = getattr(strategies, STRATEGIES[name].partition(":")[2])()
    assert strategy.name == name == name_of(strategy, STRATEGIES)


def test_a_strategy_without_a_plan() -> None:
    class Empty(Strategy):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty does not define plan\(graph"):
        planned(Empty())
