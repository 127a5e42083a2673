"""From what users write to environments."""

import sys
from dataclasses import replace
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.envs import Discrete, Env, EnvSpec, JaxStep, backends, check_host_env, names, resolve
from dovetail.envs.names import parse
from dovetail.envs.native import Chain
from dovetail.envs.registry import BACK_ENDS
from dovetail.errors import UserError

FILE = '''
from dataclasses import dataclass
import gymnasium
import numpy as np
from dovetail.envs.native import Chain

class Line(gymnasium.Env):
    """Walks right; ends at `end`."""
    observation_space = gymnasium.spaces.Box(-100, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, end: int = 3):
        self.end = end

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.place += 1
        return np.full(1, self.place, np.float32), 1.0, self.place == self.end, False, {}

class Mine(Chain):
    pass

made = Chain(length=7)

class Lines(gymnasium.vector.SyncVectorEnv):
    def __init__(self, num_envs, end=3):
        super().__init__([lambda: Line(end)] * num_envs)

def lines(num_envs):
    return Lines(num_envs, 2)

def line():
    return Line()

text = "not an environment"
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


def test_an_id_is_taken_apart():
    found = parse('gymnasium:CartPole-v1?a=1&b=true&c=x&d=[1,2]&e="q"')
    assert (found.backend, found.name) == ("gymnasium", "CartPole-v1")
    assert found.options == {"a": 1, "b": True, "c": "x", "d": [1, 2], "e": "q"}
    assert parse("CartPole-v1").backend is None
    assert (parse("a/b.py:C?x=1").path, parse("a/b.py:C?x=1").name) == ("a/b.py", "C")
    assert parse("gymnasium:module:Env-v0").name == "module:Env-v0"


@pytest.mark.parametrize(
    ("env", "traced", "found"),
    [
        ("CartPole-v1", True, "dovetail:CartPole-v1"),
        ("CartPole-v1", False, "gymnasium:CartPole-v1"),
        ("CartPole-v1", None, "gymnasium:CartPole-v1"),
        ("Pendulum-v1", True, "gymnax:Pendulum-v1"),
        ("FrozenLake-v1", True, "gymnasium:FrozenLake-v1"),
        ("MemoryCue-v0", False, "dovetail:MemoryCue-v0"),
        ("Breakout-MinAtar", False, "gymnax:Breakout-MinAtar"),
        ("gymnasium:CartPole-v1", True, "gymnasium:CartPole-v1"),
        ("dovetail:CartPole-v1", False, "dovetail:CartPole-v1"),
    ],
)
def test_bare_ids_prefer_what_can_be_traced_if_it_will_be(env, traced, found):
    resolved = resolve(env, traced=traced)
    assert resolved.spec.id == found
    assert (resolved.host is None) == (resolved.jax is not None)
    assert (resolved.jax is not None) == (not found.startswith("gymnasium"))


def test_our_own_environments_do_not_load_gymnax():
    code = (
        "import sys; from dovetail.envs import resolve; resolve('CartPole-v1', traced=True); "
        "print([m for m in ('gymnax', 'gymnasium', 'flax') if m in sys.modules])"
    )
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_env_and_a_jax_env_stand_for_themselves():
    chain = Chain()
    env = resolve(chain)
    assert env.jax is chain and env.host is None and resolve(env) is env


def test_a_registered_module_is_imported(tmp_path, monkeypatch):
    (tmp_path / "registers.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Extra-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve("registers:Extra-v0").spec.action == Discrete(2)
    gymnasium.registry.pop("Extra-v0")


@pytest.mark.parametrize("name", ["Line", "Line?end=5", "Lines", "lines", "line"])
def test_host_environments_from_a_file_conform(file, name):
    env = resolve(f"{file}:{name}")
    assert env.host is not None and env.spec.id == f"{file}:{name}"
    check_host_env(env.host, steps=12, independent=name != "Lines")


def test_options_reach_the_class_in_a_file(file):
    factory = resolve(f"{file}:Line?end=2&autoreset=next_step").host
    assert factory is not None
    batch = factory(2)
    batch.reset([0, 1])
    seen = [batch.step(np.zeros(2, np.int32)) for _ in range(3)]
    assert [bool(step.terminated[0]) for step in seen] == [False, True, False]
    assert [bool(step.valid[0]) for step in seen] == [True, True, False]


def test_a_time_limit_can_be_put_on_a_class(file):
    factory = resolve(f"{file}:Line?end=50&max_episode_steps=4").host
    assert factory is not None
    batch = factory(1)
    batch.reset([0])
    cut = [batch.step(np.zeros(1, np.int32)) for _ in range(4)]
    assert [bool(step.truncated[0]) for step in cut] == [False, False, False, True]
    assert cut[-1].next_observation.tolist() == [[4]] and cut[-1].observation.tolist() == [[0]]


def test_jax_environments_from_a_file(file):
    assert resolve(f"{file}:Mine?length=4").spec.observation.shape == (4,)
    assert resolve(f"{file}:made").spec.observation.shape == (7,)


def test_a_changed_file_is_read_again(file, tmp_path):
    assert resolve(f"{file}:made").spec.observation.shape == (7,)
    import os

    (tmp_path / "mine.py").write_text(FILE.replace("length=7", "length=9"))
    os.utime(file, ns=(1, 1))
    assert resolve(f"{file}:made").spec.observation.shape == (9,)


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ("cartpol", "There is no environment 'cartpol': did you mean 'CartPole-v"),
        ("xyzzy", "`dovetail list envs` shows what there is"),
        ("gymnasum:CartPole-v1", "no back end or module 'gymnasum'.*did you mean 'gymnasium'"),
        ("nowhere.py:Env", "There is no file .*nowhere.py"),
        ("nowhere.py", "is a file: name a class in it"),
        ("CartPole-v1?x", "'x' of the environment .* is not of the form key=value"),
        ("{file}:Lin", "has no environment 'Lin': did you mean 'Line'"),
        ("{file}:text", "is a str, which is no environment"),
        ("{file}:made?length=3", "is an object already made: it takes no options"),
        ("{file}:Line?end=3&color=red", "could not be made: TypeError.*color"),
        ("{file}:Line?vectorization=vector_entry_point", "without a vector entry point"),
    ],
)
def test_mistakes_are_sentences(env, sentence, file):
    with pytest.raises(UserError, match=sentence):
        resolve(env.replace("{file}", file))


def test_a_file_that_fails_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(UserError, match=r"broken.py:1 cannot be loaded: ZeroDivisionError"):
        resolve(f"{tmp_path}/broken.py:Env")


def test_an_instance_is_refused_because_it_cannot_be_made_again():
    with pytest.raises(UserError, match="Dovetail makes as many as a plan needs: give its class"):
        resolve(gymnasium.make("CartPole-v1"))


class Coin:
    """A user's JaxEnv, written by hand."""

    spec = EnvSpec("mine:Coin", jax.ShapeDtypeStruct((1,), jnp.float32), Discrete(2))

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        return (), jnp.zeros(1)

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> JaxStep:
        reward = (action == jax.random.randint(key, (), 0, 2)).astype(jnp.float32)
        return JaxStep((), jnp.zeros(1), reward, jnp.bool_(True), jnp.bool_(False))


def test_classes_and_factories_given_as_objects():
    assert resolve(Coin).spec.id == "mine:Coin"
    assert resolve(lambda: gymnasium.make("CartPole-v1")).spec.action == Discrete(2)

    def several(num_envs: int) -> Any:
        return gymnasium.make_vec("CartPole-v1", num_envs=num_envs)

    env = resolve(several)
    assert isinstance(env, Env) and env.spec.id == "python:several"
    assert env.host is not None and env.host(5).num_envs == 5


def test_back_ends_are_listed():
    listed = {name: installed for name, _, installed in backends()}
    assert list(listed) == ["gymnasium", "dovetail", "gymnax", "envpool", "ale"]
    assert listed["gymnasium"] and listed["dovetail"]
    assert names("dovetail") == ["CartPole-v1", "Chain-v0", "MemoryCue-v0"]
    assert "Acrobot-v1" in names("gymnasium") and "Breakout-MinAtar" in names("gymnax")
    with pytest.raises(UserError, match="no back end 'gymnx': did you mean 'gymnax'"):
        names("gymnx")


def test_a_missing_extra_is_named(monkeypatch):
    for name in ("envpool", "ale"):
        absent = replace(BACK_ENDS[name], package="a_package_that_is_not_there")
        monkeypatch.setitem(BACK_ENDS, name, absent)
    with pytest.raises(UserError, match=r"needs EnvPool.*pip install 'dovetail\[envpool\]'"):
        resolve("envpool:CartPole-v1")
    with pytest.raises(UserError, match=r"needs ale-py.*pip install 'dovetail\[atari\]'"):
        resolve("ale:pong")
