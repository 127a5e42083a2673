"""Finds the class for a word of the command line, without importing it.

`ppo` is a built-in class; `my_file.py:MyAlgorithm` is a class in the user's file. Only the source
is parsed, so that help and typos are handled before JAX is imported.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from dovetail import algorithms, strategies
from dovetail.errors import UserError, command, nearest
from dovetail.loading import load_object

Kind = Literal["algorithm", "strategy"]
PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Reference:
    """A class found in a source file, not yet imported."""

    kind: Kind
    file: Path
    name: str
    own: str | None
    """The short name of a built-in class; None for a class in the user's file."""

    @property
    def word(self) -> str:
        """The word for the command line."""
        return self.own or f"{self.file}:{self.name}"

    @property
    def summary(self) -> str:
        """The first line of the class's docstring."""
        lines = (ast.get_docstring(class_in(self.file, self.name)) or "").splitlines()
        return lines[0] if lines else ""

    def load(self) -> Any:
        """Imports the object; the file may have rebound the name to something else than a class."""
        own = catalog(self.kind)[self.own] if self.own else None
        return load_object(own or f"{self.file}:{self.name}", self.kind)


def catalog(kind: Kind) -> dict[str, str]:
    """The built-in algorithms or strategies: word → "module:Class"."""
    return algorithms.ALGORITHMS if kind == "algorithm" else strategies.STRATEGIES


def find(kind: Kind, word: str) -> Reference:
    """Finds the class for `word`."""
    own = catalog(kind)
    if word.lower() in own:
        module, _, name = own[word.lower()].partition(":")
        file = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
        return Reference(kind, file, name, word.lower())
    path, _, name = word.rpartition(":") if ".py:" in word else (word, "", "")
    if (Path(word) / "config.json").is_file():
        raise UserError(
            f"{word} is a run, not an {kind}: use {command('explain', word, '--analyze')} to see "
            f"where its time went, or {command('train', '--resume', word)} to go on with it."
        )
    if not path.endswith(".py"):
        raise UserError(f"There is no {kind} called {word!r}: {nearest(word.lower(), own)}")
    if not Path(path).is_file():
        raise UserError(f"There is no file {path} to take the {kind} from: give an existing one.")
    names = [node.name for node in parse(Path(path)).body if isinstance(node, ast.ClassDef)]
    if not name:
        example = f"{path}:{names[-1] if names else 'Name'}"
        raise UserError(f"Say which class of {path} is the {kind}, for instance {example}.")
    if name not in names:
        hint = nearest(name, names) if names else "it defines no class at all"
        raise UserError(f"{path} defines no class {name!r}: {hint}")
    return Reference(kind, Path(path), name, None)


def parse(file: Path) -> ast.Module:
    """Parses a source file."""
    return _parsed(file, file.resolve())


@cache
def _parsed(file: Path, _: Path) -> ast.Module:
    """Cached by absolute path: a relative path names another file in another working directory."""
    try:
        return ast.parse(file.read_text(encoding="utf-8"), str(file))
    except SyntaxError as error:
        raise UserError(f"{file}, line {error.lineno}, is not Python: {error.msg}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not a text file in UTF-8, so it is not Python.") from error


def class_in(file: Path, name: str) -> ast.ClassDef:
    """Finds the definition of the class `name` in `file`."""
    for node in parse(file).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise UserError(f"{file} defines no class {name!r}.")
