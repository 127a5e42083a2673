"""Recovery from failed workers, the same for every host.

Failed environments and failed workers in other processes are set up again, with exponential backoff
and a limit. A failure of the home side ends the run.
"""

import threading
import time
from collections.abc import Callable, Sequence

from dovetail.envs.member import ProcessFailed
from dovetail.errors import ServerGone, UserError, one_sentence
from dovetail.graph.ir import Graph
from dovetail.plan.ir import Plan
from dovetail.runtime.channel import Closed
from dovetail.runtime.heartbeat import STOP_SECONDS, Watch
from dovetail.runtime.interruption import Interruption
from dovetail.runtime.placement import home_of, steps_apart
from dovetail.runtime.remote import WorkerLost
from dovetail.runtime.worker import RunningWorker

RESTARTS = 5
"""Maximum number of recent restarts of a worker before its failure ends the run."""
CALM_SECONDS = 60.0
"""Seconds without a failure after which earlier restarts no longer count."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Backoff in seconds, doubled with each restart."""
GRACE = 3.0
"""Extra seconds for a worker, so that its environment processes report their own hang first."""
LOST = ", with what it held at the last checkpoint: what came later is lost"
"""Added to the message about a worker that held a part of the state."""


class WorkerFailed(UserError):
    """A worker failed; `__cause__` is its exception."""


class Restarts:
    """Counts the restarts of one worker and computes the backoff."""

    def __init__(self) -> None:
        self.total = 0
        self._recent = 0
        self._since = time.monotonic()

    def failed(self) -> None:
        """Records a failure; forgets earlier ones if the worker ran long enough."""
        if time.monotonic() - self._since > CALM_SECONDS:
            self._recent = 0

    def works(self) -> None:
        """Records a successful restart."""
        self._since = time.monotonic()

    def allowed(self) -> bool:
        """Counts a restart; False if there were too many recently."""
        self._recent += 1
        self.total += 1
        return self._recent <= RESTARTS

    def pause(self) -> float:
        """Seconds to wait before the restart."""
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self._recent - 1))


class StopRequest:
    """Whether the run was asked to stop, and since when.

    Signal handlers write it, so that it has no lock.
    """

    def __init__(self) -> None:
        self._since: float | None = None

    def __bool__(self) -> bool:
        return self._since is not None

    def ask(self) -> None:
        """Requests a stop."""
        self._since = self._since or time.monotonic()

    @property
    def overdue(self) -> bool:
        """Whether the updates in flight have had their time."""
        return self._since is not None and time.monotonic() - self._since > STOP_SECONDS


class Recovery:
    """Sets up workers, and again when they fail."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        set_up: Callable[[RunningWorker, int], Callable[[], None]],
        stopping: threading.Event,
        stop: StopRequest,
        tell: Callable[[str], None],
    ) -> None:
        """`set_up(worker, restarts)` starts to set up a worker and returns a function that waits
        for it. Once `stopping` is set or a `stop` is requested, no worker is restarted."""
        self._graph, self._plan = graph, plan
        self._set_up, self._stopping, self._stop, self._tell = set_up, stopping, stop, tell
        self._home = home_of(graph, plan)
        self._restarts = {worker.name: Restarts() for worker in plan.workers}

    @property
    def restarts(self) -> int:
        """Total number of restarts of all workers."""
        return sum(restarts.total for restarts in self._restarts.values())

    def begin(self, worker: RunningWorker) -> None:
        """Sets up a worker's environments; restarts a process killed in the meantime."""
        try:
            self._set_up(worker, 0)()
        except ProcessFailed as error:
            if error.traceback:  # the environment raised, and would again
                raise
            self.recover(worker, error)

    def wait_for(self, worker: RunningWorker, coming: Callable[[], None]) -> None:
        """Waits for a worker in another process; restarts it if it is lost in the meantime."""
        try:
            coming()
        except WorkerLost as error:
            self.recover(worker, error)

    def recover(self, worker: RunningWorker, error: Exception) -> None:
        """Sets up a worker again, or raises the error if that is not allowed."""
        restarts = self._restarts[worker.name]
        failed: Exception | None = error
        restarts.failed()
        worker.watch.doing("setting up its environments")
        while failed is not None:
            if isinstance(failed, ServerGone):  # retrying cannot help
                raise failed
            ending = self._stopping.is_set() or bool(self._stop)
            if not self._apart(worker) or ending or not restarts.allowed():
                raise failed
            pause = restarts.pause()
            again = "it is" if worker.away is not None else "its environments are"
            lost = LOST if worker.away is not None and self._holds_state(worker) else ""
            self._tell(
                f"{worker.name} failed; {again} set up again in {pause:.1f} s{lost} "
                f"(restart {restarts.total}): {one_sentence(failed)}"
            )
            # Sleeps for the pause, but ends with the run.
            if self._stopping.wait(pause):
                raise Closed("stopping")
            if self._stop:
                raise failed
            try:
                self._set_up(worker, restarts.total)()
                failed = None
                restarts.works()
            except Exception as again:
                failed = again

    def _apart(self, worker: RunningWorker) -> bool:
        """Whether a worker can be set up again without the state it held in memory."""
        if worker.name == self._home:
            return steps_apart(self._graph, self._plan, worker.name)
        acts = any(side in worker.copies for side in self._graph.acting)
        return acts or worker.away is not None

    def _holds_state(self, worker: RunningWorker) -> bool:
        """Whether a worker holds state that iterations change."""
        state = self._graph.state
        pairs = zip(state.inputs, state.outputs, strict=True)
        return any(old.side in worker.copies and old.id != new.id for old, new in pairs)


def refuse_hung(watches: Sequence[Watch], patience: float) -> None:
    """Raises `WorkerFailed` if a worker is stuck or all workers wait for each other."""
    limit = patience + GRACE
    # A single worker has no other worker to wait for.
    if len(watches) > 1 and all(watch.waits and watch.quiet() > limit for watch in watches):
        waits = "; ".join(f"{watch.worker} waits for {watch.awaited}" for watch in watches)
        raise WorkerFailed(f"Every worker waits for another: {waits}.")
    for watch in watches:
        if watch.stepping and watch.late(limit):
            raise _hung(watch)


def _hung(watch: Watch) -> WorkerFailed:
    return WorkerFailed(
        f"A worker hangs: {watch.complaint()}A thread cannot be ended from outside; "
        f"with --processes its environments can."
    )


def refuse_overdue(stop: StopRequest) -> None:
    """Raises `WorkerFailed` if the updates in flight have not ended long after a stop request."""
    if stop.overdue:
        raise WorkerFailed(
            f"The updates in flight did not end within {STOP_SECONDS:g} s of the request to stop."
        )


def end_hang(interruption: Interruption, watch: Watch, patience: float, stop: StopRequest) -> None:
    """Interrupts the environments of the only worker, in the main thread, if they hang or if a stop
    has waited for them long enough; called by another thread."""

    def hangs() -> bool:
        return stop.overdue or (watch.stepping and watch.late(patience + GRACE))

    if interruption.possible and not watch.waits and hangs():
        # Made here, not in the handler, whose own frames would be the innermost.
        error = WorkerFailed(
            f"A worker hangs: {watch.complaint()}Repair the environment, or allow it more seconds "
            "with --patience."
        )
        interruption.request(lambda: error if hangs() else None)
