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
from dovetail.errors import UserError
from dovetail.evaluation.evaluate import Evaluation
from dovetail.replay.data import without_data
from dovetail.replay.replay import with_own_replay
from dovetail.run.checkpoint import Checkpoints
from dovetail.run.settings import Settings
from dovetail.runtime.interface import Runtime
from dovetail.runtime.report import Pending, Report
from dovetail.telemetry.progress import Progress
from dovetail.telemetry.sinks import MetricsWriter
from dovetail.telemetry.spans import COMPUTE, WAIT
from dovetail.telemetry.timeline import Timeline
from dovetail.training.background_evaluation import BackgroundEvaluation
from dovetail.training.recording import Recording
from dovetail.training.signals import Stop

REPORT_SECONDS = 0.25
"""Target duration of a dispatch: short enough to stop promptly, long enough that its overhead is
negligible."""

DRIVER = "driver"
"""The name of the driver thread among the workers of the timeline."""

NEAR = 0.05
"""Training returns within this fraction of the goal trigger an evaluation."""


class Diverged(UserError):
    """A metric or a weight is not finite; resuming from the last good state would not help."""


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
    ) -> None:
        """`watchers` are called with every report's row of metrics and the timeline of all spans;
        `feed` supplies recorded steps to learn from; `recording` receives the steps of every
        report; `acting` is `Algorithm.acting`."""
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
        self.good = start
        self._acting = acting
        self._began = began
        self._start_steps = self._steps_taken = reached.env_steps
        self._returns: deque[tuple[float, int]] = deque(maxlen=50)
        self._speed: deque[tuple[float, int]] = deque(maxlen=12)
        self._chunk = 1
        self._solved = False
        self._ahead: Pending | None = None
        """The dispatch in flight."""

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
        last_checkpoint = last_evaluation = started
        dispatched = done = self.reached.updates
        self._speed.append((started, self.reached.env_steps))
        while True:
            # Wait before dispatching again: a program queued behind a running one could hold the
            # threads that the running one needs.
            report = self._wait()
            # Take the times now: the next dispatch may run in this thread.
            arrived, spent = time.perf_counter(), self.runtime.seconds
            due = report is not None and arrived - last_checkpoint >= self.settings.checkpoint_every
            if dispatched < total and not stop and not due:  # save() waits for a dispatch in flight
                count = self._fed(min(self._chunk, total - dispatched), dispatched)
                self._ahead = self.runtime.advance(count)
                dispatched += count
            if report is None and self._ahead is None:
                break
            if report is not None:
                self._record(report)
                done += report.iterations
                row = self._digest(report, done, begun + done * per_iteration, arrived)
                now = time.perf_counter()
                self._adapt(report.iterations, arrived - last_report)
                last_report = arrived
                self.training_seconds = self._earlier + arrived - started
                self._collect(evaluations, row)
                self._show(progress, row, spent)
                recorder.record(int(row["env_steps"]), row)
                if not evaluations.busy and self._wants_evaluation(now - last_evaluation):
                    evaluations.ask(self._acting(self.good.state(replay=False)), self.good)
                    last_evaluation = now
                    self._show_weights(recorder)
                if due:
                    self.save(checkpoints)
                    last_checkpoint = now
                self.timeline.note(DRIVER, COMPUTE, "reports", arrived)
                for watch in self._watchers:
                    watch(row, self.timeline)
                if self._solved:  # drop the iterations after the state that reached the goal
                    break
        self._show_weights(recorder)

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
        self._collect(evaluations, {})
        return self._solved or bool(stop)

    def go_on_after(self, before: "Loop") -> None:
        """Carries over the measurements of the previous phase's loop."""
        self.timeline, self.evaluation = before.timeline, before.evaluation
        self.training_seconds = self._earlier = before.training_seconds
        self._start_steps = before._start_steps

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

    def _digest(
        self, report: Report, updates: int, env_steps: int, arrived: float
    ) -> dict[str, float]:
        """Checks a report and makes its row of metrics."""
        snapshot = Snapshot(report.state, report.actor, updates, env_steps)
        means = {
            name: np.asarray(total) / report.iterations for name, total in report.metrics.items()
        }
        self._refuse_nonfinite(means, snapshot, report.finite)
        self.last_report = time.time()
        self.timeline.add(report.spans)
        self.timeline.dropped = report.dropped_spans
        self.timeline.measures = dict(report.measures)
        self.good = snapshot
        self.reached.updates = snapshot.updates
        self.reached.env_steps = self._steps_taken = snapshot.env_steps
        elapsed = self.reached.seconds + arrived - self._began
        row = {"time_s": elapsed, "env_steps": float(self.reached.env_steps)}
        row["updates"] = float(snapshot.updates)
        row |= self._episode_row(report) | _columns(means) | report.measures
        self._speed.append((arrived, self.reached.env_steps))
        before, steps = self._speed[0]
        row["steps_per_s"] = (self.reached.env_steps - steps) / max(arrived - before, 1e-9)
        return row

    def _refuse_nonfinite(
        self, means: dict[str, np.ndarray], snapshot: Snapshot, finite: bool
    ) -> None:
        bad = next((name for name, value in means.items() if not np.isfinite(value).all()), None)
        if bad is not None:
            value = np.ravel(means[bad])
            what = f"{bad} became {float(value[~np.isfinite(value)][0])}"
        elif not finite:
            what = "a weight is no longer finite"
        else:
            return
        first, last = self.good.updates + 1, snapshot.updates
        when = f"in update {last}" if first == last else f"between updates {first} and {last}"
        raise Diverged(
            f"Training diverged: {what} {when}; {self._suspect(snapshot.actor())}try a lower "
            f"--learning-rate, a lower --max-grad-norm, or normalized observations and rewards."
        )

    def _suspect(self, actor: Any) -> str:
        """Names a JAX environment that is not finite while others still are.

        If all environments are affected, the weights are the more likely cause.
        """
        if self.settings.seeds > 1:
            return ""
        shown = (actor.timestep.observation, actor.timestep.reward, actor.episode_return)
        rows = [np.asarray(leaf).reshape(len(leaf), -1) for leaf in jax.tree.leaves(shown)]
        bad = ~np.all([np.isfinite(row).all(axis=1) for row in rows], axis=0)
        if not bad.any() or bad.all():
            return ""
        index = int(np.flatnonzero(bad)[0])
        return (
            f"environment {index} showed a number that is not finite by step "
            f"{int(actor.step[index])}, so repair it, or "
        )

    def _episode_row(self, report: Report) -> dict[str, float]:
        """Mean return and length of finished episodes, per seed if there are several."""
        if not report.episodes:
            return {}
        count, returns, lengths = (np.asarray(x).sum(axis=-1) for x in report.episodes)
        if not np.all(count):
            return {"episodes": float(np.mean(count))}
        means = {
            "episode_return": returns / count,
            "episode_length": lengths / count,
            "episodes": count.astype(float),
        }
        self._returns.append((float(np.mean(means["episode_return"])), int(np.mean(count))))
        return _columns(means)

    def recent_return(self) -> float | None:
        """Mean training return over roughly the last hundred episodes; None without any."""
        total = episodes = 0.0
        for value, count in reversed(self._returns):
            total, episodes = total + value * count, episodes + count
            if episodes >= 100:
                break
        return total / episodes if episodes else None

    def _wants_evaluation(self, since: float) -> bool:
        if self._solved or self.settings.seeds > 1 or self.settings.evaluate_every == 0:
            return False
        if since >= self.settings.evaluate_every:
            return True
        goal, recent = self.settings.until, self.recent_return()
        return goal is not None and recent is not None and recent >= goal - NEAR * abs(goal)

    def _collect(self, evaluations: BackgroundEvaluation, row: dict[str, float]) -> None:
        for result in evaluations.results():
            self.evaluation = result.evaluation
            row["eval_return"] = result.evaluation.mean
            if self.threshold is not None and result.evaluation.mean >= self.threshold:
                if self.reached.time_to_threshold is None:
                    before = self.reached.seconds - self._began
                    self.reached.time_to_threshold = before + result.finished
                if self.settings.until is not None:
                    self._solved = True
                    self._settle(result.snapshot)
                    return

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
        progress.update(
            self.reached.env_steps,
            row["steps_per_s"],
            self.recent_return(),
            self.evaluation.mean if self.evaluation is not None else None,
            shares,
        )


def _columns(means: dict[str, np.ndarray]) -> dict[str, float]:
    """One column per metric: its mean over seeds, and with several seeds one column for each."""
    row: dict[str, float] = {}
    for name, value in means.items():
        row[name] = float(np.mean(value))
        if np.ndim(value):
            row |= {f"{name}/seed{i}": float(x) for i, x in enumerate(value)}
    return row
