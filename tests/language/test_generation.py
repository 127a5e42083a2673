"""Generation: log-probabilities, independence of the batch, stops, and what is drawn from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.errors import UserError
from dovetail.language import decoder
from dovetail.language.config import DecoderConfig
from dovetail.language.generate import Completions, Sampling, buckets, generate, processed
from dovetail.language.model import sample_keys

CONFIG = DecoderConfig("llama", 24, 16, 2, 4, 2, 4, 24, 64, 1e-5, qk_norm=True)
PARAMS = jax.tree.map(lambda x: 4 * x, decoder.init(CONFIG, jax.random.key(0)))
PROMPTS = jax.random.randint(jax.random.key(1), (3, 6), 0, 24)
OK = jnp.arange(6) < jnp.array([6, 4, 2])[:, None]
STOP = 3
PLAIN = Sampling()


def made(rows: slice, samples: slice, sampling: Sampling = PLAIN, most: int = 8) -> Completions:
    keys = sample_keys(5, 3, 4)[rows, samples]
    return generate(
        CONFIG,
        PARAMS,
        PROMPTS[rows],
        OK[rows],
        keys,
        jnp.array([STOP]),
        jnp.int32(0),
        jnp.int32(most),
        samples=keys.shape[1],
        length=8,
        sampling=sampling,
    )


WHOLE = made(slice(None), slice(None))


def test_the_log_probabilities_are_those_of_the_whole_sequence() -> None:
    for n in range(3):
        for g in range(4):
            ok = np.asarray(WHOLE.ok[n, g])
            prompt = PROMPTS[n][np.asarray(OK[n])]
            row = jnp.concatenate([prompt, WHOLE.tokens[n, g][ok]])[None]
            outputs = decoder.hidden(CONFIG, PARAMS, row, jnp.ones(row.shape, bool))
            scores = jax.nn.log_softmax(decoder.logits(CONFIG, PARAMS, outputs))[0]
            wanted = [scores[len(prompt) - 1 + t, row[0, len(prompt) + t]] for t in range(ok.sum())]
            np.testing.assert_allclose(WHOLE.log_probs[n, g][ok], wanted, atol=1e-4)


def test_a_completion_does_not_depend_on_its_batch() -> None:
    alone = made(slice(1, 2), slice(2, 3))
    np.testing.assert_array_equal(alone.tokens[0, 0], WHOLE.tokens[1, 2])
    assert not np.array_equal(WHOLE.tokens[1, 1], WHOLE.tokens[1, 2])


def test_a_stop_token_ends_a_completion() -> None:
    tokens, ok = np.asarray(WHOLE.tokens), np.asarray(WHOLE.ok)
    stopped = (tokens == STOP) & ok
    assert stopped.any() and not stopped.all()
    for n, g in np.ndindex(3, 4):
        ends = np.flatnonzero(stopped[n, g])
        assert bool(WHOLE.finished[n, g]) == bool(ends.size)
        length = ends[0] + 1 if ends.size else 8
        assert ok[n, g].tolist() == [t < length for t in range(8)]
        assert (tokens[n, g, length:] == 0).all() and (WHOLE.log_probs[n, g, length:] == 0).all()


def test_the_greatest_length_is_not_compiled() -> None:
    short = made(slice(None), slice(None), most=3)
    np.testing.assert_array_equal(short.tokens[..., :3], WHOLE.tokens[..., :3])
    assert not np.asarray(short.ok[..., 3:]).any()


def test_zero_temperature_takes_the_likeliest() -> None:
    greedy = made(slice(0, 1), slice(0, 1), Sampling(temperature=0.0))
    outputs = decoder.hidden(CONFIG, PARAMS, PROMPTS[:1], OK[:1])
    assert greedy.tokens[0, 0, 0] == jnp.argmax(decoder.logits(CONFIG, PARAMS, outputs)[0, -1])


def test_top_k_and_top_p() -> None:
    scores = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    assert np.isfinite(processed(scores, Sampling(top_k=2))).tolist() == [
        [True, True, False, False]
    ]
    assert np.isfinite(processed(scores, Sampling(top_p=0.6))).tolist() == [
        [True, True, False, False]
    ]
    assert np.isfinite(processed(scores, Sampling(top_p=0.1))).tolist() == [
        [True, False, False, False]
    ]
    np.testing.assert_allclose(processed(scores, Sampling(temperature=2.0)), scores / 2)


def test_buckets() -> None:
    assert [buckets(n) for n in (1, 16, 17, 100)] == [16, 16, 32, 128]


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}])
def test_wrong_options(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match="give"):
        Sampling(**wrong)  # pyright: ignore[reportArgumentType]
