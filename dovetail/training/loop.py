"""The training loop: dispatches iterations and processes each report while the next ones run.

At most one dispatch is in flight. Meanwhile the driver thread handles metrics, checkpoints and
evaluations of the previous one. A state is saved only after its metrics proved finite.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dovetail.data.rounds import Feed
from dovetail.evaluation.evaluate import Evaluation
from dovetail.replay.data import without_data
from dovetail.replay.replay import with_own_replay
from dovetail.run.checkpoint import Checkpoints, UnwrittenCheckpoint
from dovetail.run.settings import Settings
from dovetail.runtime.interface import Runtime
from dovetail.runtime.report import Pending, Report
from dovetail.telemetry.metric_names import main_loss
from dovetail.telemetry.progress import Progress
from dovetail.telemetry.sinks import MetricsWriter
from dovetail.telemetry.spans import COMPUTE, WAIT
from dovetail.telemetry.timeline import Timeline
from dovetail.training.background_evaluation import BackgroundEvaluation
from dovetail.training.callbacks import EventName
from dovetail.training.divergence import refuse_nonfinite
from dovetail.training.evaluation_schedule import EvaluationSchedule
from dovetail.training.recording import Recording
from dovetail.training.recurrence import Recurrence
from dovetail.training.rows import (
    PendingRow,
    RecentEpisodes,
    columns,
    info_text,
    row_interval,
    unseen_text,
)
from dovetail.training.signals import Stop

REPORT_SECONDS = 0.25
"""Target duration of a dispatch: short enough to stop promptly, long enough that its overhead is
negligible."""

DRIVER = "driver"
"""The name of the driver thread among the workers of the timeline."""

Announce = Callable[[EventName, int, int, Mapping[str, float]], bool]
"""Tells the callbacks of an event: (name, steps, updates, metrics) → whether to stop the run."""


@dataclass
class Reached:
    """The progress of a run."""

    updates: int = 0
    env_steps: int = 0
    """Environment steps, plus the gradient steps of offline updates."""
    seconds: float = 0.0
    """Wall time of earlier starts, if resumed."""
    time_to_threshold: float | None = None
    """Wall seconds until an evaluation reached the threshold; None if none has."""


@dataclass(frozen=True)
class Snapshot:
    """The states between two iterations, all of whose metrics were finite."""

    state: Callable[..., Any]
    """Returns the learner's state; `state(replay=False)` may omit the contents of the replay."""
    actor: Callable[[], Any]
    """Assembles the actors' state."""
    updates: int
    env_steps: int


class Loop:
    """Drives a runtime until its number of steps, its goal, or a stop signal.

    Its methods are called from the driver thread.
    """

    def __init__(
        self,
        runtime: Runtime,
        start: Snapshot,
        reached: Reached,
        settings: Settings,
        *,
        threshold: float | None,
        acting: Any,
        began: float,
        watchers: Sequence[Callable[[dict[str, float], Timeline], None]] = (),
        feed: Feed | None = None,
        recording: Recording | None = None,
        announce: Announce | None = None,
        info: Sequence[str] = (),
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`watchers` are called with every report's row of metrics and the timeline of all spans;
        `feed` supplies recorded steps to learn from; `recording` receives the steps of every
        report; `acting` is `Algorithm.acting`; `announce` tells the callbacks of an event; `info`
        names the logged values of the environments' `info`; `tell` receives messages for the
        user."""
        self._tell = tell
        self._unsaved: int | None = None
        """The number of updates when checkpoints could no longer be written; None if they can."""
        self._feed, self._recording = feed, recording
        self.runtime = runtime
        self._watchers = watchers
        self.reached = reached
        self.settings = settings
        self.threshold = threshold
        self.training_seconds = self._earlier = 0.0
        self.timeline = Timeline()
        self.last_report = time.time()
        """Arrival time of the last report, in seconds since the epoch."""
        self.evaluation: Evaluation | None = None
        self._evaluated = -1
        """The number of updates of the evaluated state; -1 before the first."""
        self.good = start
        self._acting = acting
        self._began = began
        self._start_steps = self._steps_taken = reached.env_steps
        self._recent, self._row = RecentEpisodes(info), PendingRow()
        self._announce = announce
        self._halted = False
        """Whether a callback stopped the run."""
        self._speed: deque[tuple[float, int]] = deque(maxlen=12)
        self._chunk = 1
        self._solved = False
        self._ahead: Pending | None = None
        """The dispatch in flight."""
        self._schedule(time.perf_counter(), reached.env_steps)

    def run(
        self,
        steps: int,
        stop: Stop,
        recorder: MetricsWriter,
        progress: Progress,
        checkpoints: Checkpoints,
        evaluations: BackgroundEvaluation,
        meta: dict[str, Any],
    ) -> None:
        """Runs until the run has taken `steps` steps, reached its goal, or `stop` is set."""
        graph, before = self.runtime.graph, self.reached.updates
        per_iteration = graph.steps_per_iteration
        # The number of updates at the end: the remaining steps, rounded up to whole iterations.
        total = before + max(-(-(steps - self.reached.env_steps) // per_iteration), 0)
        # Earlier phases may have taken another number of steps per update.
        begun = self.reached.env_steps - before * per_iteration
        self._meta = meta
        started = last_report = time.perf_counter()
        self._schedule(started, steps)
        dispatched = done = self.reached.updates
        self._speed.append((started, self.reached.env_steps))
        while True:
            # Wait before dispatching again: a program queued behind a running one could hold the
            # threads that the running one needs.
            report = self._wait()
            # Take the times now: the next dispatch may run in this thread.
            arrived, spent = time.perf_counter(), self.runtime.seconds
            done += 0 if report is None else report.iterations
            taken = begun + done * per_iteration
            pauses = report is not None and self._pauses(arrived, taken)
            if dispatched < total and not stop and not pauses:
                count = self._until_due(begun + dispatched * per_iteration, per_iteration)
                count = self._fed(min(self._chunk, total - dispatched, count), dispatched)
                self._ahead = self.runtime.advance(count)
                dispatched += count
            if report is None and self._ahead is None:
                break
            if report is not None:
                self._record(report)
                row, averaged = self._digest(report, done, taken, arrived)
                self._adapt(report.iterations, arrived - last_report)
                last_report = arrived
                self.training_seconds = self._earlier + arrived - started
                self._evaluate(evaluations, stop, recorder, row)
                self._show(progress, row, spent)
                self._row.add(row, averaged, report.iterations)
                due = self._rows.due(arrived, taken) or "eval_return" in row
                if due and done < total and not self.over:  # the last row waits for an evaluation
                    self.write_row(recorder)
                if self._checkpoints.due(arrived, taken):
                    self._save_if_possible(checkpoints)
                    self._checkpoints.restart(time.perf_counter(), taken)
                self.timeline.note(DRIVER, COMPUTE, "reports", arrived)
                for watch in self._watchers:
                    watch(row, self.timeline)
                self._tell_event("report", row)
                if self.over:  # drop the iterations after the state that the run ends with
                    break
        self._show_weights(recorder)
        if self._recent.unseen and not graph.offline_steps:
            progress.message(unseen_text(self._recent.unseen))

    def _schedule(self, now: float, total: int) -> None:
        """Begins the intervals of rows, evaluations and checkpoints of `total` steps."""
        settings, steps = self.settings, self.reached.env_steps
        self._rows = Recurrence(row_interval(total), now, steps)
        self._evaluations = EvaluationSchedule(settings, now, steps)
        self._checkpoints = Recurrence(settings.checkpoint_interval, now, steps)

    def _pauses(self, now: float, steps: int) -> bool:
        """Whether nothing may run beside what is due: a checkpoint, or an evaluation by steps."""
        evaluates = self._evaluations.by_steps and self._evaluations.due(now, steps)
        return evaluates or self._checkpoints.due(now, steps)

    def _until_due(self, steps: int, per_iteration: int) -> int:
        """The number of iterations until something is due by steps; at least one."""
        due = (self._rows, self._evaluations, self._checkpoints)
        left = min(one.left(steps) for one in due)
        return -(-int(left) // per_iteration)

    def write_row(self, recorder: MetricsWriter, more: Mapping[str, float] | None = None) -> None:
        """Records the row that has been collected, if any, with `more` columns if given."""
        if more and not self._row:
            self._row.add(self._place(), {}, 0)
        row = {**self._row.take(), **(more or {})}
        if row:
            recorder.record(int(row["env_steps"]), row)
            self._rows.restart(0.0, int(row["env_steps"]))

    def _wait(self) -> Report | None:
        """Waits for the dispatch in flight and returns its report; None if there is none."""
        ahead, self._ahead = self._ahead, None
        return None if ahead is None else ahead.wait()

    def _record(self, report: Report) -> None:
        """Records the steps of a report, if the run is recorded."""
        if self._recording is not None:
            began = time.perf_counter()
            self._recording.add(report)
            self.timeline.note(DRIVER, COMPUTE, "recording", began)

    def _fed(self, count: int, updates: int) -> int:
        """Loads the recorded steps that are due; returns how many of `count` updates they cover."""
        if self._feed is None:
            return count
        if self._feed.due(updates):
            began = time.perf_counter()
            self.runtime.refill(jax.tree.leaves(self._feed.take(updates)))
            self.timeline.note(DRIVER, WAIT, "recorded steps", began)
        return min(count, self._feed.left(updates))

    def _show_weights(self, recorder: MetricsWriter) -> None:
        """Passes the acting parameters to the recorder, if histograms are enabled."""
        if self.settings.histograms:
            leaves, _ = jax.tree.flatten_with_path(self._acting(self.good.state(replay=False)))
            named = {jax.tree_util.keystr(k, simple=True, separator="/"): x for k, x in leaves}
            recorder.record_arrays(self.good.env_steps, named)

    def ends(self, evaluations: BackgroundEvaluation, stop: Stop) -> bool:
        """Whether the run is over: waits for the running evaluation and checks the goal."""
        evaluations.wait(stop)
        found: dict[str, float] = {}
        place = self._place()  # before a goal that was reached sets it back
        self._collect(evaluations, found)
        if found:
            self._row.add(found if self._row else place | found, {}, 0)
        return self.over or bool(stop)

    @property
    def judged(self) -> bool:
        """Whether the state that the run ends with has been evaluated."""
        return self._solved or self._evaluated == self.good.updates

    def _place(self) -> dict[str, float]:
        """The first columns of a row at the end of what is done."""
        steps, updates = self.reached.env_steps, self.reached.updates
        return {"time_s": self.elapsed, "env_steps": float(steps), "updates": float(updates)}

    def go_on_after(self, before: "Loop") -> None:
        """Carries over the measurements of the previous phase's loop."""
        self.timeline, self.evaluation = before.timeline, before.evaluation
        self.training_seconds = self._earlier = before.training_seconds
        self._start_steps = before._start_steps

    def _save_if_possible(self, checkpoints: Checkpoints) -> None:
        """Starts a checkpoint; while there is no room for one, training goes on without."""
        try:
            if self._unsaved is not None and (checkpoints.latest() or 0) >= self._unsaved:
                self._tell("Checkpoints are written again.")
                self._unsaved = None
            self.save(checkpoints)
            self.saved(checkpoints)
        except UnwrittenCheckpoint as error:  # this one or an earlier one; the next may succeed
            if self._unsaved is None:
                self._tell(f"{error} Training goes on, and tries again with the next checkpoint.")
                self._unsaved = self.reached.updates
            self.save(checkpoints)

    def save(self, checkpoints: Checkpoints) -> None:
        """Starts a checkpoint of the last good state."""
        with contextlib.suppress(Exception):  # iterations after the good state are dropped
            report = self._wait()  # the replay is updated in place: nothing may run while saving
            if report is not None:
                self._record(report)
        state = with_own_replay(without_data(self.good.state()))
        acted = not self.runtime.graph.offline_steps
        tree = {"state": state, "actor": self.good.actor() if acted else ()}
        meta = {
            **self._meta,
            "updates": self.reached.updates,
            "env_steps": self.reached.env_steps,
            "seconds": self.elapsed,
            "time_to_threshold": self.reached.time_to_threshold,
        }
        began = time.perf_counter()
        checkpoints.save(self.reached.updates, tree, meta)
        self.timeline.note(DRIVER, COMPUTE, "checkpoint", began)

    @property
    def elapsed(self) -> float:
        """Wall seconds of the run so far, including earlier starts."""
        return self.reached.seconds + time.perf_counter() - self._began

    @property
    def steps_per_s(self) -> float:
        """Environment steps per second of this start, excluding compilation."""
        steps = self._steps_taken - self._start_steps
        return steps / self.training_seconds if self.training_seconds > 0 else math.nan

    @property
    def solved(self) -> bool:
        """Whether the goal was reached."""
        return self._solved

    @property
    def eval_return(self) -> float | None:
        """Mean return of the last evaluation; None before the first."""
        return None if self.evaluation is None else self.evaluation.mean

    @property
    def over(self) -> bool:
        """Whether the goal was reached, or a callback stopped the run."""
        return self._solved or self._halted

    def _digest(
        self, report: Report, updates: int, env_steps: int, arrived: float
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Checks a report; returns (its row of metrics, those that are means over its updates)."""
        snapshot = Snapshot(report.state, report.actor, updates, env_steps)
        means = {
            name: np.asarray(total) / report.iterations for name, total in report.metrics.items()
        }
        actor = None if self.settings.seeds > 1 else snapshot.actor
        refuse_nonfinite(means, report.finite, (self.good.updates + 1, updates), actor)
        self.last_report = time.time()
        self.timeline.add(report.spans)
        self.timeline.dropped = report.dropped_spans
        self.timeline.measures = dict(report.measures)
        self.good = snapshot
        self.reached.updates = snapshot.updates
        self.reached.env_steps = self._steps_taken = snapshot.env_steps
        row = self._place() | {"time_s": self.reached.seconds + arrived - self._began}
        averaged = columns(means)
        if report.episodes:
            averaged |= columns(self._recent.add(report.episodes))
            number = np.asarray(report.episodes[0]).sum(axis=-1)
            row |= columns(self._recent.means() | {"episodes": number})
        row |= averaged | report.measures
        self._speed.append((arrived, self.reached.env_steps))
        before, steps = self._speed[0]
        row["steps_per_s"] = (self.reached.env_steps - steps) / max(arrived - before, 1e-9)
        return row, averaged

    def recent_return(self) -> float | None:
        """Mean training return over about the last hundred episodes; None without any."""
        return self._recent.mean_return()

    def _evaluate(
        self,
        evaluations: BackgroundEvaluation,
        stop: Stop,
        recorder: MetricsWriter,
        row: dict[str, float],
    ) -> None:
        """Adds finished evaluations to `row` and starts one if it is due.

        One that is due by steps is waited for, so that it belongs to the row and a run can be
        repeated exactly. Others run beside training.
        """
        self._collect(evaluations, row)
        now, steps = time.perf_counter(), self.reached.env_steps
        if self.over or evaluations.busy:
            return
        if not self._evaluations.wanted(now, steps, self.recent_return()):
            return
        evaluations.ask(self._acting(self.good.state(replay=False)), self.good)
        self._evaluations.asked(now, steps)
        self._show_weights(recorder)
        if self._evaluations.by_steps:
            evaluations.wait(stop)
            self._collect(evaluations, row)

    def _collect(self, evaluations: BackgroundEvaluation, row: dict[str, float]) -> None:
        for result in evaluations.results():
            self.evaluation, snapshot = result.evaluation, result.snapshot
            self._evaluated = snapshot.updates
            self._evaluations.answered(result.finished)
            row["eval_return"] = result.evaluation.mean
            self._tell_event("evaluation", {}, snapshot)
            if self.threshold is not None and result.evaluation.mean >= self.threshold:
                if self.reached.time_to_threshold is None:
                    before = self.reached.seconds - self._began
                    self.reached.time_to_threshold = before + result.finished
                if self.settings.until is not None:
                    self._solved = True
                    self._settle(snapshot)
                    return

    def saved(self, checkpoints: Checkpoints) -> None:
        """Tells the callbacks of a checkpoint once it is written."""
        if self._announce is not None:
            checkpoints.wait()
            self._tell_event("checkpoint", {})

    def _tell_event(
        self, name: EventName, metrics: Mapping[str, float], at: Snapshot | None = None
    ) -> None:
        """Tells the callbacks of an event, by default at the last good state."""
        if self._announce is not None:
            snapshot = self.good if at is None else at
            self._halted |= self._announce(name, snapshot.env_steps, snapshot.updates, metrics)

    def _settle(self, snapshot: Snapshot) -> None:
        """Ends the run with the state that reached the goal."""
        self.good = snapshot
        self.reached.updates = snapshot.updates
        self.reached.env_steps = snapshot.env_steps

    def _adapt(self, iterations: int, seconds: float) -> None:
        """Adapts the chunk to `REPORT_SECONDS` per report, at most doubling it at a time."""
        ideal = iterations * REPORT_SECONDS / max(seconds, 1e-6)
        self._chunk = max(1, min(round(ideal), 2 * self._chunk))

    def _show(self, progress: Progress, row: dict[str, float], spent: Mapping[str, float]) -> None:
        total = max(self.training_seconds, 1e-9)
        # Workers run slightly ahead of the reports, so their time may exceed the reported total.
        shares = {name: min(seconds / total, 1.0) for name, seconds in spent.items()}
        row |= {f"share_{name}": share for name, share in shares.items()}
        name = main_loss(row) if self.runtime.graph.offline_steps else None
        progress.update(
            self.reached.env_steps,
            row["steps_per_s"],
            self.recent_return(),
            self.eval_return,
            shares,
            note=info_text(row, self.settings.log_info),
            loss=None if name is None else (name, row[name]),
        )
