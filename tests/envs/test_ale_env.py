"""ALE's vector environment behind our interface."""

import jax
import numpy as np
import pytest

from dovetail.envs import Discrete, check_host_env, resolve
from dovetail.envs.ale import game_of
from dovetail.errors import UserError

LIMIT = "max_num_frames_per_episode=40"  # ten steps of four frames


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_it_conforms(autoreset):
    check_host_env(resolve(f"ale:pong?{LIMIT}&autoreset={autoreset}").host, steps=25)


def test_spec():
    spec = resolve("ale:Pong").spec
    assert (spec.observation.shape, spec.observation.dtype) == ((4, 84, 84), np.uint8)
    assert spec.action == Discrete(6)


def last_steps(autoreset: str):
    """The step that is cut by the limit, and the one after it."""
    factory = resolve(f"ale:breakout?{LIMIT}&autoreset={autoreset}").host
    assert factory is not None
    batch = factory(2)
    batch.reset([5, 6])
    steps = []
    for t in range(11):
        step = batch.step(np.array([t % 4, (t + 1) % 4], np.int32))
        steps.append(jax.tree.map(np.copy, step))
    batch.close()
    return steps[9], steps[10]


def test_both_autoreset_modes_deliver_the_same_true_final_observation():
    same, _ = last_steps("same_step")
    late, after = last_steps("next_step")
    assert same.truncated.tolist() == late.truncated.tolist() == [True, True]
    np.testing.assert_array_equal(same.next_observation, late.next_observation)
    np.testing.assert_array_equal(late.observation, late.next_observation)
    assert same.first.all() and same.valid.all()
    assert not late.first.any() and after.first.all() and not after.valid.any()
    np.testing.assert_array_equal(same.observation, after.observation)


def test_gymnasiums_id_steps_in_the_same_vector_environment():
    env = resolve("ALE/Pong-v5?max_num_frames_per_episode=40")
    assert env.spec.id.startswith("gymnasium:ALE/Pong-v5")
    assert env.spec.observation.shape == (4, 84, 84)
    check_host_env(env.host, steps=12)


@pytest.mark.parametrize(
    ("name", "game"),
    [("Pong", "pong"), ("MsPacman-v5", "ms_pacman"), ("PongNoFrameskip-v4", "pong")],
)
def test_games_by_their_usual_names(name, game):
    assert game_of(name) == game


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ("ale:pongo", "no environment 'pongo' in ALE: did you mean 'pong'"),
        ("ale:pong?autoreset=disabled", "autoreset=disabled"),
        ("ale:pong?batch_size=2", "leave batch_size out"),
        ("ale:pong?frameskip=0", "could not be made"),
    ],
)
def test_mistakes_are_sentences(env, sentence):
    with pytest.raises(UserError, match=sentence):
        resolve(env)
