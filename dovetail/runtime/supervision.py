"""Workers that fail, and what is done about it, whatever host they are on.

Environments and workers in other processes that fail are set up again, with a limit and a growing
pause; a home side that fails ends the run.
"""

import threading
import time
from collections.abc import Callable, Sequence

from dovetail.envs.member import ProcessFailed
from dovetail.errors import ServerGone, UserError
from dovetail.graph.ir import Graph
from dovetail.plan.ir import Plan
from dovetail.runtime.channel import Closed
from dovetail.runtime.heartbeat import Watch
from dovetail.runtime.placement import home_of, steps_apart
from dovetail.runtime.remote import WorkerLost
from dovetail.runtime.worker import RunningWorker

RESTARTS = 5
"""How often a worker is set up again before its failure ends the run."""
CALM_SECONDS = 60.0
"""After so long without a failure a worker's restarts are forgotten."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds before a restart: doubled from one to the next."""
GRACE = 3.0
"""Seconds that a worker has more than its environments' processes to say what is wrong."""
LOST = ", with what it held at the last checkpoint: what came later is lost"
"""What is told of a worker that held a part of the state."""


class WorkerFailed(UserError):
    """A worker raised something; `__cause__` is what."""


class Restarts:
    """How often something was set up again, and how long to pause before the next time."""

    def __init__(self) -> None:
        self.total = 0
        self._recent = 0
        self._since = time.monotonic()

    def failed(self) -> None:
        """What had worked failed; earlier failures are forgotten if that was long ago."""
        if time.monotonic() - self._since > CALM_SECONDS:
            self._recent = 0

    def works(self) -> None:
        """It was set up again."""
        self._since = time.monotonic()

    def allowed(self) -> bool:
        """Counts a restart; False if there were too many."""
        self._recent += 1
        self.total += 1
        return self._recent <= RESTARTS

    def pause(self) -> float:
        """Seconds to wait."""
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self._recent - 1))


class Recovery:
    """Sets workers up, and again when they fail."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        set_up: Callable[[RunningWorker, int], Callable[[], None]],
        stopping: threading.Event,
        tell: Callable[[str], None],
    ) -> None:
        """`set_up` begins to set a worker up, by the number of its restarts so far; what it returns
        waits until that is done. Once `stopping` is set, nobody is set up again."""
        self._graph, self._plan = graph, plan
        self._set_up, self._stopping, self._tell = set_up, stopping, tell
        self._home = home_of(graph, plan)
        self._restarts = {worker.name: Restarts() for worker in plan.workers}

    @property
    def restarts(self) -> int:
        """Those of all workers, so far."""
        return sum(restarts.total for restarts in self._restarts.values())

    def begin(self, worker: RunningWorker) -> None:
        """Sets a worker's environments; a process that was killed meanwhile is started again."""
        try:
            self._set_up(worker, 0)()
        except ProcessFailed as error:
            if error.traceback:  # it raised, and would again
                raise
            self.recover(worker, error)

    def wait_for(self, worker: RunningWorker, coming: Callable[[], None]) -> None:
        """Waits until a worker elsewhere is there; one that is lost meanwhile is started again."""
        try:
            coming()
        except WorkerLost as error:
            self.recover(worker, error)

    def recover(self, worker: RunningWorker, error: Exception) -> None:
        """Sets a worker up again, or raises the error for good."""
        restarts = self._restarts[worker.name]
        failed: Exception | None = error
        restarts.failed()
        worker.watch.doing("setting up its environments")
        while failed is not None:
            if isinstance(failed, ServerGone):  # whoever asks it again hears the same
                raise failed
            if not self._apart(worker) or self._stopping.is_set() or not restarts.allowed():
                raise failed
            pause = restarts.pause()
            again = "it is" if worker.away is not None else "its environments are"
            lost = LOST if worker.away is not None and self._holds_state(worker) else ""
            self._tell(
                f"{worker.name} failed; {again} set up again in {pause:.1f} s{lost} "
                f"(restart {restarts.total}): {sentence(failed)}"
            )
            if self._stopping.wait(pause):
                raise Closed("stopping")
            try:
                self._set_up(worker, restarts.total)()
                failed = None
                restarts.works()
            except Exception as again:
                failed = again

    def _apart(self, worker: RunningWorker) -> bool:
        """Whether what failed can be set up again without the state that it held."""
        if worker.name == self._home:
            return steps_apart(self._graph, self._plan, worker.name)
        acts = any(side in worker.copies for side in self._graph.acting)
        return acts or worker.away is not None

    def _holds_state(self, worker: RunningWorker) -> bool:
        """Whether a worker holds a part of the state that changes."""
        state = self._graph.state
        pairs = zip(state.inputs, state.outputs, strict=True)
        return any(old.side in worker.copies and old.id != new.id for old, new in pairs)


def refuse_hung(watches: Sequence[Watch], patience: float) -> None:
    """Raises that a worker hangs, or that each waits for another."""
    limit = patience + GRACE
    if len(watches) > 1 and all(watch.waits and watch.quiet() > limit for watch in watches):
        waits = "; ".join(f"{watch.worker} waits for {watch.awaited}" for watch in watches)
        raise WorkerFailed(f"Every worker waits for another: {waits}.")
    for watch in watches:
        if watch.stepping and watch.late(limit):
            raise WorkerFailed(
                f"A worker hangs: {watch.complaint()}A thread cannot be ended from outside; "
                f"with --processes its environments can."
            )


def sentence(error: BaseException) -> str:
    """What an error says."""
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {error}"
