"""Finds a metric by its kind among the columns of metrics.csv."""

from collections.abc import Iterable

LOSSES = ("loss", "critic_loss", "actor_loss")
"""Columns that may hold the loss of an algorithm, the most telling first."""


def main_loss(columns: Iterable[str]) -> str | None:
    """The column that shows best how learning goes without returns; None if there is no loss."""
    names = list(columns)
    others = [name for name in names if name.endswith("_loss")]
    return next((name for name in (*LOSSES, *others) if name in names), None)
