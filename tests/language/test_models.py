"""Models from folders and files, with their tokenizers; and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
import tokenizers

from dovetail.cli.main import main
from dovetail.errors import UserError
from dovetail.language import checkpoint, decoder
from dovetail.language.gguf import load as load_gguf
from dovetail.language.model import load_model
from dovetail.language.tokenizer import Tokenizer, rendered

REFERENCES = Path(__file__).parent / "references"
TOKENS = ["<|im_start|>", "<|im_end|>", *(chr(c) for c in range(33, 33 + 92)), "Ġ", "Ċ"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with a tokenizer of single characters."""
    place = shutil.copytree(REFERENCES / "smollm", tmp_path / "model")
    vocabulary = {token: i for i, token in enumerate(TOKENS)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(TOKENS[:2])
    made.save(str(place / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return place


def test_a_folder_completes_and_chats(folder: Path) -> None:
    model = load_model(folder)
    assert model.tokenizer.decode(model.tokens("AB C")) == "AB C"
    found = model.complete(["AB", "C"], samples=2, max_tokens=5, seed=1)
    assert [len(of_one) for of_one in found] == [2, 2]
    for completion in (c for of_one in found for c in of_one):
        assert len(completion.tokens) == len(completion.log_probs) <= 5
        stopped = completion.tokens[-1] == model.tokenizer.stop[0]
        assert completion.finish_reason == ("stop" if stopped else "length")
    again = model.complete(["AB"], samples=2, max_tokens=5, seed=1)
    assert [c.tokens for c in again[0]] == [c.tokens for c in found[0]]
    chat = model.tokens([{"role": "user", "content": "HI"}])
    assert model.tokenizer.decode(chat, special=True).startswith("<|im_start|>user\nHI<|im_end|>")
    assert len(model.programs) == 2


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", str(folder), "--prompt", "AB", "--max-tokens", "4", "--json", "--seed", "3"]
    assert main(line) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["prompt"] == "AB" and 1 <= len(said["tokens"]) <= 4


def test_a_gguf_file_has_the_same_weights(tmp_path: Path) -> None:
    config, params = checkpoint.load(REFERENCES / "smollm")
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    numbers = {
        "block_count": config.num_layers,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.mlp_size,
        "head_count": config.num_heads,
        "head_count_kv": config.num_kv_heads,
        "rope_freq_base": config.rope_theta,
        "layer_norm_rms_eps": config.norm_eps,
    }
    for name, value in numbers.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model("gpt2")
    tokens = ["a", "b", "ab", *(f"t{i}" for i in range(config.vocab_size - 3))]
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_eos_token_id(2)
    from dovetail.language.gguf import _own_name

    for name, array in checkpoint.weights_of(config, params):
        own = _own_name(name)
        if own.endswith((".attn_q.weight", ".attn_k.weight")):  # pairs of neighbors, as llama.cpp
            heads = len(array) // config.head_dim
            array = array.reshape(heads, 2, config.head_dim // 2, -1).swapaxes(1, 2)
            array = np.ascontiguousarray(array.reshape(heads * config.head_dim, -1))
        writer.add_tensor(own, array)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    again, found, tokenizer = load_gguf(tmp_path / "model.gguf")
    assert again.head_dim == config.head_dim and again.tied
    assert tokenizer.stop == [2] and tokenizer.encode("abb") == [2, 1]
    jax.tree.map(np.testing.assert_array_equal, params, found)


# What is refused.


def changed(folder: Path, file: str, **fields: Any) -> None:
    place = folder / file
    place.write_text(json.dumps({**json.loads(place.read_text()), **fields}))


def test_wrong_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no model folder, it has no config.json"):
        load_model(tmp_path)
    changed(folder, "config.json", model_type="mamba")
    with pytest.raises(UserError, match="'mamba', which is not supported: give one of gemma"):
        load_model(folder)


def test_weights_that_do_not_fit(folder: Path) -> None:
    changed(folder, "config.json", num_hidden_layers=3)
    with pytest.raises(UserError, match="has no weights 'model.layers.2"):
        load_model(folder)
    changed(folder, "config.json", num_hidden_layers=2, intermediate_size=50)
    with pytest.raises(UserError, match=r"of shape \[48, 32\], but its config asks for \[50, 32\]"):
        load_model(folder)


def test_tokenizers_that_do_not_fit(folder: Path) -> None:
    changed(folder, "tokenizer_config.json", eos_token=None)
    model = load_model(folder)
    assert model.tokenizer.stop == [1]  # the end of a turn
    special = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    with pytest.raises(UserError, match="names no end-of-sequence token"):
        Tokenizer(special, {}, "here")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer.json"):
        load_model(folder)


def test_prompts_that_do_not_fit(folder: Path) -> None:
    model = load_model(folder)
    with pytest.raises(UserError, match="Prompt 1 has 60 tokens, and 8 are to follow"):
        model.complete(["A", "A" * 60], max_tokens=8)
    with pytest.raises(UserError, match="Prompt 0 is empty"):
        model.complete([""])


def test_a_template_cannot_reach_python() -> None:
    with pytest.raises(UserError, match="refuses the conversation"):
        rendered("{{ messages.__class__.__mro__ }}", [{"role": "user", "content": "x"}], True, {})


def test_shapes_of_the_decoder() -> None:
    config, params = checkpoint.load(REFERENCES / "gpt2")
    fresh = decoder.init(config, jax.random.key(0))
    shapes = [jax.tree.map(np.shape, tree) for tree in (fresh, params)]
    assert shapes[0] == shapes[1]
