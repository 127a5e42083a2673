"""The training loop: dispatches iterations, and looks at each report while the next one runs.

One dispatch is in flight, never two: metrics, checkpoints and evaluations of the one before are
dealt with meanwhile. Nothing is saved before its metrics were seen to be finite.
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
"""About how long a dispatch takes: short enough to stop promptly, long enough to cost nothing."""

DRIVER = "driver"
"""The thread that asks for iterations, as a worker among the others."""

NEAR = 0.05
"""Training returns this close to the goal, as a share of it, are worth an evaluation."""


class Diverged(UserError):
    """A metric or a weight is not finite: going on from the last good state would not help."""


@dataclass
class Reached:
    """How far a run is."""

    updates: int = 0
    env_steps: int = 0
    """Environment steps, and the gradient steps of updates in which nobody acted."""
    seconds: float = 0.0
    """Wall time before this start, when resumed."""
    time_to_threshold: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """States between two iterations, whose metrics were all finite."""

    state: Callable[..., Any]
    """Gives the learner's state; `state(replay=False)` may leave out what its replay holds."""
    actor: Callable[[], Any]
    """Puts the actors' state together."""
    updates: int
    env_steps: int


class Loop:
    """Runs a runtime to its number of steps, its goal, or until asked to stop."""

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
        """`watchers` are shown every report's row, and what all spans have come to; `feed` gives
        the recorded steps to learn from; `recording` takes the steps of every report."""
        self._feed, self._recording = feed, recording
        self.runtime = runtime
        self._watchers = watchers
        self.reached = reached
        self.settings = settings
        self.threshold = threshold
        self.training_seconds = self._earlier = 0.0
        self.timeline = Timeline()
        self.last_report = time.time()
        """When it came, as seconds since 1970."""
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
        """Until `steps` steps were taken, the goal is reached or `stop` is asked."""
        graph, before = self.runtime.graph, self.reached.updates
        per_iteration = graph.steps_per_iteration
        total = before + max(-(-(steps - self.reached.env_steps) // per_iteration), 0)
        begun = self.reached.env_steps - before * per_iteration
        self._meta = meta
        started = last_report = time.perf_counter()
        last_checkpoint = last_evaluation = started
        dispatched = done = self.reached.updates
        self._speed.append((started, self.reached.env_steps))
        while True:
            # What waited for a running program could hold the threads that it needs.
            report = self._wait()
            # the next dispatch may be done in this very thread
            arrived, spent = time.perf_counter(), self.runtime.seconds
            due = report is not None and arrived - last_checkpoint >= self.settings.checkpoint_every
            if dispatched < total and not stop and not due:  # a checkpoint would wait for it
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
                if self._solved:  # what is ahead of the state that reached the goal is dropped
                    break
        self._show_weights(recorder)

    def _wait(self) -> Report | None:
        """Waits for the dispatch in flight, if there is one; returns its report."""
        ahead, self._ahead = self._ahead, None
        return None if ahead is None else ahead.wait()

    def _record(self, report: Report) -> None:
        """Records the steps of a report, if that is asked for."""
        if self._recording is not None:
            began = time.perf_counter()
            self._recording.add(report)
            self.timeline.note(DRIVER, COMPUTE, "recording", began)

    def _fed(self, count: int, updates: int) -> int:
        """How many of `count` updates may go on at once; their recorded steps are seen to."""
        if self._feed is None:
            return count
        if self._feed.due(updates):
            began = time.perf_counter()
            self.runtime.refill(jax.tree.leaves(self._feed.take(updates)))
            self.timeline.note(DRIVER, WAIT, "recorded steps", began)
        return min(count, self._feed.left(updates))

    def _show_weights(self, recorder: MetricsWriter) -> None:
        """Hands over what acting takes, if its histograms are asked for."""
        if self.settings.histograms:
            leaves, _ = jax.tree.flatten_with_path(self._acting(self.good.state(replay=False)))
            named = {jax.tree_util.keystr(k, simple=True, separator="/"): x for k, x in leaves}
            recorder.record_arrays(self.good.env_steps, named)

    def ends(self, evaluations: BackgroundEvaluation, stop: Stop) -> bool:
        """Whether the goal is reached, by the evaluation under way as well, if there is one."""
        evaluations.wait(stop)
        self._collect(evaluations, {})
        return self._solved or bool(stop)

    def go_on_after(self, before: "Loop") -> None:
        """Keeps what the loop of another phase has measured."""
        self.timeline, self.evaluation = before.timeline, before.evaluation
        self.training_seconds = self._earlier = before.training_seconds
        self._start_steps = before._start_steps

    def save(self, checkpoints: Checkpoints) -> None:
        """Asks for a checkpoint of the last state that was seen to be good."""
        with contextlib.suppress(Exception):  # what came after that state is dropped
            report = self._wait()  # what a replay holds changes in place: nothing may go on
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
        """Wall seconds of the run so far, earlier starts included."""
        return self.reached.seconds + time.perf_counter() - self._began

    @property
    def steps_per_s(self) -> float:
        """Environment steps per second of this start, without compiling."""
        steps = self._steps_taken - self._start_steps
        return steps / self.training_seconds if self.training_seconds > 0 else math.nan

    @property
    def solved(self) -> bool:
        """Whether the goal was reached."""
        return self._solved

    def _digest(
        self, report: Report, updates: int, env_steps: int, arrived: float
    ) -> dict[str, float]:
        """Checks a report, and makes the row of metrics from it."""
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
        """Names a JAX environment whose numbers are not finite while others' still are."""
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
        """Mean return and length of the episodes that ended, per seed if there are several."""
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
        """Mean training return over about the last hundred episodes."""
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
        """The run ends with the state that was seen to reach the goal."""
        self.good = snapshot
        self.reached.updates = snapshot.updates
        self.reached.env_steps = snapshot.env_steps

    def _adapt(self, iterations: int, seconds: float) -> None:
        """Aims at reports every quarter of a second, changing by at most a factor of two."""
        ideal = iterations * REPORT_SECONDS / max(seconds, 1e-6)
        self._chunk = max(1, min(round(ideal), 2 * self._chunk))

    def _show(self, progress: Progress, row: dict[str, float], spent: Mapping[str, float]) -> None:
        total = max(self.training_seconds, 1e-9)
        # Workers are a little ahead of the reports: what they spent may be more than was reported.
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
    """One column per metric; with several seeds, one for each and one for their mean."""
    row: dict[str, float] = {}
    for name, value in means.items():
        row[name] = float(np.mean(value))
        if np.ndim(value):
            row |= {f"{name}/seed{i}": float(x) for i, x in enumerate(value)}
    return row
