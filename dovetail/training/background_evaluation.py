"""Evaluation beside training: one background thread, the latest weights, never a stall."""

import threading
import time
from typing import Any, NamedTuple

from dovetail.evaluation.evaluate import Evaluation, Evaluator
from dovetail.training.signals import Stop

POLL_SECONDS = 0.1
"""How often a wait looks at whether somebody asked to stop."""


class Result(NamedTuple):
    """One evaluation that was asked for while training went on."""

    snapshot: Any
    """What was evaluated, as the caller gave it."""
    finished: float
    """`time.perf_counter()` when it was done."""
    evaluation: Evaluation


class BackgroundEvaluation:
    """Evaluates the weights it is given, one set at a time."""

    def __init__(self, evaluator: Evaluator | None) -> None:
        """Without an evaluator nothing is ever found."""
        self._evaluator = evaluator
        self._thread: threading.Thread | None = None
        self._results: list[Result] = []
        self._error: BaseException | None = None

    @property
    def silent(self) -> bool:
        """Whether it cannot evaluate."""
        return self._evaluator is None

    @property
    def busy(self) -> bool:
        """Whether an evaluation is under way."""
        return self._thread is not None and self._thread.is_alive()

    def ask(self, params: Any, snapshot: Any) -> None:
        """Starts an evaluation of a snapshot's `params`; does nothing while one is under way."""
        if self.busy or self._evaluator is None:
            return
        self._thread = threading.Thread(
            target=self._work, args=(params, snapshot), name="dovetail-evaluation", daemon=True
        )
        self._thread.start()

    def results(self) -> list[Result]:
        """Evaluations that have finished since the last call; raises one's error."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        found, self._results = self._results, []
        return found

    def wait(self, stop: Stop) -> None:
        """Waits for the evaluation under way, or cancels it if asked to stop."""
        while self._thread is not None and self._thread.is_alive():
            if stop and self._evaluator is not None:
                self._evaluator.cancel()
            self._thread.join(POLL_SECONDS)

    def evaluate(self, params: Any, stop: Stop) -> Evaluation | None:
        """An evaluation that is waited for; None if asked to stop meanwhile."""
        self.wait(stop)
        self.results()
        self.ask(params, None)
        self.wait(stop)
        try:
            found = self.results()
        except Exception:
            if not stop:  # environments in processes of their own may be stopped before us
                raise
            return None
        return found[0].evaluation if found else None

    def close(self) -> None:
        """Cancels what is under way and releases the environments."""
        if self._evaluator is not None:
            self._evaluator.close()
        if self._thread is not None:
            self._thread.join()

    def _work(self, params: Any, snapshot: Any) -> None:
        assert self._evaluator is not None
        try:
            evaluation = self._evaluator(params)
        except BaseException as error:
            self._error = error
            return
        if evaluation is not None:
            self._results.append(Result(snapshot, time.perf_counter(), evaluation))
