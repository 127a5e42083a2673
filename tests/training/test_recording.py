"""A training can be recorded: nothing else changes, and every step is there."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import QUIET, numbers, saved

import dovetail
from dovetail.algorithm import RL, Algorithm, Correction, Metrics
from dovetail.algorithms.a3c import A3C
from dovetail.algorithms.dqn import DQN
from dovetail.algorithms.impala import IMPALA
from dovetail.algorithms.ppo import PPO
from dovetail.data import Reader, info
from dovetail.data.recorder import Lanes, RecordedSteps
from dovetail.envs.resolve import resolve
from dovetail.graph.ir import Tap
from dovetail.runtime.local import LocalRuntime
from dovetail.runtime.report import Report, Tapped, UpdatePart
from dovetail.strategies.actor_learner import ActorLearner
from dovetail.strategies.central_inference import CentralInference
from dovetail.strategies.data_parallel import DataParallel
from dovetail.strategies.fused import Fused
from dovetail.strategies.local import Local
from dovetail.strategies.parameter_server import ParameterServer
from dovetail.strategies.split_devices import SplitDevices
from dovetail.training.phases import task_of
from dovetail.training.planning import plan_for
from dovetail.training.recording import Recording, recorded_steps
from dovetail.training.start import first_state

LENGTH, ENVS, UPDATES = 8, 4, 6
SLOW = pytest.mark.slow
STEPS = LENGTH * ENVS * UPDATES
OPTIONS: dict[str, Any] = {"unroll_length": LENGTH, "num_envs": ENVS, "hidden_sizes": (8,)}
SMALL_DQN = DQN(
    unroll_length=LENGTH,
    num_envs=ENVS,
    hidden_sizes=(8,),
    batch_size=4,
    gradient_steps=2,
    learning_starts=4,
    buffer_size=512,
)


def train(algorithm: Any, env: str, strategy: Any, record: str | None) -> dovetail.Run:
    settings = replace(QUIET, record=record)
    return dovetail.train(algorithm, env, strategy, total_steps=STEPS, seed=1, settings=settings)


@pytest.mark.parametrize(
    ("algorithm", "env", "strategy"),
    [
        (PPO(**OPTIONS), "dovetail:CartPole-v1", Fused()),
        (PPO(**OPTIONS), "dovetail:CartPole-v1", ActorLearner(actors=2, staleness=0)),
        (SMALL_DQN, "CartPole-v1", Local()),
        (replace(SMALL_DQN, unroll_length=1), "CartPole-v1", Local()),
        pytest.param(PPO(**OPTIONS), "CartPole-v1", Local(), marks=SLOW),
        pytest.param(PPO(**OPTIONS), "CartPole-v1", CentralInference(workers=2), marks=SLOW),
        pytest.param(
            A3C(**OPTIONS), "CartPole-v1", ActorLearner(actors=2, staleness=0), marks=SLOW
        ),
        pytest.param(SMALL_DQN, "dovetail:CartPole-v1", Fused(), marks=SLOW),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_recording_changes_nothing_and_holds_every_step(
    algorithm: Any, env: str, strategy: Any, tmp_path: Path
) -> None:
    plain = train(algorithm, env, strategy, None)
    run = train(algorithm, env, strategy, str(tmp_path / "d"))
    state, wanted = (numbers(saved(one)[0]["state"]) for one in (run, plain))
    np.testing.assert_allclose(state, wanted, rtol=1e-4, atol=1e-5)
    found = info(tmp_path / "d", check=True)
    resets = found.episodes if env == "CartPole-v1" else 0  # which resets in a step of its own
    assert STEPS - resets <= found.steps <= STEPS
    assert found.versions == (0, STEPS // (ENVS * algorithm.unroll_length) - 1)
    assert found.cut <= ENVS
    assert found.log_probabilities == 1
    (source,) = found.sources
    assert (source["kind"], source["run"], source["seed"]) == ("training", str(run.path), 1)
    assert source["algorithm"] == run.config["algorithm"]
    with Reader(tmp_path / "d") as reader:
        rows = reader.rows(0, reader.num_episodes)
        assert (rows.reward[~rows.last] == 1).all()  # CartPole's
        assert np.abs(rows.observation).max() < 5
        ended = rows.observation[np.flatnonzero(rows.terminated) + 1]
        assert ((np.abs(ended[:, 0]) > 2.4) | (np.abs(ended[:, 2]) > 0.209)).all()
    assert dovetail.evaluate_run(run, 2).returns.shape == (2,)


class Numbered(NamedTuple):
    """What acting tells of an action."""

    log_prob: jax.Array


@dataclass(frozen=True)
class Counting(Algorithm):
    """Acts at random, and calls the number of its weights' updates a log probability."""

    correction: ClassVar[Correction] = Correction("nothing to learn", None)

    num_envs: int = ENVS

    def init(self, key: jax.Array) -> Any:
        return jnp.float32(0)

    def acting(self, state: Any) -> Any:
        return state

    def act(self, params: Any, carry: Any, timestep: Any, key: jax.Array) -> Any:
        return jax.random.bernoulli(key).astype(jnp.int32), Numbered(params), carry

    def greedy(self, params: Any, carry: Any, timestep: Any) -> Any:
        return jnp.int32(0), carry

    def iteration(self, rl: RL, state: Any) -> tuple[Any, Metrics]:
        batch = rl.gather(rl.unroll(self.act, rl.broadcast(state), LENGTH))
        return state + 1, {"loss": batch.reward.sum()}


@pytest.mark.parametrize(
    ("env", "strategy"),
    [
        ("CartPole-v1", ActorLearner(actors=2, staleness=1)),
        ("dovetail:CartPole-v1", ActorLearner(actors=4, staleness=3)),
        ("dovetail:CartPole-v1", SplitDevices(threads=2, staleness=2)),
        ("CartPole-v1", CentralInference(workers=2)),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_the_version_is_that_of_the_weights_that_acted(
    env: str, strategy: Any, tmp_path: Path
) -> None:
    train(Counting(), env, strategy, str(tmp_path / "d"))
    with Reader(tmp_path / "d") as reader:
        rows = reader.rows(0, reader.num_episodes)
        step = ~rows.last
        assert rows.version[step].tolist() == rows.log_probability[step].tolist()
        assert rows.version[step].min() == 0
        if isinstance(strategy, SplitDevices):
            assert rows.version[step].max() == UPDATES - 1 - 2  # its staleness


class Alike(gymnasium.Env[Any, Any]):
    """Always looks the same; its rewards alone tell which one it is."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._own = float(self.np_random.random())
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), self._own, False, False, {}


@pytest.mark.parametrize(
    "strategy",
    [
        ActorLearner(actors=4, staleness=3, processes=False),
        SplitDevices(threads=2, staleness=2),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_no_episode_is_made_of_two_environments(strategy: Any, tmp_path: Path) -> None:
    settings = replace(QUIET, record=str(tmp_path / "d"))
    dovetail.train(Counting(), Alike, strategy, total_steps=10 * STEPS, seed=1, settings=settings)
    with Reader(tmp_path / "d") as reader:
        owners = [np.unique(episode.rewards) for episode in reader]
        assert all(len(owner) == 1 for owner in owners)
        assert len(np.unique(np.concatenate(owners))) > 1
        assert reader.episodes.begun.sum() <= ENVS  # less if a first unroll came too late


def test_an_asynchronous_training_is_recorded_whole(tmp_path: Path) -> None:
    run = train(
        IMPALA(**OPTIONS), "CartPole-v1", ActorLearner(actors=2, staleness=1), str(tmp_path / "d")
    )
    found = info(tmp_path / "d", check=True)
    assert STEPS - found.episodes <= found.steps <= run.summary["env_steps"]
    assert found.versions is not None
    assert 0 <= found.versions[0] <= found.versions[1] < UPDATES
    with Reader(tmp_path / "d") as reader:
        assert reader.episodes.begun.sum() >= ENVS
        for episode in reader:
            start, end = np.abs(episode.observations[[0, -1]])
            assert (start <= 0.05).all() or not episode.begun  # where CartPole begins
            assert (end[0] <= 2.4 and end[2] <= 0.21) or not episode.cut
            assert (np.diff(episode.infos["version"]) >= 0).all()
        rows = reader.rows(0, reader.num_episodes)
        step = ~rows.last
        moved = rows.observation[1:, 0] - rows.observation[:-1, 0]
        speed = 0.02 * rows.observation[:-1, 1]
        np.testing.assert_allclose(moved[step[:-1]], speed[step[:-1]], atol=1e-5)


def test_a_resumed_run_is_recorded_elsewhere(tmp_path: Path) -> None:
    run = train(PPO(**OPTIONS), "CartPole-v1", Local(), str(tmp_path / "d"))
    dovetail.resume(run, total_steps=2 * STEPS)
    more = tmp_path / f"d-from-{UPDATES}"
    assert STEPS - info(more).episodes <= info(more).steps <= STEPS
    assert info(more).versions == (UPDATES, 2 * UPDATES - 1)


def test_what_a_resumed_run_goes_on_with_has_not_begun(tmp_path: Path) -> None:
    run = train(PPO(**OPTIONS), "dovetail:CartPole-v1", Fused(), str(tmp_path / "d"))
    dovetail.resume(run, total_steps=2 * STEPS)
    with Reader(tmp_path / "d") as first, Reader(tmp_path / f"d-from-{UPDATES}") as second:
        assert first.episodes.begun.all()
        assert (~second.episodes.begun).sum() == first.episodes.cut.sum() > 0


def test_what_cannot_be_recorded(tmp_path: Path) -> None:
    for algorithm, strategy in (
        (PPO(**OPTIONS), DataParallel(devices=2)),
        (A3C(**OPTIONS), ParameterServer(workers=2, synchronous=True)),
    ):
        name = type(strategy).__name__
        with pytest.raises(dovetail.UserError, match=f"gathers, and {name} does not bring it all"):
            train(algorithm, "CartPole-v1", strategy, str(tmp_path / "d"))
    with pytest.raises(dovetail.UserError, match="but --seeds asks for 3: leave one out"):
        replace(QUIET, record="d", seeds=3)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(dovetail.UserError, match="full is not empty, and a dataset never"):
        train(PPO(**OPTIONS), "CartPole-v1", Local(), str(tmp_path / "full"))


@pytest.mark.parametrize(
    ("env", "strategy"),
    [
        ("dovetail:CartPole-v1", Fused()),
        ("CartPole-v1", Local()),
        ("CartPole-v1", ActorLearner(actors=2, staleness=0)),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_a_report_shows_the_steps_of_each_of_its_updates(env: str, strategy: Any) -> None:
    found = resolve(env, traced=strategy.traced_envs)
    planned = plan_for(Counting(), found, strategy, STEPS, wanted=recorded_steps)
    bound = Counting().bind(task_of(planned, STEPS, None, True, None))
    runtime = LocalRuntime(planned.graph, planned.plan, planned.env)
    try:
        runtime.load(*first_state(bound, found.jax, ENVS, seed=1))
        report = runtime.advance(3).wait()
        more = runtime.advance(1).wait()
    finally:
        runtime.close()
    tap = planned.graph.tap
    assert tap is not None
    tree: Any = tap.tree
    shown = [tree.unflatten(one.values) for one in (*report.taps, *more.taps)]
    assert [float(np.asarray(steps.log_probability).mean()) for steps in shown] == [0, 1, 2, 3]
    assert all(steps.observation.shape == (LENGTH, ENVS, 4) for steps in shown)
    rewards = sum(float(np.asarray(steps.reward).sum()) for steps in shown[:3])
    assert report.iterations == 3 and float(report.metrics["loss"]) == rewards


def test_every_update_of_a_report_is_recorded_with_its_own_version() -> None:
    added: list[tuple[int, list[int], list[int], list[int]]] = []

    def add(steps: RecordedSteps, versions: Any, lanes: Lanes) -> None:
        columns = (versions.tolist(), lanes.env.tolist(), lanes.turn.tolist())
        added.append((int(steps.reward[0, 0]), *columns))

    leaves, tree = jax.tree.flatten(RecordedSteps(*[np.zeros((1, 2))] * len(RecordedSteps._fields)))
    graph: Any = SimpleNamespace(tap=Tap(tree, ()))
    recorder: Any = SimpleNamespace(add=add)
    recording = Recording(recorder, graph, 5)
    alone = Tapped([leaf + 10 for leaf in leaves])
    parted = Tapped([leaf + 20 for leaf in leaves], [UpdatePart(1, 8, 2), UpdatePart(0, 9, 0)])
    state: Any = None  # not asked for
    recording.add(Report(2, {}, [], state, state, taps=[alone, parted]))
    recording.add(Report(1, {}, [], state, state, taps=[alone]))
    assert added == [
        (10, [5, 5], [0, 1], [5, 5]),
        (20, [4, 6], [1, 0], [8, 9]),
        (10, [7, 7], [0, 1], [7, 7]),
    ]
