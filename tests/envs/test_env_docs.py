"""The examples of docs/environments.md do what the page says."""

import re
from pathlib import Path

import pytest

from dovetail.envs import Discrete, check_host_env, check_jax_env, resolve

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """The page's Python files, by name."""
    folder = tmp_path_factory.mktemp("examples")
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for name, code in blocks:
        (folder / name).write_text(code)
    return {name: folder / name for name, _ in blocks}


def test_the_gymnasium_example_conforms(examples):
    env = resolve(f"{examples['walk.py']}:Walk?goal=3&max_episode_steps=50")
    check_host_env(env.host, steps=60)


def test_the_jax_example_conforms(examples):
    env = resolve(f"{examples['walk_jax.py']}:Walk?goal=3")
    check_jax_env(env.jax, steps=60)


def test_every_id_on_the_page_resolves():
    for env in ("CartPole-v1", "gymnax:Pendulum-v1", "gymnax:CartPole-v1?max_steps_in_episode=200"):
        assert env in PAGE.read_text() and resolve(env).spec.id.endswith(env)
    assert resolve("ale:pong?noop_max=0").spec.action == Discrete(6)
