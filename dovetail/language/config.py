"""The shape of a decoder, read from and written to a Hugging Face `config.json`.

One decoder serves all families: a family is a choice of norm, positions, biases and MLP.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dovetail.errors import UserError

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Llama3Scaling:
    """Rotary frequencies that are slowed down for long contexts, as in Llama 3.1."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and choices of a decoder."""

    family: str
    """`model_type` of config.json: llama, qwen2, …"""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    max_positions: int
    """Longest context, in tokens."""
    norm_eps: float
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    """Added to the scales of RMS norms; Gemma stores them less one."""
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Scaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normalized head by head, as in Qwen3."""
    gated: bool = True
    """SwiGLU or GeGLU; otherwise a plain MLP."""
    activation: Literal["silu", "gelu"] = "silu"
    """gelu is the approximation by tanh."""
    tied: bool = False
    """Whether the output layer is the embedding."""
    embedding_scale: float = 1.0
    """Embeddings are multiplied by it."""
    window: int | None = None
    """Tokens that attention looks back; None for all."""


def config_of(found: Json, where: str) -> DecoderConfig:
    """The decoder that a `config.json` describes; `where` is its path, for errors."""
    family = str(found.get("model_type", ""))
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UserError(
            f"{where} describes a model of type {family or 'unknown'!r}, which is not supported: "
            f"give one of {known}."
        )
    try:
        config = FAMILIES[family](found)
    except KeyError as missing:
        raise UserError(f"{where} has no entry {missing}: give a complete model folder.") from None
    _check(config, where)
    return config


def _check(config: DecoderConfig, where: str) -> None:
    if config.num_heads % config.num_kv_heads:
        raise UserError(
            f"{where} has {config.num_heads} attention heads, which {config.num_kv_heads} heads of "
            "keys and values do not divide: the file is damaged."
        )
    if config.head_dim % 2 and config.positions == "rope":
        raise UserError(
            f"{where} has heads of size {config.head_dim}, but rotary positions need an even one."
        )


def _llama(found: Json) -> DecoderConfig:
    heads, hidden = found["num_attention_heads"], found["hidden_size"]
    return DecoderConfig(
        family=found["model_type"],
        vocab_size=found["vocab_size"],
        hidden_size=hidden,
        num_layers=found["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=found.get("num_key_value_heads") or heads,
        head_dim=found.get("head_dim") or hidden // heads,
        mlp_size=found["intermediate_size"],
        max_positions=found["max_position_embeddings"],
        norm_eps=found["rms_norm_eps"],
        rope_theta=_theta(found),
        rope_scaling=_scaling(found),
        qkv_bias=bool(found.get("attention_bias", False)),
        out_bias=bool(found.get("attention_bias", False)),
        mlp_bias=bool(found.get("mlp_bias", False)),
        activation=_activation(found, "hidden_act", "silu"),
        tied=bool(found.get("tie_word_embeddings", False)),
    )


def _qwen2(found: Json) -> DecoderConfig:
    window = found.get("sliding_window") if found.get("use_sliding_window") else None
    return replace(_llama(found), qkv_bias=True, out_bias=False, window=window)


def _qwen3(found: Json) -> DecoderConfig:
    window = found.get("sliding_window") if found.get("use_sliding_window") else None
    return replace(_llama(found), qk_norm=True, window=window)


def _mistral(found: Json) -> DecoderConfig:
    return replace(_llama(found), window=found.get("sliding_window"))


def _gemma(found: Json) -> DecoderConfig:
    # Gemma's own files say hidden_act=gelu and mean the approximation by tanh.
    act = "gelu_pytorch_tanh"
    config = _llama({**found, "hidden_act": act, "tie_word_embeddings": True})
    return replace(config, norm_offset=1.0, embedding_scale=config.hidden_size**0.5)


def _gpt2(found: Json) -> DecoderConfig:
    hidden, heads = found["n_embd"], found["n_head"]
    return DecoderConfig(
        family="gpt2",
        vocab_size=found["vocab_size"],
        hidden_size=hidden,
        num_layers=found["n_layer"],
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        mlp_size=found.get("n_inner") or 4 * hidden,
        max_positions=found["n_positions"],
        norm_eps=found["layer_norm_epsilon"],
        norm="layer",
        positions="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        gated=False,
        activation=_activation(found, "activation_function", "gelu_new"),
        tied=bool(found.get("tie_word_embeddings", True)),
    )


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gpt2": _gpt2,
}
"""`model_type` → how its config.json is read."""


def _rope(found: Json) -> Json:
    """The entries about rotary positions, which newer files keep together."""
    return found.get("rope_parameters") or found.get("rope_scaling") or {}


def _theta(found: Json) -> float:
    return float(found.get("rope_theta") or _rope(found).get("rope_theta") or 10_000.0)


def _scaling(found: Json) -> Llama3Scaling | None:
    scaling = _rope(found)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UserError(
            f"The model scales its rotary positions by {kind!r}, which is not supported: give one "
            "without scaling, or with that of Llama 3."
        )
    return Llama3Scaling(
        scaling["factor"],
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
    )


def _activation(found: Json, key: str, default: str) -> Literal["silu", "gelu"]:
    name = found.get(key, default)
    if name in ("silu", "swish"):
        return "silu"
    if name in ("gelu_new", "gelu_pytorch_tanh"):
        return "gelu"
    raise UserError(f"The model's activation {name!r} is not supported: silu and gelu (tanh) are.")
