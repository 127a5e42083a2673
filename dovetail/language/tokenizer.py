"""Text to tokens and back, and conversations to text by a model's own chat template.

Tokens that a model sampled are never turned into text and tokenized again: a conversation's next
turn is appended to the tokens that exist.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.errors import UserError
from dovetail.extras import needed
from dovetail.language.checkpoint import read_json

Message = Mapping[str, str]
"""One turn: role ("system", "user", "assistant") and content."""


class Tokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, tokenizer: Any, config: Mapping[str, Any], where: str) -> None:
        self._tokenizer, self._config, self._where = tokenizer, config, where
        self.stop = _stop_tokens(tokenizer, config, where)
        """Tokens that end a completion."""
        named = _text(config.get("pad_token"))
        self.pad: int = self.stop[0] if named is None else tokenizer.token_to_id(named)
        """Fills rows of unequal length; masked everywhere."""

    @classmethod
    def load(cls, folder: Path | str) -> "Tokenizer":
        """Reads `tokenizer.json` and `tokenizer_config.json` of a Hugging Face folder."""
        tokenizers = needed("tokenizers", "language")
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.exists():
            raise UserError(
                f"{folder} has no tokenizer.json: add the tokenizer's files to the folder."
            )
        try:
            found = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises Exception itself
            raise UserError(f"{file} cannot be read: {error}.") from error
        path = folder / "tokenizer_config.json"
        config: dict[str, Any] = read_json(path) if path.exists() else {}
        template = folder / "chat_template.jinja"
        if template.exists():
            config["chat_template"] = template.read_text(encoding="utf-8")
        return cls(found, config, str(folder))

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without any added at its ends."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """The text of tokens; `special` keeps the marks of turns and ends."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def chat(self, messages: Sequence[Message], reply: bool = True) -> list[int]:
        """The tokens of a conversation; with `reply`, up to where the model goes on."""
        return self.encode(self.chat_text(messages, reply))

    def chat_text(self, messages: Sequence[Message], reply: bool = True) -> str:
        """A conversation as text, by the model's chat template."""
        template = self._config.get("chat_template")
        if not isinstance(template, str):
            raise UserError(
                f"{self._where} has no chat template, so it takes no conversations: give plain "
                "prompts, or a model that was trained to chat."
            )
        return rendered(template, messages, reply, self._config)


def rendered(
    template: str, messages: Sequence[Message], reply: bool, config: Mapping[str, Any]
) -> str:
    """Fills in a chat template. It comes with a model, so it runs without access to Python."""
    needed("jinja2", "language")
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    functions: dict[str, Any] = env.globals
    functions["raise_exception"] = _refuse
    marks = {name: _text(config.get(name)) or "" for name in ("bos_token", "eos_token")}
    try:
        return env.from_string(template).render(
            messages=[dict(m) for m in messages], add_generation_prompt=reply, **marks
        )
    except TemplateError as error:
        raise UserError(f"The chat template refuses the conversation: {error}.") from error


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _stop_tokens(tokenizer: Any, config: Mapping[str, Any], where: str) -> list[int]:
    """The end-of-sequence token, and that of a turn where it is another."""
    names = [_text(config.get("eos_token")), "<|im_end|>", "<|eot_id|>", "<end_of_turn>"]
    found = [tokenizer.token_to_id(name) for name in names if name is not None]
    known = list(dict.fromkeys(token for token in found if token is not None))
    if not known:
        raise UserError(
            f"{where} names no end-of-sequence token, so completions would never end: set "
            "eos_token in its tokenizer_config.json."
        )
    return known


def _text(token: Any) -> str | None:
    """The text of a special token, which a config gives as such or as a record."""
    return token.get("content") if isinstance(token, Mapping) else token
