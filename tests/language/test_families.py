"""The decoder computes what transformers computes, for every family; and folders round-trip."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.errors import UserError
from dovetail.language import checkpoint, decoder

REFERENCES = Path(__file__).parent / "references"
MODELS = sorted(folder.name for folder in REFERENCES.iterdir())


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_those_of_transformers(name: str) -> None:
    config, params = checkpoint.load(REFERENCES / name)
    reference = np.load(REFERENCES / name / "reference.npz")
    tokens = jnp.asarray(reference["tokens"])
    outputs = decoder.hidden(config, params, tokens, jnp.ones(tokens.shape, bool))
    found = decoder.logits(config, params, outputs)
    np.testing.assert_allclose(found, reference["logits"], atol=2e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_folder_has_the_same_weights(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "SHARD", 30_000)  # several files
    config, params = checkpoint.load(REFERENCES / name)
    said = json.loads((REFERENCES / name / "config.json").read_text())
    checkpoint.save(tmp_path, said, config, params)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again, found = checkpoint.load(tmp_path)
    assert again == config
    for left, right in zip(*map(_leaves, (params, found)), strict=True):
        np.testing.assert_array_equal(left, right)


def _leaves(tree):
    import jax

    return jax.tree.leaves(tree)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no model folder, it has no config.json"):
        checkpoint.load(tmp_path)
