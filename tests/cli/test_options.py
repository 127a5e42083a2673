import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.cli.options import Option, read
from dovetail.cli.reference import find
from dovetail.errors import UserError

SOURCE = '''
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol
import dovetail as dt
from neighbor import Shared

@dataclass(frozen=True)
class Root(Protocol):
    actions: ClassVar[int] = 3
    rate: float = 3e-4
    """The step size,
    in two lines."""

@dataclass(frozen=True, kw_only=True)
class Leaf(Root, Shared):
    rate: float = 1e-3
    """Another step size."""
    must: int
    kind: Literal["a", "b"] = "b"
    """Which kind."""
    sizes: tuple[int, ...] = field(default=(3, 4))
    names: list[str] = field(default_factory=list)
    lambda_: float | None = None
    _hidden: int = 0

class Better(dt.algorithms.PPO):
    extra: int = 7
    """More."""

class Own(dt.Algorithm):
    pass

class Placing(dt.strategies.Strategy):
    pass
'''


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    neighbor = "class Shared:\n    shared: bool = True\n    '''From next door.'''\n"
    (tmp_path / "neighbor.py").write_text(neighbor)
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path / "mine.py"
    sys.modules.pop("neighbor", None)


def test_options_are_read_with_type_default_and_meaning(source: Path) -> None:
    assert read(source, "Root") == {
        "rate": Option("rate", "float", "0.0003", "The step size, in two lines.")
    }


def test_inherited_options_come_first_and_may_be_overridden(source: Path) -> None:
    options = read(source, "Leaf")
    assert list(options) == ["rate", "shared", "must", "kind", "sizes", "names", "lambda_"]
    assert options["rate"].help == "Another step size (default 0.001)"
    assert options["shared"].meaning == "From next door."
    assert options["must"].help == "(required)"
    assert options["sizes"].default == "(3, 4)"
    assert options["names"].default == "…"


def test_flags_and_shapes(source: Path) -> None:
    options = read(source, "Leaf")
    assert options["lambda_"].flag == "--lambda"
    assert options["lambda_"].shape == "float"
    assert options["lambda_"].help == "(default none)"
    assert options["kind"].shape == "a|b"
    assert options["sizes"].shape == "int,…"


def test_an_algorithm_of_the_user_inherits_ours(source: Path) -> None:
    options = read(source, "Better")
    ppo = find("algorithm", "PPO")
    assert list(options) == [*read(ppo.file, ppo.name), "extra"]
    assert options["extra"] == Option("extra", "int", "7", "More.")


def test_the_bases_are_found_under_their_public_names(source: Path) -> None:
    assert list(read(source, "Own")) == ["num_envs"]
    assert list(read(source, "Placing")) == ["sides"]


def test_every_own_option_has_a_meaning() -> None:
    from dovetail.cli.reference import Kind, catalog

    kinds: tuple[Kind, ...] = ("algorithm", "strategy")
    for kind in kinds:
        for word in catalog(kind):
            own = find(kind, word)
            assert own.summary.endswith("."), word
            for option in read(own.file, own.name).values():
                assert option.meaning, f"{own.name}.{option.name}"


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("pp0", "There is no algorithm called 'pp0': did you mean 'ppo'?"),
        ("absent.py:X", "There is no file absent.py to take the algorithm from"),
        ("mine.py", "Say which class of mine.py is the algorithm, for instance mine.py:Placing."),
        ("mine.py:Leave", "mine.py defines no class 'Leave': did you mean 'Leaf'?"),
        ("broken.py:X", "broken.py, line 1, is not Python"),
        ("binary.py:X", "binary.py is not a text file in UTF-8"),
    ],
)
def test_an_unknown_algorithm_is_a_sentence(
    source: Path, monkeypatch: pytest.MonkeyPatch, word: str, sentence: str
) -> None:
    monkeypatch.chdir(source.parent)
    Path("broken.py").write_text("class X(:\n")
    Path("binary.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=sentence.replace("?", r"\?")):
        find("algorithm", word)


def test_a_class_is_loaded_from_its_file(source: Path) -> None:
    assert find("algorithm", f"{source}:Leaf").load().__name__ == "Leaf"


def test_a_file_that_fails_on_import_is_a_sentence(source: Path) -> None:
    source.write_text("import no_such_package\nclass A: ...\n")
    reference = find("algorithm", f"{source}:A")
    with pytest.raises(UserError, match=r"mine.py:1 cannot be loaded: ModuleNotFoundError"):
        reference.load()
