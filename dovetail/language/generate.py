"""Generation: samples of prompts, decoded in one compiled program.

The prompt's keys and values are computed once and shared by all samples of it. Every sample draws
from a key of its own, folded with the position, so a completion does not depend on its batch.
Prompt and completion lengths are rounded up to buckets, so few programs are compiled.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.errors import check_option
from dovetail.language import decoder
from dovetail.language.config import DecoderConfig


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 1.0
    """Scores are divided by it; 0 takes the likeliest token."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability."""

    def __post_init__(self) -> None:
        check_option("temperature", self.temperature, self.temperature >= 0, "0 or more")
        check_option("top_k", self.top_k, self.top_k >= 0, "0 or more")
        check_option("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0, up to 1")


class Completions(NamedTuple):
    """Samples of prompts: N prompts × G samples, up to T tokens."""

    tokens: jax.Array
    """[N, G, T]; after the end, the padding token."""
    ok: jax.Array
    """Which of them were generated, the stop token included [N, G, T]."""
    log_probs: jax.Array
    """log π of each token under the model itself [N, G, T]."""
    sampled_log_probs: jax.Array
    """The same under the distribution that was drawn from: with temperature, top-k and top-p."""
    finished: jax.Array
    """Whether a stop token ended it; otherwise it was cut [N, G]."""


class Decoding(NamedTuple):
    """What goes round the loop over tokens; rows are the samples of all prompts [B]."""

    t: Any
    output: jax.Array
    """The last layer's output for each row's last token [B, H]."""
    cache: decoder.Cache
    live: jax.Array
    """Which rows have not ended [B]."""
    tokens: jax.Array
    log_probs: jax.Array
    drawn: jax.Array
    """Log-probabilities under the distribution that was drawn from."""
    ok: jax.Array


def buckets(length: int, smallest: int = 16) -> int:
    """The length rounded up to a power of two, from `smallest` on."""
    size = smallest
    while size < length:
        size *= 2
    return size


@partial(jax.jit, static_argnames=("config", "samples", "length", "sampling"))
def generate(
    config: DecoderConfig,
    params: decoder.Params,
    prompts: jax.Array,
    ok: jax.Array,
    keys: jax.Array,
    stop: jax.Array,
    pad: jax.Array,
    most: jax.Array,
    *,
    samples: int,
    length: int,
    sampling: Sampling,
) -> Completions:
    """Completes `prompts` [N, P] (`ok` masks their padding), each `samples` times.

    `keys` [N, G] are the samples' random keys, `stop` [K] the tokens that end a completion, and
    `most` the greatest number of tokens, up to `length`, which is compiled. Decoding ends early
    when all have ended.
    """
    count, width = prompts.shape
    rows, dtype = count * samples, params["embedding"].dtype
    prompt_cache = decoder.empty_cache(config, count, width, dtype)
    outputs, prefix = decoder.extend(config, params, prompt_cache, prompts, ok, 0)
    # The last token of each prompt; padding may stand after it.
    last = jnp.max(jnp.where(ok, jnp.arange(width), 0), axis=1)
    begin = jnp.repeat(outputs[jnp.arange(count), last], samples, 0)
    flat = keys.reshape(rows)

    def draw(output: jax.Array, position: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        scores = decoder.logits(config, params, output)
        each = jax.vmap(jax.random.fold_in, (0, None))(flat, position)
        return _draw(scores, each, sampling)

    def step(now: Decoding) -> Decoding:
        token, log_prob, drawn = draw(now.output, now.t)
        token = jnp.where(now.live, token, pad)
        write = partial(_column, t=now.t)
        ends = jnp.any(token[:, None] == stop, axis=1)
        outputs, cache = decoder.extend(
            config, params, now.cache, token[:, None], now.live[:, None], now.t, prefix
        )
        return Decoding(
            now.t + 1,
            outputs[:, 0],
            cache,
            now.live & ~ends,
            write(now.tokens, token),
            write(now.log_probs, jnp.where(now.live, log_prob, 0)),
            write(now.drawn, jnp.where(now.live, drawn, 0)),
            write(now.ok, now.live),
        )

    zeros = jnp.zeros((rows, length), jnp.float32)
    start = Decoding(
        jnp.int32(0),
        begin,
        decoder.empty_cache(config, rows, length, dtype),
        jnp.ones(rows, bool),
        jnp.full((rows, length), pad, jnp.int32),
        zeros,
        zeros,
        jnp.zeros((rows, length), bool),
    )
    end = jax.lax.while_loop(lambda now: (now.t < most) & jnp.any(now.live), step, start)
    shape = (count, samples, length)
    return Completions(
        end.tokens.reshape(shape),
        end.ok.reshape(shape),
        end.log_probs.reshape(shape),
        end.drawn.reshape(shape),
        ~end.live.reshape(shape[:2]),
    )


def _column(array: jax.Array, column: jax.Array, t: Any) -> jax.Array:
    return jax.lax.dynamic_update_slice(array, column[:, None].astype(array.dtype), (0, t))


def _draw(
    scores: jax.Array, keys: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens [B] drawn from scores [B, V], with their log-probabilities under the model and under
    the distribution drawn from."""
    plain = jax.nn.log_softmax(scores)
    if sampling.temperature == 0:
        token = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        return token, _at(plain, token), jnp.zeros(token.shape, jnp.float32)
    allowed = processed(scores, sampling)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[1:]))(keys)
    token = jnp.argmax(allowed + noise, axis=-1).astype(jnp.int32)
    return token, _at(plain, token), _at(jax.nn.log_softmax(allowed), token)


def processed(scores: jax.Array, sampling: Sampling) -> jax.Array:
    """Scores [B, V] after temperature, top-k and top-p; tokens that are ruled out have -inf."""
    scores = scores / sampling.temperature
    if sampling.top_k and sampling.top_k < scores.shape[-1]:
        lowest = jax.lax.top_k(scores, sampling.top_k)[0][:, -1:]
        scores = jnp.where(scores < lowest, -jnp.inf, scores)
    if sampling.top_p < 1:
        ordered = -jnp.sort(-scores, axis=-1)
        share = jax.nn.softmax(ordered)
        # Keep a token while those before it have less than top_p; the likeliest always stays.
        kept = jnp.cumsum(share, axis=-1) - share < sampling.top_p
        lowest = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        scores = jnp.where(scores < lowest, -jnp.inf, scores)
    return scores


def _at(log_probs: jax.Array, token: jax.Array) -> jax.Array:
    return jnp.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0]
