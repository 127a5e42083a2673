"""A decoder as pure functions on a pytree of parameters.

`extend` serves everything: a whole sequence in training, a prompt before generation, one more token
while decoding, a turn of a conversation. Tokens are appended at a *slot* that is common to all
rows; tokens that are not `ok` are padding, which attention ignores and positions do not count. So
nothing is scattered, and rows of different lengths need no left padding.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.language.config import DecoderConfig

Params = dict[str, Any]
"""Weights of a decoder: embedding, layers, norms; `init` shows the structure."""


class Cache(NamedTuple):
    """Keys and values of the tokens so far, for rows of a batch."""

    keys: list[jax.Array]
    """Of each layer [B, KV, S, D]."""
    values: list[jax.Array]
    ok: jax.Array
    """Which slots hold tokens [B, S]."""
    position: jax.Array
    """Position of each slot's token [B, S]."""
    length: jax.Array
    """Tokens so far [B]."""


def init(config: DecoderConfig, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Random weights: normal with deviation 0.02, residual outputs scaled by the depth."""
    depth = 0.02 / math.sqrt(2 * config.num_layers)
    heads = config.num_heads + 2 * config.num_kv_heads
    inner, mlp = config.num_heads * config.head_dim, config.mlp_size
    size = config.hidden_size

    def dense(key: jax.Array, shape: tuple[int, int], bias: bool, scale: float = 0.02) -> Params:
        made = {"w": scale * jax.random.normal(key, shape, dtype)}
        return {**made, "b": jnp.zeros(shape[1], dtype)} if bias else made

    def layer(key: jax.Array) -> Params:
        keys = jax.random.split(key, 4)
        made = {
            "attention_norm": _initial_norm(config, size, dtype),
            "qkv": dense(keys[0], (size, heads * config.head_dim), config.qkv_bias),
            "out": dense(keys[1], (inner, size), config.out_bias, depth),
            "mlp_norm": _initial_norm(config, size, dtype),
            "up": dense(keys[2], (size, (1 + config.gated) * mlp), config.mlp_bias),
            "down": dense(keys[3], (mlp, size), config.mlp_bias, depth),
        }
        if config.qk_norm:
            made["q_norm"] = _initial_norm(config, config.head_dim, dtype)
            made["k_norm"] = _initial_norm(config, config.head_dim, dtype)
        return made

    embed, positions, head, *layers = jax.random.split(key, 3 + config.num_layers)
    params = {
        "embedding": 0.02 * jax.random.normal(embed, (config.vocab_size, size), dtype),
        "layers": [layer(key) for key in layers],
        "norm": _initial_norm(config, size, dtype),
    }
    if config.positions == "learned":
        shape = (config.max_positions, size)
        params["positions"] = 0.02 * jax.random.normal(positions, shape, dtype)
    if not config.tied:
        shape = (config.vocab_size, size)
        params["head"] = 0.02 * jax.random.normal(head, shape, dtype)
    return params


def _initial_norm(config: DecoderConfig, size: int, dtype: Any) -> Params:
    scale = jnp.full(size, 1.0 - config.norm_offset, dtype)
    return (
        {"scale": scale, "bias": jnp.zeros(size, dtype)}
        if config.norm == "layer"
        else {"scale": scale}
    )


def empty_cache(config: DecoderConfig, rows: int, slots: int, dtype: Any) -> Cache:
    """A cache with room for `slots` tokens of each of `rows` sequences."""
    shape = (rows, config.num_kv_heads, slots, config.head_dim)
    each = [jnp.zeros(shape, dtype) for _ in range(config.num_layers)]
    return Cache(
        each,
        [jnp.zeros(shape, dtype) for _ in range(config.num_layers)],
        jnp.zeros((rows, slots), bool),
        jnp.zeros((rows, slots), jnp.int32),
        jnp.zeros(rows, jnp.int32),
    )


def hidden(config: DecoderConfig, params: Params, tokens: jax.Array, ok: jax.Array) -> jax.Array:
    """The last layer's outputs [B, T, H] for whole sequences [B, T]; `ok` masks padding."""
    rows, length = tokens.shape
    cache = empty_cache(config, rows, length, params["embedding"].dtype)
    return extend(config, params, cache, tokens, ok, 0)[0]


def logits(config: DecoderConfig, params: Params, outputs: jax.Array) -> jax.Array:
    """Scores of the next token [..., V], in float32, from the last layer's outputs [..., H]."""
    head = params["embedding"] if config.tied else params["head"]
    return jnp.einsum("...h,vh->...v", outputs, head, preferred_element_type=jnp.float32)


def extend(
    config: DecoderConfig,
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    ok: jax.Array,
    slot: Any,
    prefix: Cache | None = None,
) -> tuple[jax.Array, Cache]:
    """Appends tokens [B, T] at `slot` … `slot + T - 1`; returns their outputs [B, T, H] and the
    cache with them.

    `prefix` has the tokens before the cache's, shared by groups of rows: row i continues the
    prefix's row `i // (B // N)`. Its keys and values are read once for a group.
    """
    before = cache.length
    if prefix is not None:
        before = before + jnp.repeat(prefix.length, tokens.shape[0] // prefix.length.shape[0])
    position = before[:, None] + jnp.cumsum(ok, axis=1, dtype=jnp.int32) - 1
    position = jnp.maximum(position, 0)
    x = params["embedding"][tokens] * jnp.asarray(config.embedding_scale, params["embedding"].dtype)
    rotation = None
    if config.positions == "learned":
        x = x + params["positions"][position]
    else:
        rotation = rotary_angles(config, position)
    seen = jax.lax.dynamic_update_slice(cache.ok, ok, (0, slot))
    at = jax.lax.dynamic_update_slice(cache.position, position, (0, slot))
    own = _visible(config, ok, position, seen, at)
    groups = None
    if prefix is not None:
        each = tokens.shape[0] // prefix.ok.shape[0]
        groups = _visible(
            config,
            ok,
            position,
            jnp.repeat(prefix.ok, each, 0),
            jnp.repeat(prefix.position, each, 0),
        )
    keys, values = [], []
    for i, layer in enumerate(params["layers"]):
        q, k, v = _projected(config, layer, _norm(config, layer["attention_norm"], x), rotation)
        keys.append(jax.lax.dynamic_update_slice(cache.keys[i], k, (0, 0, slot, 0)))
        values.append(jax.lax.dynamic_update_slice(cache.values[i], v, (0, 0, slot, 0)))
        shared = None
        if prefix is not None and groups is not None:
            shared = prefix.keys[i], prefix.values[i], groups
        mixed = _attend(config, q, (keys[i], values[i], own), shared)
        x = x + _dense(layer["out"], mixed)
        x = x + _mlp(config, layer, _norm(config, layer["mlp_norm"], x))
    after = Cache(keys, values, seen, at, cache.length + jnp.sum(ok, axis=1, dtype=jnp.int32))
    return _norm(config, params["norm"], x), after


def _visible(
    config: DecoderConfig, ok: jax.Array, position: jax.Array, there: jax.Array, at: jax.Array
) -> jax.Array:
    """Which slots [B, S] each of the new tokens [B, T] may look at: [B, T, S]."""
    ahead = position[:, :, None] - at[:, None, :]
    seen = there[:, None, :] & (ahead >= 0)
    if config.window is not None:
        seen &= ahead < config.window
    # Padding looks at everything, so that its softmax is finite; nobody reads the result.
    return seen | ~ok[:, :, None]


def _projected(
    config: DecoderConfig, layer: Params, x: jax.Array, rotation: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, KV, R, D], keys and values [B, KV, T, D]."""
    heads, shared, size = config.num_heads, config.num_kv_heads, config.head_dim
    made = _dense(layer["qkv"], x).reshape(*x.shape[:2], heads + 2 * shared, size)
    q, k, v = jnp.split(made, (heads, heads + shared), axis=2)
    if config.qk_norm:
        q, k = _norm(config, layer["q_norm"], q), _norm(config, layer["k_norm"], k)
    if rotation is not None:
        q, k = rotated(q, *rotation), rotated(k, *rotation)
    q = q.reshape(*x.shape[:2], shared, heads // shared, size)
    return q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)


Segment = tuple[jax.Array, jax.Array, jax.Array]
"""Keys, values [B, KV, S, D], and what may be seen of them [B, T, S]."""


def _attend(config: DecoderConfig, q: jax.Array, own: Segment, shared: Segment | None) -> jax.Array:
    """Attention of queries [B, T, KV, R, D] over their own and the group's keys: [B, T, H·D]."""
    rows, length, kv, repeated, size = q.shape
    scale = 1.0 / math.sqrt(size)
    keys, values, seen = own
    scores = [_masked(jnp.einsum("btkrd,bksd->bkrts", q, keys) * scale, seen)]
    grouped = None
    if shared is not None:
        keys, _, seen = shared
        grouped = q.reshape(keys.shape[0], -1, length, kv, repeated, size)
        found = jnp.einsum("ngtkrd,nksd->ngkrts", grouped, keys) * scale
        scores.append(_masked(found.reshape(rows, kv, repeated, length, -1), seen))
    weights = jax.nn.softmax(jnp.concatenate(scores, -1).astype(jnp.float32)).astype(q.dtype)
    slots = values.shape[2]
    mixed = jnp.einsum("bkrts,bksd->btkrd", weights[..., :slots], values)
    if shared is not None and grouped is not None:
        there = weights[..., slots:].reshape(
            grouped.shape[0], -1, kv, repeated, length, shared[0].shape[2]
        )
        found = jnp.einsum("ngkrts,nksd->ngtkrd", there, shared[1])
        mixed = mixed + found.reshape(mixed.shape)
    return mixed.reshape(rows, length, kv * repeated * size)


def _masked(scores: jax.Array, seen: jax.Array) -> jax.Array:
    return jnp.where(seen[:, None, None], scores, jnp.asarray(-1e30, scores.dtype))


def _mlp(config: DecoderConfig, layer: Params, x: jax.Array) -> jax.Array:
    activate = jax.nn.silu if config.activation == "silu" else jax.nn.gelu
    made = _dense(layer["up"], x)
    if not config.gated:
        return _dense(layer["down"], activate(made))
    gate, up = jnp.split(made, 2, axis=-1)
    return _dense(layer["down"], activate(gate) * up)


def _dense(weights: Params, x: jax.Array) -> jax.Array:
    made = x @ weights["w"]
    return made + weights["b"] if "b" in weights else made


def _norm(config: DecoderConfig, weights: Params, x: jax.Array) -> jax.Array:
    """RMS or layer norm over the last axis, computed in float32."""
    wide = x.astype(jnp.float32)
    if config.norm == "layer":
        wide = wide - jnp.mean(wide, -1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + config.norm_eps)
    scale = weights["scale"].astype(jnp.float32) + config.norm_offset
    made = wide * scale
    return (made + weights["bias"] if "bias" in weights else made).astype(x.dtype)


def rotary_angles(config: DecoderConfig, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [B, T, D / 2] of rotary positions."""
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        wavelength = 2 * math.pi / frequency
        low = scaling.original_positions / scaling.low_freq_factor
        high = scaling.original_positions / scaling.high_freq_factor
        smooth = (scaling.original_positions / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        between = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        slowed = jnp.where(wavelength > low, frequency / scaling.factor, between)
        frequency = jnp.where(wavelength < high, frequency, slowed)
    angle = position[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Heads [B, T, N, D] turned by their positions; the halves of a head are the pairs."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.astype(x.dtype)
