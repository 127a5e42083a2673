"""Writes the pages that `make docs` builds: those of docs/, and the ones made from other files.

`site.py FOLDER` needs only the standard library. It copies docs/, adds CONTRIBUTING.md,
CHANGELOG.md and each example as a page, and writes the pages of the API reference: one for the
public door and one for each of its modules. Their entries are lines that mkdocstrings replaces by
the signature and the docstring. Links between files of the repository become links between pages.
"""

import ast
import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MODULES = ("algorithms", "strategies", "envs", "functions", "networks", "data")
"""The modules of the public door, in the order of the navigation."""
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
TARGET = re.compile(r"dovetail(\.\w+)+:\w+")


def main() -> int:
    """Writes every page into the folder that the command line names; 0 if all links lead on."""
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns("*.lock"))
    places = _places()
    for source, place in places.items():
        page = folder / place
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(_page(source, place, places), encoding="utf-8")
    for name, text in reference().items():
        page = folder / "api" / f"{name}.md"
        page.parent.mkdir(exist_ok=True)
        page.write_text(text, encoding="utf-8")
    return 0


def _places() -> dict[Path, str]:
    """The files of the repository that become pages, each with its place in the site."""
    places = {page: page.relative_to(DOCS).as_posix() for page in sorted(DOCS.rglob("*.md"))}
    places[ROOT / "CONTRIBUTING.md"] = "contributing.md"
    places[ROOT / "CHANGELOG.md"] = "changelog.md"
    examples = sorted((ROOT / "examples").glob("*.py"))
    return places | {file: f"examples/{file.stem}.md" for file in examples}


def _page(source: Path, place: str, places: dict[Path, str]) -> str:
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".py":
        return f"# `{source.relative_to(ROOT)}`\n\n```python\n{text}```\n"

    def moved(link: re.Match[str]) -> str:
        """The link as it reads in the site; those to other sites and to images stay."""
        begin, target, end = link.groups()
        file = (source.parent / target).resolve()
        if ":" in target or file not in places:
            return link.group()
        return begin + os.path.relpath(places[file], os.path.dirname(place)) + end

    return LINK.sub(moved, text)


def reference() -> dict[str, str]:
    """The pages of the API reference by their names."""
    door = "# API\n\nEverything public is in `dovetail`, by convention `import dovetail as dt`.\n"
    pages = {"index": door + "".join(map(_entry, exports(ROOT / "dovetail" / "__init__.py")))}
    for name in MODULES:
        package = ROOT / "dovetail" / name
        pages[name] = f"# `dovetail.{name}`\n\n{_docstring(package / '__init__.py')}\n"
        pages[name] += "".join(map(_entry, exports(package / "__init__.py") or _files(package)))
    return pages


def exports(file: Path) -> list[tuple[str, str]]:
    """What a package exports: the path by which a user finds it, and where it is defined.

    A package exports lazily by strings "module:Name", or imports what it exports.
    """
    package = ".".join(file.parent.relative_to(ROOT).parts)
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and TARGET.fullmatch(str(node.value)):
            module, _, name = str(node.value).partition(":")
            found[name] = f"{module}.{name}"
        elif isinstance(node, ast.ImportFrom) and _inside(node.module or "", package):
            found |= {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return [(f"{package}.{name}", found[name]) for name in sorted(found, key=str.lower)]


def _inside(module: str, package: str) -> bool:
    return module.startswith(f"{package}.") and module != "dovetail.lazy"


def _files(package: Path) -> list[tuple[str, str]]:
    """The modules of a package that exports none of their names itself."""
    files = sorted(file for file in package.glob("*.py") if file.stem != "__init__")
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [(name, name) for name in names]


def _docstring(file: Path) -> str:
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


def _entry(export: tuple[str, str]) -> str:
    name, path = export
    return f"\n::: {path}\n    options:\n      heading: {name}\n"


if __name__ == "__main__":
    sys.exit(main())
