"""Evolution strategies: the example learns, any split computes the same, and its page is true."""

from typing import Any

import jax
import numpy as np
import pytest
from pages import DOCS, ROOT, blocks
from small import QUIET, Started, numbers

import dovetail as dt
from dovetail.loading import load_object

FILE = ROOT / "examples" / "evolution.py"
Evolution: Any = load_object(f"{FILE}:Evolution", "algorithm")


def test_the_page_shows_the_file() -> None:
    text = FILE.read_text(encoding="utf-8")
    shown = blocks(DOCS["evolution-strategies.md"], "python")
    assert len(shown) == 3 and all(block.strip("\n") in text for block in shown)


def test_mirrored_pairs_share_their_noise() -> None:
    population = load_object(f"{FILE}:Population", "class")({"w": np.zeros(3)}, jax.random.key(0))
    first, second, third = (Evolution().perturbation(population, n)["w"] for n in (0, 1, 2))
    np.testing.assert_array_equal(first, -second)
    assert not np.allclose(first, third)


@pytest.mark.slow
def test_how_members_are_split_does_not_matter() -> None:
    algorithm = Evolution(num_envs=4, unroll_length=4, hidden=4)
    env = "dovetail:CartPole-v1?limit=5"
    expected = dt.interpret(algorithm, env, iterations=3, seed=3, debug=False)
    for strategy in (dt.strategies.Fused(), dt.strategies.ActorLearner(actors=2)):
        with Started(algorithm, env, strategy, seed=3) as running:
            running.advance(3)
        found, wanted = numbers(running.state.params), numbers(expected.state.params)
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_it_learns_and_its_policy_loads() -> None:
    run = dt.train(
        Evolution(), "CartPole-v1", dt.strategies.Fused(), total_steps=400_000, settings=QUIET
    )
    assert run.summary["final_return"] > 300
    action, _ = dt.load(run).predict(np.zeros(4, np.float32))
    assert action in (0, 1)
