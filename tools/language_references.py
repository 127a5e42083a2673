"""Makes tiny random models with transformers, and the logits that it computes for some tokens.

    python tools/language_references.py tests/language/references

The tests compare Dovetail's decoder with these files, so they need neither torch nor transformers.
Needs an environment with torch, transformers and safetensors.
"""

# pyright: basic, reportMissingImports=false, reportPrivateUsage=false

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 96
SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SCALING = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SHARED | {"tie_word_embeddings": False}),
    "llama-scaled": (
        "llama",
        SHARED | {"rope_parameters": SCALING, "attention_bias": True, "mlp_bias": True},
    ),
    "smollm": ("llama", SHARED | {"tie_word_embeddings": True}),
    "mistral": ("mistral", SHARED | {"sliding_window": 5}),
    "qwen2": ("qwen2", SHARED),
    "qwen3": ("qwen3", SHARED | {"head_dim": 16}),
    "gemma": ("gemma", SHARED | {"head_dim": 16}),
    "gpt2": (
        "gpt2",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
}


def main() -> int:
    """Writes a folder for each model: config, weights, tokens and logits."""
    for seed, (name, (kind, options)) in enumerate(MODELS.items()):
        folder = Path(sys.argv[1]) / name
        torch.manual_seed(seed)
        config = AutoConfig.for_model(kind, **options)
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            # Larger than usual, so that every part of the decoder matters in the logits.
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            tokens = torch.randint(0, VOCABULARY, (2, 24))
            logits = model(tokens).logits
        model.save_pretrained(folder, safe_serialization=True)
        (folder / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(
            folder / "reference.npz",
            tokens=tokens.numpy().astype(np.int32),
            logits=logits.numpy().astype(np.float32),
        )
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(json.dumps({"model": name, "bytes": size}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
