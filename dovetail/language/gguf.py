"""Decoders and tokenizers in GGUF files, the format of llama.cpp.

Quantized weights are widened to float32. llama.cpp orders the rows of queries and keys by pairs of
neighbors, because it rotates these; they are put back in the order of halves, which Hugging Face
uses.
"""

from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import UserError
from dovetail.extras import needed
from dovetail.language.checkpoint import DTYPES, Array, assemble
from dovetail.language.config import DecoderConfig
from dovetail.language.decoder import Params
from dovetail.language.tokenizer import Tokenizer

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Hugging Face's names of weights → those of GGUF."""
FAMILIES = ("llama", "qwen2", "qwen3")
PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""How GPT-2 splits a text before its pieces are tokenized."""
SPLITS = {"gpt-2": False, "default": False, "smollm": True}
"""How a text is split, by the name that a file gives → whether digits are split from each other."""


def load(file: Path | str, dtype: str = "float32") -> tuple[DecoderConfig, Params, Tokenizer]:
    """The decoder and the tokenizer in a GGUF file."""
    gguf = needed("gguf", "language")
    try:
        reader = gguf.GGUFReader(str(file))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as GGUF: {error}.") from error
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(reader, stored, str(file))

    def get(name: str, shape: tuple[int, ...]) -> Array:
        own = _own_name(name)
        if own not in stored:
            raise UserError(f"{file} has no weights {own!r}, which its architecture asks for.")
        tensor = stored[own]
        array = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        if array.shape != shape:
            raise UserError(
                f"{file} has weights {own!r} of shape {list(array.shape)} instead of {list(shape)}."
            )
        if config.family == "llama" and own.endswith((".attn_q.weight", ".attn_k.weight")):
            heads = config.num_heads if ".attn_q." in own else config.num_kv_heads
            halves = array.reshape(heads, config.head_dim // 2, 2, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        return array

    return config, assemble(config, get, DTYPES[dtype]), _tokenizer(reader, str(file))


def _config(reader: Any, stored: dict[str, Any], where: str) -> DecoderConfig:
    family = _field(reader, "general.architecture", where)
    if family not in FAMILIES:
        raise UserError(
            f"{where} holds a model of type {family!r}, which is not read from GGUF: give one of "
            f"{', '.join(FAMILIES)}, or its Hugging Face folder."
        )

    def number(name: str) -> Any:
        return _field(reader, f"{family}.{name}", where)

    heads, hidden = int(number("attention.head_count")), int(number("embedding_length"))
    if reader.get_field(f"{family}.rope.scaling.type") is not None:
        raise UserError(f"{where} scales its rotary positions, which is not read from GGUF.")
    length = reader.get_field(f"{family}.attention.key_length")
    return DecoderConfig(
        family=family,
        vocab_size=int(stored["token_embd.weight"].shape[1]),
        hidden_size=hidden,
        num_layers=int(number("block_count")),
        num_heads=heads,
        num_kv_heads=int(number("attention.head_count_kv")),
        head_dim=hidden // heads if length is None else int(length.contents()),
        mlp_size=int(number("feed_forward_length")),
        max_positions=int(number("context_length")),
        norm_eps=float(number("attention.layer_norm_rms_epsilon")),
        rope_theta=float(number("rope.freq_base")),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied="output.weight" not in stored,
    )


def _tokenizer(reader: Any, where: str) -> Tokenizer:
    """A byte-level BPE tokenizer from the vocabulary and merges of a file."""
    tokenizers = needed("tokenizers", "language")
    if _field(reader, "tokenizer.ggml.model", where) != "gpt2":
        raise UserError(
            f"{where} has no byte-level BPE tokenizer: give the Hugging Face folder of the model."
        )
    split = str(_optional(reader, "tokenizer.ggml.pre") or "default")
    if split not in SPLITS:
        raise UserError(
            f"{where} splits text by the rules of {split!r}, which are not known: give the Hugging "
            "Face folder of the model."
        )
    tokens = _field(reader, "tokenizer.ggml.tokens", where)
    merges = [tuple(m.split(" ", 1)) for m in _field(reader, "tokenizer.ggml.merges", where)]
    kinds = _field(reader, "tokenizer.ggml.token_type", where)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    before = tokenizers.pre_tokenizers
    made.pre_tokenizer = before.Sequence(
        [
            *([before.Digits(individual_digits=True)] if SPLITS[split] else []),
            before.Split(tokenizers.Regex(PATTERN), "isolated"),
            before.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    made.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in special])

    def named(name: str) -> str | None:
        number = _optional(reader, f"tokenizer.ggml.{name}_token_id")
        return None if number is None else tokens[int(number)]

    config = {
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "pad_token": named("padding"),
        "chat_template": _optional(reader, "tokenizer.chat_template"),
    }
    return Tokenizer(made, config, where)


def _own_name(name: str) -> str:
    """GGUF's name of a weight that Hugging Face calls `name`."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, number, part = stem.split(".", 3)
        return f"blk.{number}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def _optional(reader: Any, name: str) -> Any:
    found = reader.get_field(name)
    return None if found is None else found.contents()


def _field(reader: Any, name: str, where: str) -> Any:
    found = reader.get_field(name)
    if found is None:
        raise UserError(f"{where} has no entry {name}: the file is damaged, or no language model.")
    return found.contents()
