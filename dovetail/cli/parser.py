"""The parser of a command: argparse with our error messages, and an example in every help.

Values stay text here. `values.convert` converts them, so that a config file and the command line
are read alike. Dashes and underscores in flags are equivalent.
"""

import argparse
import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

from dovetail.cli.options import Option
from dovetail.cli.synonyms import answer, ours
from dovetail.errors import UserError

NEGATIVE = re.compile(r"-\.?\d")
COMPLAINTS = {
    r"^argument (\S+): expected .*": r"\1 wants a value",
    r"^argument (\S+)/(--no-\S+): ignored explicit .*": r"write \1 or \2, without a value",
    r"^argument (\S+): ignored explicit argument .*": r"\1 takes no value",
    r"^the following arguments are required: (.*)": r"\1 is missing",
}
"""Argparse's messages, as patterns, and ours."""

ALIASES = {"--policy": "--strategy"}
"""Flags of earlier versions that still work, but are not shown in help."""


class Parser(argparse.ArgumentParser):
    """The parser of one command; it returns only the values that were given."""

    def __init__(self, command: str, description: str, *examples: str) -> None:
        super().__init__(
            prog=f"dovetail {command}",
            description=description,
            epilog="\n".join(["example:", *(f"  {example}" for example in examples)]),
            formatter_class=_Help,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            add_help=False,
        )
        self.add_argument("-h", "--help", action="help", help="Show this")
        self.places: dict[str, str] = {}
        """The key of each flag's value: "--seed": "seed"."""
        self.known: set[str] = set()
        """All keys, including those that only a config file can set."""

    def flag(self, name: str, meaning: str, value: str = "", place: str = "") -> None:
        """Adds the flag `name`; it takes a value unless `value`, its placeholder, is empty."""
        self.places[name] = place or name[2:]
        self.known.add(self.places[name])
        shape: dict[str, Any] = {"metavar": value} if value else {"action": "store_true"}
        self.add_argument(name, dest=self.places[name], help=_literal(meaning), **shape)

    def options(
        self,
        section: str,
        title: str,
        options: Iterable[Option],
        more: str = "",
        hidden: Collection[str] = (),
    ) -> None:
        """Adds a flag for each option; an existing flag keeps its meaning.

        `more` is shown beneath the title; `hidden` options are understood but not shown.
        """
        group = self.add_argument_group(title, _literal(more) or None)
        for option in options:
            place = f"{section}.{option.name}"
            self.known.add(place)
            if option.flag in self.places:
                continue
            self.places[option.flag] = place
            shape: dict[str, Any] = {"metavar": option.shape}
            if option.shape == "bool":
                self.places["--no-" + option.flag[2:]] = place
                shape = {"action": argparse.BooleanOptionalAction}
            told = argparse.SUPPRESS if option.name in hidden else _literal(option.help)
            group.add_argument(option.flag, dest=place, help=told, **shape)

    def read(self, words: Iterable[str]) -> Mapping[str, Any]:
        """Returns the given values as text; raises on an unknown flag or an extra word."""
        known, unknown = self.parse_known_args(normalized(list(words)))
        flag = next((word for word in unknown if word.startswith("-")), None)
        if flag is not None:
            name = flag.partition("=")[0]
            raise UserError(f"{self.prog} has no option {name}: {self._hint(name)}")
        if unknown:
            raise UserError(
                f"{self.prog} does not expect {unknown[0]!r}: {self._stray(unknown[0])}"
            )
        return vars(known)

    def error(self, message: str) -> NoReturn:
        """Raises argparse's own message as a `UserError`."""
        told = message
        for pattern, sentence in COMPLAINTS.items():
            told = re.sub(pattern, sentence, told)
        raise UserError(f"{self.prog}: {told}; see {self.prog} --help.")

    def _hint(self, name: str) -> str:
        flags = sorted(self.places)
        if (known := ours(name, flags)) is not None:
            return answer(name, known)
        initials = [flag for flag in flags if _initials(flag) == name.strip("-")]
        near = initials or difflib.get_close_matches(name, flags, n=1, cutoff=0.6)
        return f"did you mean {near[0]}?" if near else f"see {self.prog} --help."

    def _stray(self, word: str) -> str:
        """A hint for a word that is neither a flag nor the value of one."""
        if word.lower() not in ("true", "false"):
            return f"see {self.prog} --help."
        return "a flag is on as it stands, and off with --no-: --anneal-lr, --no-anneal-lr."


class _Help(argparse.RawDescriptionHelpFormatter):
    """Two columns, without argparse's long usage line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        """Shows the positional arguments only; the flags are listed below."""
        words = [action for action in actions if not action.option_strings]
        super().add_usage(usage, words, groups, prefix)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return "--[no-]" + action.option_strings[0][2:]
        return super()._format_action_invocation(action)


def normalized(words: list[str]) -> list[str]:
    """Replaces underscores in flags by dashes, and joins a negative value to its flag with `=`.

    Argparse would take a separate negative value for a flag.
    """
    normal: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")
            present = ALIASES.get(name, name)
            if present != name and any(_name(other) == present for other in words):
                raise UserError(f"{name} is the earlier name of {present}: give only one of them.")
            normal.append(present + equals + value)
        elif NEGATIVE.match(word) and normal and re.fullmatch(r"--[^=]+", normal[-1]):
            normal[-1] += f"={word}"
        else:
            normal.append(word)
    return normal


def _name(word: str) -> str:
    """The name of the flag in a word of the command line."""
    return word.partition("=")[0].replace("_", "-")


def _literal(text: str) -> str:
    """Escapes % for argparse, which formats help texts."""
    return text.replace("%", "%%")


def _initials(flag: str) -> str:
    """The initials of a flag: `lr` for --learning-rate."""
    return "".join(part[0] for part in flag.strip("-").split("-"))
