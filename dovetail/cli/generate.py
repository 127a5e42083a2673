"""`dovetail generate`: samples of prompts from a language model."""

import json
import sys
from pathlib import Path
from typing import Any

from dovetail.cli.parser import Parser
from dovetail.cli.values import convert
from dovetail.errors import UserError


def run(argv: list[str]) -> None:
    """Prints the completions of prompts."""
    parser = Parser(
        "generate",
        "Completes prompts with a language model: a Hugging Face folder, or a GGUF file.",
        'dovetail generate models/smollm2 --chat --prompt "What is the capital of France?"',
    )
    parser.add_argument("model", metavar="MODEL", help="The model's folder or .gguf file")
    parser.flag("--prompt", "The prompt; without it, each line of standard input is one", "TEXT")
    parser.flag("--samples", "Completions of each prompt (default 1)", "N")
    parser.flag("--max-tokens", "Greatest length of a completion (default 64)", "N")
    parser.flag("--temperature", "0 takes the likeliest token (default 1)", "T")
    parser.flag("--top-k", "Draw from the k likeliest tokens only", "K")
    parser.flag("--top-p", "Draw from the likeliest tokens of this total probability only", "P")
    parser.flag("--seed", "Seed of the samples (default 0)", "N")
    parser.flag("--chat", "Prompts are a user's messages, which the model answers")
    parser.flag("--json", "One line of JSON for each completion")
    given = dict(parser.read(argv))
    sampling = _numbers(given, {"temperature": float, "top_k": int, "top_p": float})
    numbers = _numbers(given, {"samples": int, "max_tokens": int, "seed": int})
    prompts = [given["prompt"]] if "prompt" in given else sys.stdin.read().splitlines()
    prompts = [prompt for prompt in prompts if prompt.strip()]
    if not prompts:
        raise UserError("There is no prompt: give --prompt, or lines on standard input.")

    from dovetail.language.generate import Sampling
    from dovetail.language.model import load_model

    model = load_model(Path(given["model"]))
    asked: list[Any] = prompts
    if "chat" in given:
        asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
    found = model.complete(asked, sampling=Sampling(**sampling), **numbers)
    for prompt, completions in zip(prompts, found, strict=True):
        for completion in completions:
            if "json" in given:
                print(json.dumps({"prompt": prompt, **vars(completion)}, ensure_ascii=False))
            else:
                print(completion.text)


def _numbers(given: dict[str, Any], kinds: dict[str, type]) -> dict[str, Any]:
    """The numbers that were given, by the names of the arguments."""
    flags = {name: name.replace("_", "-") for name in kinds}
    return {
        name: convert(given[flag], kinds[name], f"--{flag}")
        for name, flag in flags.items()
        if flag in given
    }
