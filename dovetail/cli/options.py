"""The options of a dataclass, read from its source: name, type, default and one-line meaning.

The help text of an option is the string beneath its field. The source is parsed, not imported:
that keeps `--help` fast, and these strings exist in the source only.
"""

import ast
import importlib
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path

from dovetail.cli.reference import PACKAGE, class_in, parse


@dataclass(frozen=True)
class Option:
    """One field of a dataclass, as written in its source."""

    name: str
    annotation: str
    default: str | None
    """The default's source text; None if the option is required."""
    meaning: str

    @property
    def flag(self) -> str:
        """The flag on the command line: --gae-lambda for `gae_lambda`."""
        return flag(self.name)

    @property
    def shape(self) -> str:
        """The placeholder of its value in help."""
        kind = self.annotation.replace(" ", "").removesuffix("|None")
        if kind.startswith("Literal["):
            return "|".join(str(choice) for choice in ast.literal_eval(f"({kind[8:-1]},)"))
        if kind.startswith(("tuple[", "list[")):
            return kind.partition("[")[2].partition(",")[0].rstrip("]") + ",…"
        return kind.lower() if kind.isidentifier() else kind  # the name of an alias: Network

    @property
    def help(self) -> str:
        """The help text: meaning and default."""
        default = f"default {self.default}" if self.default is not None else "required"
        return f"{self.meaning.rstrip('.')} ({default.replace('None', 'none')})".strip()


def flag(name: str) -> str:
    """The flag of the option `name`."""
    return "--" + name.rstrip("_").replace("_", "-")


def read(file: Path, name: str) -> dict[str, Option]:
    """Reads the options of the dataclass `name` in `file`, inherited ones first."""
    definition = class_in(file, name)
    found: dict[str, Option] = {}
    for base in definition.bases:
        if place := _place(ast.unparse(base), file):
            found |= read(*place)
    for field, following in zip(definition.body, [*definition.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        annotation = ast.unparse(field.annotation)
        if "ClassVar" in annotation or field.target.id.startswith("_"):
            continue
        option = Option(field.target.id, annotation, _default(field.value), _meaning(following))
        found[option.name] = option
    return found


def _default(value: ast.expr | None) -> str | None:
    """The default as written; for `field(default=…)`, its argument."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
        given = {word.arg: ast.unparse(word.value) for word in value.keywords}
        return given.get("default", "…" if "default_factory" in given else None)
    return None if value is None else ast.unparse(value)


def _meaning(statement: ast.stmt | None) -> str:
    """The string beneath a field, on one line."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return " ".join(str(statement.value.value).split())
    return ""


def _place(base: str, file: Path) -> tuple[Path, str] | None:
    """The file and name of a base class; None if it has no options."""
    name = base.partition("[")[0]
    if any(isinstance(node, ast.ClassDef) and node.name == name for node in parse(file).body):
        return file, name
    module, _, name = _full_name(name, file).rpartition(".")
    if module.partition(".")[0] in sys.stdlib_module_names or not module:
        return None
    if module == "dovetail" or module.startswith("dovetail."):
        return _own_place(module, name)
    # A class of another module: importing it finds its source file.
    sys.path.insert(0, str(file.resolve().parent))
    source = inspect.getsourcefile(getattr(importlib.import_module(module), name))
    return (Path(source), name) if source else None


def _own_place(module: str, name: str) -> tuple[Path, str] | None:
    """The file and name of a built-in class; resolves re-exports like `dovetail.Algorithm`."""
    package = PACKAGE.joinpath(*module.split(".")[1:], "__init__.py")
    if package.is_file():  # it lists what it exports as "module:Name"
        texts = (node.value for node in ast.walk(parse(package)) if isinstance(node, ast.Constant))
        places = (str(text).rpartition(":") for text in texts)
        module = next((place for place, _, exported in places if exported == name), module)
    source = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return (source, name) if source.is_file() else None


def _full_name(name: str, file: Path) -> str:
    """Expands `dt.algorithms.PPO` to `dovetail.algorithms.PPO`, by the file's imports."""
    first, dot, rest = name.partition(".")
    for node in parse(file).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {alias.asname or alias.name: alias.name for alias in node.names}
            if first in names:
                return f"{node.module}.{names[first]}{dot}{rest}"
        if isinstance(node, ast.Import):
            names = {alias.asname or alias.name: alias.name for alias in node.names}
            if first in names:
                return f"{names[first]}{dot}{rest}"
    return ""
