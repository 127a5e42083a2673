"""Mistakes in a user's own file: one sentence with its file and line, before training."""

import re
from pathlib import Path

import pytest
from small import QUIET, a2c

import dovetail as dt
from dovetail.algorithms.a2c import A2C
from dovetail.cli.main import main
from dovetail.errors import UserError
from dovetail.evaluation.play import check_greedy
from dovetail.strategies.local import Local

OWN = """
from dataclasses import dataclass, field
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import gymnasium

import dovetail as dt
from dovetail.algorithms.a2c import A2C
from dovetail.strategies.local import Local


class Typo(A2C):
    def act(self, params, carry, timestep, key):
        return undefined  # NameError


class Shapes(A2C):
    def learn(self, rl, state, batch):
        return state, {"loss": (jnp.zeros(3) + jnp.zeros(4)).sum()}  # shapes


class ActsNothing(A2C):
    def act(self, params, carry, timestep, key):  # ActsNothing.act
        pass


class ActsTwice(A2C):
    def act(self, params, carry, timestep, key):  # ActsTwice.act
        return super().act(params, carry, timestep, key)[:2]


class NoState(A2C):
    def init(self, key):  # NoState.init
        pass


class NoMetrics(A2C):
    def iteration(self, rl, state):  # NoMetrics.iteration
        return super().iteration(rl, state)[0]


class Valueless(A2C):
    def value(self, params, carry, timestep):  # Valueless.value
        pass


class Options(A2C):
    def __post_init__(self):
        raise TypeError("of its own")  # Options


class Opens(A2C):
    def act(self, params, carry, timestep, key):
        open("absent.txt")  # Opens


class GreedyTypo(A2C):
    def greedy(self, params, carry, timestep):
        return undefined  # GreedyTypo


class GreedyAlone(A2C):
    def greedy(self, params, carry, timestep):  # GreedyAlone.greedy
        return super().greedy(params, carry, timestep)[0]


class GreedyFloat(A2C):
    def greedy(self, params, carry, timestep):  # GreedyFloat.greedy
        return jnp.zeros(3), carry


class Split(NamedTuple):
    params: object
    critic: object


class Marked(dt.Algorithm):
    def init(self, key):
        return Split(jnp.zeros(4), dt.at("critic", {"w": jnp.zeros(4)}))

    def act(self, params, carry, timestep, key):
        return jnp.int32(0), (), carry

    def greedy(self, params, carry, timestep):
        return jnp.int32(0), carry

    def score(self, critic, rewards):
        return rewards * critic["w"].sum()

    def iteration(self, rl, state):
        batch = rl.gather(rl.unroll(self.act, rl.broadcast(state.params), 2))
        return self.learn(rl, state, batch)


class Unsent(Marked):
    def learn(self, rl, state, batch):
        return state, {"score": (state.critic["w"] * 2).sum()}  # Unsent


class NoFunction(Marked):
    def learn(self, rl, state, batch):
        return state, {"score": rl.call("critic", state.critic, batch.reward).mean()}  # NoFunction


class NoSide(Marked):
    def learn(self, rl, state, batch):
        return state, {"score": rl.call(self.score, state.critic, batch.reward).mean()}  # NoSide


class Unmarked(Marked):
    def iteration(self, rl, state):  # Unmarked.iteration
        batch = rl.gather(rl.unroll(self.act, rl.broadcast(state.params), 2))
        score = rl.call("critic", self.score, state.critic, batch.reward).mean()
        return state._replace(critic=state.critic.value), {"score": score}


class Elsewhere(Unmarked):
    def iteration(self, rl, state):  # Elsewhere.iteration
        state, metrics = super().iteration(rl, state)
        return state._replace(critic=dt.at("critics", state.critic)), metrics


class Shorter(Marked):
    def iteration(self, rl, state):  # Shorter.iteration
        return state._replace(params=()), {}


class Raises(Local):
    def plan(self, graph, resources):
        return undefined  # Raises


class PlansNothing(Local):
    def plan(self, graph, resources):  # PlansNothing.plan
        pass


class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    seen = np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        return self.seen, {}

    def step(self, action):
        return self.seen, 0.0, False, False, {}


class Breaks(Env):
    def step(self, action):
        return {}["key"]  # Breaks


class OldStep(Env):
    def step(self, action):  # OldStep.step
        return self.seen, 0.0, False, {}


class OldReset(Env):
    def reset(self, *, seed=None, options=None):  # OldReset.reset
        return np.zeros(3)


class Unseeded(Env):
    def reset(self):  # Unseeded.reset
        return self.seen, {}


class CannotBeMade(Env):
    def __init__(self):
        self.size = undefined  # CannotBeMade
"""
TINY = "--num-envs 2 --total-steps 16 --episodes 2 --no-video --quiet"


def line(mark: str) -> int:
    """The line of the file that ends with a comment."""
    lines = OWN.splitlines()
    return 1 + next(i for i, text in enumerate(lines) if text.endswith(f"# {mark}"))


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]):
    """Runs a command that must be refused; returns its one sentence."""

    def run(words: str) -> str:
        Path("own.py").write_text(OWN)
        assert main(words.split()) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and "Traceback" not in err, err
        return err

    return run


ALGORITHMS = [
    ("Typo", "NameError", "NameError: name 'undefined' is not defined."),
    ("Shapes", "shapes", "TypeError: add got incompatible shapes"),
    (
        "ActsNothing",
        "ActsNothing.act",
        "act must return (action, extras, carry), but returned noth",
    ),
    ("ActsTwice", "ActsTwice.act", "must return (action, extras, carry), but returned 2 results."),
    ("NoState", "NoState.init", "NoState.init must return the state, but returned nothing."),
    ("NoMetrics", "NoMetrics.iteration", "must return (state, metrics), but returned 6 results."),
    (
        "Valueless",
        "Valueless.value",
        "value, the bootstrap of rl.unroll, must return a value",
    ),
    ("Options", "Options", "TypeError: of its own."),
    ("Opens", "Opens", "FileNotFoundError: [Errno 2] No such file"),
    ("Unsent", "Unsent", "init marks state.critic on the side 'critic'"),
    ("Unsent", "Unsent", "run a function there with rl.call('critic', function, …)"),
    ("NoFunction", "NoFunction", "but its second argument is a marked part of the state"),
    ("NoSide", "NoSide", "but its first argument is a method"),
    ("Unmarked", "Unmarked.iteration", "returns state.critic without the mark of init"),
    ("Elsewhere", "Elsewhere.iteration", "returns state.critic marked for the side 'critics'"),
    ("Shorter", "Shorter.iteration", "returns no state.params, which init makes."),
]


@pytest.mark.parametrize(("name", "mark", "sentence"), ALGORITHMS)
def test_an_algorithm(refused, name: str, mark: str, sentence: str) -> None:
    told = refused(f"explain own.py:{name} --env dovetail:CartPole-v1")
    assert sentence in told and "PyTreeDef" not in told
    assert re.search(rf"own\.py:{line(mark)}\b", told), told


@pytest.mark.parametrize(
    ("name", "mark", "sentence"),
    [
        ("GreedyTypo", "GreedyTypo", "NameError: name 'undefined' is not defined."),
        ("GreedyAlone", "GreedyAlone.greedy", "greedy must return (action, carry), but returned a"),
        ("GreedyFloat", "GreedyFloat.greedy", "greedy returns the action float32[3], but"),
    ],
)
def test_greedy_before_training(refused, name: str, mark: str, sentence: str) -> None:
    told = refused(f"train own.py:{name} --env dovetail:CartPole-v1 {TINY}")
    assert sentence in told and f"own.py:{line(mark)}" in told
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("name", "mark", "sentence"),
    [
        ("Raises", "Raises", "NameError: name 'undefined' is not defined."),
        ("PlansNothing", "PlansNothing.plan", "plan must return a Plan, as self.place("),
    ],
)
def test_a_strategy(refused, name: str, mark: str, sentence: str) -> None:
    told = refused(f"explain a2c --env dovetail:CartPole-v1 --strategy own.py:{name}")
    assert sentence in told and f"own.py:{line(mark)}" in told


@pytest.mark.parametrize(
    ("name", "mark", "sentence"),
    [
        ("Breaks", "Breaks", "environment 0 raised KeyError in step at step 1: 'key' ("),
        ("OldStep", "OldStep.step", "has an old step: "),
        ("OldStep", "OldStep.step", "return (observation, reward, terminated, truncated, info)"),
        ("OldReset", "OldReset.reset", "return (observation, info), not the observation alone."),
        ("Unseeded", "Unseeded.reset", "write it as reset(self, *, seed=None, options=None)."),
        ("CannotBeMade", "CannotBeMade", "could not be made: "),
    ],
)
def test_an_environment(refused, name: str, mark: str, sentence: str) -> None:
    told = refused(f"train a2c --env own.py:{name} {TINY} --hidden-sizes 4 --unroll-length 2")
    assert sentence in told and f"own.py:{line(mark)}" in told
    assert "--resume" not in told  # nothing was learned, and it would fail again


def test_the_traceback_of_own_code_with_debug(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.py").write_text(OWN)
    assert main(["explain", "own.py:Typo", "--env", "dovetail:CartPole-v1", "--debug"]) == 2
    assert "in act\n    return undefined" in capsys.readouterr().err


def test_an_algorithm_by_name_or_class() -> None:
    assert str(dt.explain("a2c", "dovetail:CartPole-v1", "local")) == str(
        dt.explain(A2C(), "dovetail:CartPole-v1", Local)  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize(
    ("algorithm", "strategy", "sentence"),
    [
        ("a22c", None, r"There is no algorithm 'a22c': did you mean 'a2c'\?"),
        (3, None, r"The algorithm is a int: give one, such as dt.algorithms.PPO\(\)."),
        ("a2c", 3, r"The strategy is a int: give one, such as dt.strategies.Local\(\)."),
        ("a2c", "fuse", r"There is no strategy 'fuse': did you mean 'fused'\?"),
    ],
)
def test_wrong_arguments(algorithm, strategy, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        dt.train(algorithm, "dovetail:CartPole-v1", strategy, settings=QUIET)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"hidden_sizes": 64}, r"--hidden-sizes is 64: give a tuple of sizes, such as \(64, 64\)."),
        ({"hidden_sizes": ("64",)}, "--hidden-sizes is"),
        ({"learning_rate": "fast"}, "--learning-rate is fast: give more than 0."),
    ],
)
def test_wrong_options(options, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        a2c(**options)


def test_every_built_in_greedy_passes_its_check() -> None:
    env = dt.envs.resolve("dovetail:CartPole-v1")
    check_greedy(a2c(recurrent=4).bind(dt.Task(env.spec, 2, 100)))
