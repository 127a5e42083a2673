from pathlib import Path
from typing import Any, Literal

import pytest

from dovetail.cli.values import convert, describe
from dovetail.errors import UserError


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("3", int, 3),
        ("-3", int, -3),
        ("200_000", int, 200_000),
        ("2e5", int, 200_000),
        (8.0, int, 8),
        ("3e-4", float, 3e-4),
        (1, float, 1.0),
        ("-inf", float, float("-inf")),
        ("true", bool, True),
        ("False", bool, False),
        (True, bool, True),
        ("tanh", str, "tanh"),
        ("a/b", Path, Path("a/b")),
        ("none", float | None, None),
        ("0.01", float | None, 0.01),
        ("none", str | None, None),
        ("x", str | None, "x"),
        ("64,64", tuple[int, ...], (64, 64)),
        ([32, 16], tuple[int, ...], (32, 16)),
        ("", tuple[int, ...], ()),
        ("1,a", tuple[int, str], (1, "a")),
        ("0.5,1", list[float], [0.5, 1.0]),
        ("live", Literal["live", "none"], "live"),
        ("2", Literal[1, 2], 2),
    ],
)
def test_a_value_becomes_its_type(value: object, kind: Any, expected: object) -> None:
    converted = convert(value, kind, "--x")
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("value", "kind", "sentence"),
    [
        ("three", int, "--x wants a whole number, not 'three'."),
        ("2.5", int, "--x wants a whole number, not '2.5'."),
        ("inf", int, "--x wants a whole number, not 'inf'."),
        (True, int, "--x wants a whole number, not True."),
        ("nan", float, "--x wants a number, not 'nan'."),
        ("yes", bool, "--x wants true or false, not 'yes'."),
        (3, str, "--x wants text, not 3."),
        ("loud", Literal["live", "none"], "--x wants one of live, none, not 'loud'."),
        ("a", float | None, "--x wants a number or none, not 'a'."),
        ("1,b", tuple[int, ...], "--x wants a comma-separated list (a whole number), not '1,b'."),
        (
            "1,2,3",
            tuple[int, int],
            "--x wants a comma-separated list (a whole number), not '1,2,3'.",
        ),
        (5, tuple[int, ...], "--x wants a comma-separated list (a whole number), not 5."),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(
    value: object, kind: Any, sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        convert(value, kind, "--x")
    assert str(caught.value) == sentence


def test_a_type_that_has_no_text_says_so() -> None:
    assert describe(dict[str, int]) == "a value that only Python can give"
