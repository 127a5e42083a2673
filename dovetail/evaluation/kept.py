"""The policies that a run keeps: the best by its evaluations, and the last."""

from pathlib import Path
from typing import Literal

from dovetail.errors import UserError
from dovetail.evaluation.export import RECORD_FILE, Exported, read_exported
from dovetail.run.folder import Run

BEST, LAST = Path("policy/best"), Path("policy/last")
"""Their folders in a run."""

Which = Literal["best", "last"] | int
"""A policy of a run: the best one, the last one, or that of the checkpoint with this number."""


def check_which(which: object) -> None:
    """Raises unless `which` names a policy of a run."""
    if which not in (None, "best", "last") and not isinstance(which, int):
        raise UserError(
            f"A run has no policy {which!r}: give best, last, or the number of a checkpoint."
        )


def has_best(run: Run) -> bool:
    """Whether the run has kept a best policy."""
    return (run.path / BEST / RECORD_FILE).is_file()


def read_best(run: Run) -> Exported:
    """The run's best policy; raises if there is none."""
    if not has_best(run):
        raise UserError(
            f"{run.path} has no best policy, since none of its policies was evaluated: take the "
            "last one."
        )
    return read_exported(run.path / BEST)


def read_kept(run: Run) -> Exported:
    """The best policy of a finished run; the last if none was evaluated."""
    return read_best(run) if has_best(run) else read_exported(run.path / LAST)
