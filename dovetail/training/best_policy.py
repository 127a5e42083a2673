"""Keeps the exported policies of a run: the best so far, by its evaluations, and the last."""

import math
from collections.abc import Callable
from typing import Any, Protocol

from dovetail.algorithm import Algorithm, Params
from dovetail.errors import UserError
from dovetail.evaluation.evaluate import Evaluation
from dovetail.evaluation.export import Origin, PolicyExporter
from dovetail.evaluation.kept import BEST, LAST, has_best, read_best
from dovetail.run.folder import Run


class Progressed(Protocol):
    """How far a policy was trained."""

    @property
    def updates(self) -> int:
        """Number of learner updates."""
        ...

    @property
    def env_steps(self) -> int:
        """Number of environment steps."""
        ...


class BestPolicy:
    """Writes the policies of a run into policy/best and policy/last."""

    def __init__(self, run: Run, algorithm: Algorithm, tell: Callable[[str], None]) -> None:
        """`algorithm` is bound. A resumed run goes on with the best policy of its earlier starts;
        one that cannot be read is replaced."""
        self._run, self._tell = run, tell
        self._exporter = PolicyExporter(algorithm)
        self._best: Origin | None = None
        if has_best(run):
            try:
                self._best = read_best(run).origin
            except UserError as error:
                tell(f"The best policy so far is lost: {error}")

    def offer(self, params: Params, reached: Progressed, evaluation: Evaluation) -> None:
        """Keeps an evaluated policy if its mean return is higher than any before.

        A policy that cannot be written is reported, and training goes on.
        """
        mean = evaluation.mean
        before = self._best.mean_return if self._best is not None else None
        if math.isnan(mean) or (before is not None and mean <= before):
            return
        origin = _origin(reached, evaluation)
        try:
            self._exporter.export(params, origin).write(self._run.path / BEST)
        except Exception as error:  # exporting traces user code, which may raise anything
            self._tell(f"The best policy was not kept: {error}")
            return
        self._best = origin

    def write_last(
        self, params: Params, reached: Progressed, evaluation: Evaluation | None
    ) -> None:
        """Writes the policy with which the run ends."""
        origin = _origin(reached, evaluation)
        self._exporter.export(params, origin).write(self._run.path / LAST)

    def summary(self) -> dict[str, Any]:
        """The lines of the run's summary: the best return, its step, and its folder in the run."""
        best = self._best
        return {
            "best_return": None if best is None else best.mean_return,
            "best_step": None if best is None else best.env_steps,
            "best_policy": None if best is None else BEST.as_posix(),
        }


def _origin(reached: Progressed, evaluation: Evaluation | None) -> Origin:
    if evaluation is None:
        return Origin(reached.env_steps, reached.updates)
    mean = evaluation.mean if math.isfinite(evaluation.mean) else None
    return Origin(reached.env_steps, reached.updates, mean, len(evaluation.returns))
