"""Decoders as Hugging Face folders: `config.json` and safetensors files, one or several.

Weights are stored there under the names of each family, one matrix per projection; here the
matrices of queries, keys and values are one, and those of gate and up. Linear layers are stored
[outputs, inputs] and used [inputs, outputs]; GPT-2 stores them as they are used.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dovetail.errors import UserError
from dovetail.language.config import DecoderConfig, config_of
from dovetail.language.decoder import Params

Array = np.ndarray[Any, np.dtype[Any]]
Get = Callable[[str, tuple[int, ...]], Array]
"""Returns the stored array of a name, and raises unless it has the shape."""

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
SHARD = 4 << 30
"""Bytes of one safetensors file, at most."""


@dataclass(frozen=True)
class Names:
    """The names of a family's weights; `{}` is the number of a layer."""

    embedding: str
    positions: str | None
    norm: str
    head: str
    attention_norm: str
    qkv: tuple[str, ...]
    """One name, or one each for queries, keys and values."""
    out: str
    mlp_norm: str
    up: tuple[str, ...]
    """One name, or gate and up."""
    down: str
    q_norm: str = "model.layers.{}.self_attn.q_norm"
    k_norm: str = "model.layers.{}.self_attn.k_norm"
    transposed: bool = True
    """Whether linear layers are stored [outputs, inputs]."""


_ATTENTION, _MLP = "model.layers.{}.self_attn.", "model.layers.{}.mlp."
LLAMA = Names(
    embedding="model.embed_tokens.weight",
    positions=None,
    norm="model.norm",
    head="lm_head.weight",
    attention_norm="model.layers.{}.input_layernorm",
    qkv=(_ATTENTION + "q_proj", _ATTENTION + "k_proj", _ATTENTION + "v_proj"),
    out=_ATTENTION + "o_proj",
    mlp_norm="model.layers.{}.post_attention_layernorm",
    up=(_MLP + "gate_proj", _MLP + "up_proj"),
    down=_MLP + "down_proj",
)
GPT2 = Names(
    embedding="transformer.wte.weight",
    positions="transformer.wpe.weight",
    norm="transformer.ln_f",
    head="lm_head.weight",
    attention_norm="transformer.h.{}.ln_1",
    qkv=("transformer.h.{}.attn.c_attn",),
    out="transformer.h.{}.attn.c_proj",
    mlp_norm="transformer.h.{}.ln_2",
    up=("transformer.h.{}.mlp.c_fc",),
    down="transformer.h.{}.mlp.c_proj",
    transposed=False,
)


def names_of(config: DecoderConfig) -> Names:
    """The names of the weights of a family."""
    return GPT2 if config.family == "gpt2" else LLAMA


def load(folder: Path | str, dtype: str = "float32") -> tuple[DecoderConfig, Params]:
    """The decoder in a Hugging Face folder, with its weights in float32 or bfloat16."""
    folder = Path(folder)
    config = config_of(read_json(folder / "config.json"), str(folder / "config.json"))
    files = StoredWeights(folder)
    return config, assemble(config, files.get, DTYPES[dtype])


def assemble(config: DecoderConfig, get: Get, dtype: np.dtype[Any]) -> Params:
    """The parameters of a decoder from weights by the names of its family."""
    names = names_of(config)
    size, head = config.hidden_size, config.head_dim
    inner, shared = config.num_heads * head, config.num_kv_heads * head
    widths = {3: (inner, shared, shared), 2: (config.mlp_size,) * 2}

    def linear(stored: tuple[str, ...], inputs: int, outputs: int, bias: bool) -> Params:
        sizes = widths.get(len(stored), (outputs,))
        parts: list[Array] = []
        for name, width in zip(stored, sizes, strict=True):
            shape = (width, inputs) if names.transposed else (inputs, width)
            found = get(f"{name}.weight", shape)
            parts.append(found.T if names.transposed else found)
        made = {"w": _cast(np.concatenate(parts, 1), dtype)}
        if bias:
            biases = [get(f"{n}.bias", (w,)) for n, w in zip(stored, sizes, strict=True)]
            made["b"] = _cast(np.concatenate(biases), dtype)
        return made

    def norm(name: str, width: int) -> Params:
        made = {"scale": _cast(get(f"{name}.weight", (width,)), dtype)}
        if config.norm == "layer":
            made["bias"] = _cast(get(f"{name}.bias", (width,)), dtype)
        return made

    def layer(number: int) -> Params:
        def at(*texts: str) -> tuple[str, ...]:
            return tuple(text.format(number) for text in texts)

        made = {
            "attention_norm": norm(names.attention_norm.format(number), size),
            "qkv": linear(at(*names.qkv), size, inner + 2 * shared, config.qkv_bias),
            "out": linear(at(names.out), inner, size, config.out_bias),
            "mlp_norm": norm(names.mlp_norm.format(number), size),
            "up": linear(
                at(*names.up), size, (1 + config.gated) * config.mlp_size, config.mlp_bias
            ),
            "down": linear(at(names.down), config.mlp_size, size, config.mlp_bias),
        }
        if config.qk_norm:
            made["q_norm"] = norm(names.q_norm.format(number), head)
            made["k_norm"] = norm(names.k_norm.format(number), head)
        return made

    rows = (config.vocab_size, size)
    params: Params = {
        "embedding": _cast(get(names.embedding, rows), dtype),
        "layers": [layer(i) for i in range(config.num_layers)],
        "norm": norm(names.norm, size),
    }
    if names.positions is not None:
        params["positions"] = _cast(get(names.positions, (config.max_positions, size)), dtype)
    if not config.tied:
        params["head"] = _cast(get(names.head, rows), dtype)
    return params


def weights_of(config: DecoderConfig, params: Params) -> Iterator[tuple[str, Array]]:
    """The weights by the names of the decoder's family: the inverse of `assemble`."""
    names, head = names_of(config), config.head_dim
    inner, shared = config.num_heads * head, config.num_kv_heads * head

    def linear(stored: tuple[str, ...], made: Params) -> Iterator[tuple[str, Array]]:
        cuts = {3: [inner, inner + shared], 2: [config.mlp_size], 1: []}[len(stored)]
        for name, part in zip(stored, np.split(np.asarray(made["w"]), cuts, 1), strict=True):
            yield f"{name}.weight", np.ascontiguousarray(part.T if names.transposed else part)
        if "b" in made:
            for name, part in zip(stored, np.split(np.asarray(made["b"]), cuts), strict=True):
                yield f"{name}.bias", part

    def norm(name: str, made: Params) -> Iterator[tuple[str, Array]]:
        yield f"{name}.weight", np.asarray(made["scale"])
        if "bias" in made:
            yield f"{name}.bias", np.asarray(made["bias"])

    yield names.embedding, np.asarray(params["embedding"])
    if names.positions is not None:
        yield names.positions, np.asarray(params["positions"])
    for i, layer in enumerate(params["layers"]):
        for part in ("attention_norm", "mlp_norm", *(("q_norm", "k_norm") * config.qk_norm)):
            yield from norm(getattr(names, part).format(i), layer[part])
        for part in ("qkv", "up"):
            yield from linear(tuple(n.format(i) for n in getattr(names, part)), layer[part])
        for part in ("out", "down"):
            yield from linear((getattr(names, part).format(i),), layer[part])
    yield from norm(names.norm, params["norm"])
    if "head" in params:
        yield names.head, np.asarray(params["head"])


def save(
    folder: Path | str, config_json: Mapping[str, Any], config: DecoderConfig, params: Params
) -> None:
    """Writes a Hugging Face folder that transformers and vLLM load: config and weights."""
    from safetensors.numpy import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Array]] = [{}]
    for name, array in weights_of(config, params):
        if sum(x.nbytes for x in shards[-1].values()) + array.nbytes > SHARD and shards[-1]:
            shards.append({})
        shards[-1][name] = array
    files = [_file(i, len(shards)) for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        places = {n: f for f, shard in zip(files, shards, strict=True) for n in shard}
        total = sum(x.nbytes for shard in shards for x in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
    kind = str(np.asarray(params["embedding"]).dtype)
    written = {k: v for k, v in config_json.items() if k not in ("dtype", "torch_dtype")}
    (folder / "config.json").write_text(json.dumps({**written, "dtype": kind}, indent=2))


INDEX = "model.safetensors.index.json"


def _file(number: int, count: int) -> str:
    if count == 1:
        return "model.safetensors"
    return f"model-{number + 1:05}-of-{count:05}.safetensors"


class StoredWeights:
    """The safetensors files of a folder, read array by array."""

    def __init__(self, folder: Path) -> None:
        index = folder / INDEX
        if index.exists():
            places: dict[str, str] = read_json(index)["weight_map"]
            self._files = {name: folder / file for name, file in places.items()}
        elif (folder / "model.safetensors").exists():
            file = folder / "model.safetensors"
            self._files = dict.fromkeys(_names_in(file), file)
        else:
            raise UserError(
                f"{folder} has no model.safetensors: give a Hugging Face folder with safetensors."
            )
        self._folder = folder

    def get(self, name: str, shape: tuple[int, ...]) -> Array:
        """One array; GPT-2's files may leave out the prefix of names."""
        from safetensors import safe_open

        found = name if name in self._files else name.removeprefix("transformer.")
        if found not in self._files:
            raise UserError(f"{self._folder} has no weights {name!r}, which its config asks for.")
        try:
            with safe_open(self._files[found], "flax") as file:
                array = np.asarray(file.get_tensor(found))
        except (OSError, ValueError) as error:
            raise UserError(f"{self._files[found]} cannot be read: {error}.") from error
        if array.shape != shape:
            raise UserError(
                f"{self._folder} has weights {name!r} of shape {list(array.shape)}, but its config "
                f"asks for {list(shape)}."
            )
        return array


def _names_in(file: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as opened:
            return list(opened.keys())
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read: {error}.") from error


def read_json(path: Path) -> Any:
    """The content of a JSON file of a model folder."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path.parent} is no model folder, it has no {path.name}: give a Hugging Face folder."
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error


def _cast(array: Array, dtype: np.dtype[Any]) -> Array:
    return np.ascontiguousarray(array, dtype)
