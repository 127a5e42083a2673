"""A language model that is ready to use: decoder, weights and tokenizer from one folder or file."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.errors import UserError, check_option
from dovetail.language import checkpoint, gguf
from dovetail.language.config import DecoderConfig
from dovetail.language.decoder import Params
from dovetail.language.generate import Sampling, buckets, generate
from dovetail.language.tokenizer import Message, Tokenizer

Prompt = str | Sequence[Message]
"""Plain text that is continued, or a conversation that is answered."""


@dataclass(frozen=True)
class Completion:
    """One sample of a prompt."""

    text: str
    tokens: list[int]
    """What was sampled, the stop token included."""
    log_probs: list[float]
    """log π of each token under the model itself, without temperature, top-k and top-p."""
    finish_reason: Literal["stop", "length"]
    """Whether a stop token ended it, or the greatest length."""


@dataclass
class LanguageModel:
    """A decoder with its weights and tokenizer."""

    config: DecoderConfig
    params: Params
    tokenizer: Tokenizer
    programs: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])
    """The shapes that were compiled: (prompts, samples, prompt length, completion length)."""

    def tokens(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return self.tokenizer.chat(prompt)

    def complete(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int = 1,
        max_tokens: int = 64,
        sampling: Sampling | None = None,
        seed: int = 0,
    ) -> list[list[Completion]]:
        """Samples of every prompt: [prompts][samples].

        A completion depends on its prompt's and its own number, and on the seed; not on what else
        is completed beside it.
        """
        return self.continue_tokens(
            [self.tokens(prompt) for prompt in prompts],
            samples=samples,
            max_tokens=max_tokens,
            sampling=sampling,
            seed=seed,
        )

    def continue_tokens(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int = 1,
        max_tokens: int = 64,
        sampling: Sampling | None = None,
        seed: int = 0,
    ) -> list[list[Completion]]:
        """`complete` for prompts that are tokens already."""
        check_option("samples", samples, samples >= 1, "1 or more")
        check_option("max_tokens", max_tokens, max_tokens >= 1, "1 or more")
        self._check(prompts, max_tokens)
        width, length = buckets(max(map(len, prompts))), buckets(max_tokens)
        rows = np.full((len(prompts), width), self.tokenizer.pad, np.int32)
        for row, prompt in zip(rows, prompts, strict=True):
            row[: len(prompt)] = prompt
        sizes = np.array([len(prompt) for prompt in prompts])
        self.programs.add((len(prompts), samples, width, length))
        made = generate(
            self.config,
            self.params,
            jnp.asarray(rows),
            jnp.asarray(np.arange(width) < sizes[:, None]),
            sample_keys(seed, len(prompts), samples),
            jnp.asarray(self.tokenizer.stop, jnp.int32),
            jnp.int32(self.tokenizer.pad),
            jnp.int32(max_tokens),
            samples=samples,
            length=length,
            sampling=sampling or Sampling(),
        )
        found = jax.device_get(made)
        return [
            [self._completion(found, n, g) for g in range(samples)] for n in range(len(prompts))
        ]

    def _completion(self, found: Any, n: int, g: int) -> Completion:
        ok = found.ok[n, g]
        tokens = found.tokens[n, g][ok].tolist()
        ended = bool(found.finished[n, g])
        return Completion(
            self.tokenizer.decode(tokens),
            tokens,
            found.log_probs[n, g][ok].tolist(),
            "stop" if ended else "length",
        )

    def _check(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        if not prompts:
            raise UserError("There is no prompt to complete: give one or more.")
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise UserError(f"Prompt {number} is empty: give it at least one token.")
            if len(prompt) + max_tokens > self.config.max_positions:
                raise UserError(
                    f"Prompt {number} has {len(prompt)} tokens, and {max_tokens} are to follow, "
                    f"but the model's context has {self.config.max_positions}: shorten the prompt, "
                    "or lower --max-tokens."
                )


def sample_keys(seed: int, prompts: int, samples: int) -> jax.Array:
    """A random key for each (prompt, sample) [N, G]."""
    one = jax.vmap(jax.random.fold_in, (None, 0))
    of_prompts = one(jax.random.key(seed), jnp.arange(prompts))
    return jax.vmap(one, (0, None))(of_prompts, jnp.arange(samples))


def load_model(
    path: Path | str, *, dtype: Literal["float32", "bfloat16"] = "float32"
) -> LanguageModel:
    """Reads a Hugging Face folder with safetensors, or a GGUF file."""
    path = Path(path)
    if path.suffix == ".gguf":
        config, params, tokenizer = gguf.load(path, dtype)
    else:
        config, params = checkpoint.load(path, dtype)
        tokenizer = Tokenizer.load(path)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"The tokenizer of {path} has {tokenizer.vocab_size} tokens, but the model only "
            f"{config.vocab_size}: give the tokenizer that the model was trained with."
        )
    return LanguageModel(config, jax.device_put(params), tokenizer)
