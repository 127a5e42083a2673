"""The ranges that options may have, checked with one sentence each."""

from collections.abc import Callable, Iterable
from typing import Any

from dovetail.errors import check_option
from dovetail.networks import layers


def check_options(
    options: object,
    *,
    positive: Iterable[str] = (),
    non_negative: Iterable[str] = (),
    at_least_one: Iterable[str] = (),
    fraction: Iterable[str] = (),
    inner_fraction: Iterable[str] = (),
) -> None:
    """Refuses an option of `options` that is out of its range.

    `positive` are numbers above 0, `fraction` numbers from 0 to 1, `inner_fraction` numbers
    strictly between the two.
    """
    ranges: tuple[tuple[Iterable[str], Callable[[float], bool], str], ...] = (
        (positive, lambda x: x > 0, "more than 0"),
        (non_negative, lambda x: x >= 0, "0 or more"),
        (at_least_one, lambda x: x >= 1, "1 or more"),
        (fraction, lambda x: 0 <= x <= 1, "0 to 1"),
        (inner_fraction, lambda x: 0 < x < 1, "more than 0 and less than 1"),
    )
    for names, fits, wanted in ranges:
        for name in names:
            value = getattr(options, name)
            check_option(name, value, isinstance(value, int | float) and fits(value), wanted)


def check_network(hidden: object, activation: str) -> None:
    """Refuses hidden layers without units, and an activation that nobody knows."""
    sizes: list[Any] = list(hidden) if isinstance(hidden, tuple | list) else [None]
    listed = all(isinstance(units, int) for units in sizes)
    check_option("hidden_sizes", hidden, listed, "a tuple of sizes, such as (64, 64)")
    check_option("hidden_sizes", hidden, all(units > 0 for units in sizes), "sizes above 0")
    layers.activation(activation)
