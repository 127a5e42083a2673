"""Evaluation beside training: one background thread, the latest weights, never a stall."""

import threading
import time
from typing import Any, NamedTuple

from dovetail.evaluation import Evaluation, Evaluator


class Result(NamedTuple):
    """One evaluation that was asked for while training went on."""

    snapshot: Any
    """What was evaluated, as the caller gave it."""
    finished: float
    """`time.perf_counter()` when it was done."""
    evaluation: Evaluation


class BackgroundEvaluation:
    """Evaluates the weights it is given, one set at a time."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._thread: threading.Thread | None = None
        self._results: list[Result] = []
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether an evaluation is under way."""
        return self._thread is not None and self._thread.is_alive()

    def ask(self, params: Any, snapshot: Any) -> None:
        """Starts an evaluation of a snapshot's `params`; does nothing while one is under way."""
        if self.busy:
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

    def wait(self) -> None:
        """Waits for the evaluation under way; its length is bounded by the evaluator's limits."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Cancels what is under way and releases the environments."""
        self._evaluator.close()
        self.wait()

    def _work(self, params: Any, snapshot: Any) -> None:
        try:
            evaluation = self._evaluator(params)
        except BaseException as error:
            self._error = error
            return
        if evaluation is not None:
            self._results.append(Result(snapshot, time.perf_counter(), evaluation))
