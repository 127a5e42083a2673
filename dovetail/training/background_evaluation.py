"""Evaluates the latest weights in a background thread, without stalling training."""

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from dovetail.evaluation.evaluate import Evaluation, Evaluator
from dovetail.training.signals import Stop

Keep = Callable[[Any, Any, Evaluation], None]
"""(parameters, snapshot, evaluation) → nothing."""

POLL_SECONDS = 0.1
"""Interval at which a wait checks for a stop request."""
CLOSE_SECONDS = 5.0
"""Time limit for a cancelled evaluation to end; it ends after the step that it is at."""


class Result(NamedTuple):
    """One evaluation requested during training."""

    snapshot: Any
    """The evaluated snapshot, as passed to `ask`."""
    finished: float
    """`time.perf_counter()` when it finished."""
    evaluation: Evaluation


class BackgroundEvaluation:
    """Runs one evaluation at a time in a background thread.

    If an environment hangs, the thread is abandoned and the run goes on without evaluations.
    """

    def __init__(
        self,
        evaluator: Evaluator | None,
        keep: Keep | None = None,
        patience: float = math.inf,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Without an evaluator there are never any results. `keep` is called with every result
        before `results` returns it, in the background thread. A step or reset of its environments
        that takes more than `patience` seconds hangs."""
        self._evaluator, self._patience, self._tell = evaluator, patience, tell
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._results: list[Result] = []
        self._error: BaseException | None = None

    @property
    def silent(self) -> bool:
        """Whether there is no evaluator."""
        return self._evaluator is None

    @property
    def busy(self) -> bool:
        """Whether an evaluation is running."""
        self._give_up_if(self._patience)
        return self._thread is not None and self._thread.is_alive()

    def _give_up_if(self, limit: float) -> None:
        """Abandons an evaluation whose environments have been in one call for `limit` seconds."""
        thread, evaluator = self._thread, self._evaluator
        if thread is None or evaluator is None or evaluator.calling_seconds() <= limit:
            return
        frame = sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage]
        stack = traceback.format_stack(frame)[-4:] if frame is not None else []
        self._tell(
            f"The evaluation hangs: its environment has been in one call for "
            f"{evaluator.calling_seconds():.0f} s; the run goes on without evaluations. It stands "
            f"at\n{''.join(stack)}"
        )
        evaluator.cancel()
        self._evaluator = self._thread = None

    def ask(self, params: Any, snapshot: Any) -> None:
        """Starts an evaluation of a snapshot's `params`; does nothing while one is running."""
        if self.busy or self._evaluator is None:
            return
        self._thread = threading.Thread(
            target=self._work, args=(params, snapshot), name="dovetail-evaluation", daemon=True
        )
        self._thread.start()

    def results(self) -> list[Result]:
        """Returns the evaluations finished since the last call; raises if one failed."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        found, self._results = self._results, []
        return found

    def wait(self, stop: Stop) -> None:
        """Waits for the running evaluation; cancels it if a stop is requested."""
        while self.busy:
            if stop and self._evaluator is not None:
                self._evaluator.cancel()
                self._give_up_if(CLOSE_SECONDS)
            if self._thread is not None:
                self._thread.join(POLL_SECONDS)

    def evaluate(self, params: Any, stop: Stop) -> Evaluation | None:
        """Evaluates `params` and waits; None if a stop is requested meanwhile."""
        self.wait(stop)
        self.results()
        self.ask(params, None)
        self.wait(stop)
        try:
            found = self.results()
        except Exception:
            if not stop:  # Ctrl-C also reaches environment processes, which may die before us
                raise
            return None
        return found[0].evaluation if found else None

    def close(self) -> None:
        """Cancels a running evaluation and releases the environments."""
        evaluator = self._evaluator
        if evaluator is not None:
            evaluator.cancel()
        while (thread := self._thread) is not None and thread.is_alive():
            self._give_up_if(CLOSE_SECONDS)
            thread.join(POLL_SECONDS)
        if self._evaluator is not None:  # otherwise its environments are still in a call
            self._evaluator.close()

    def _work(self, params: Any, snapshot: Any) -> None:
        assert self._evaluator is not None
        try:
            evaluation = self._evaluator(params)
            if evaluation is not None and self._keep is not None and snapshot is not None:
                self._keep(params, snapshot, evaluation)
        except BaseException as error:
            self._error = error
            return
        if evaluation is not None:
            self._results.append(Result(snapshot, time.perf_counter(), evaluation))
