"""One start of a run, new or resumed: runs its phases and finishes the folder.

On an error or a stop it saves the last good state and closes everything it opened.
"""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from dovetail.errors import UserError, command, user_line
from dovetail.evaluation.evaluate import Evaluator
from dovetail.run.checkpoint import Checkpoints
from dovetail.run.folder import Run
from dovetail.runtime.heartbeat import Activity
from dovetail.telemetry.progress import make_progress
from dovetail.telemetry.sinks import MetricsWriter
from dovetail.telemetry.status import Status
from dovetail.telemetry.timeline import Timeline
from dovetail.training.announcing import accepted
from dovetail.training.background_evaluation import BackgroundEvaluation
from dovetail.training.best_policy import BestPolicy
from dovetail.training.callbacks import EventName, TrainingEvent
from dovetail.training.changes import sentence
from dovetail.training.divergence import Diverged
from dovetail.training.finish import finish
from dovetail.training.launch import launch
from dovetail.training.loop import Loop, Reached
from dovetail.training.phases import Phase
from dovetail.training.prepare import RunStart
from dovetail.training.reporting import make_exporter, make_recorder
from dovetail.training.restore import Started, restored
from dovetail.training.signals import Stop

WIDE = 64
"""Environments from which on one compiled program makes good use of a processor."""


def conduct(start: RunStart, stop: Stop) -> Run:
    """Runs the loop of every phase and finishes the folder; raises `Stopped` if stopped."""
    if not start.resumed:  # a resumed run is accepted once it is restored
        accepted()
    with ExitStack() as stack:
        session = _Session(start, stop, stack)
        loop = session.go()
    if stop:
        raise stop.stopped(
            f"after {loop.reached.env_steps:,} steps; {session.saved} Go on with: "
            f"{command('train', '--resume', start.run.path)}"
        )
    return start.run


class _Session:
    """The open resources of a running run: progress, status, exporter, checkpoints, loop."""

    def __init__(self, start: RunStart, stop: Stop, stack: ExitStack) -> None:
        """`stack` closes the resources."""
        self._start, self._stop, self._stack = start, stop, stack
        self._loop: Loop | None = None
        """The current phase's loop."""
        self.saved = "everything is saved."
        """What a stopped run has saved, in words."""
        settings = start.settings
        self._progress = make_progress(settings.display, start.last.phase.end)
        stack.callback(self._progress.close)
        self._status = Status(start.run, self._workers, self._reached)
        # `push`, not `callback`: the final status needs the exception.
        stack.push(lambda kind, error, _: self._status.close(_ending(error, stop), error))
        self._progress.message(f"{_title(start)} → {start.run.path}")
        if (advice := _advice(start)) is not None:
            self._progress.message(advice)
        if start.env.note:
            self._progress.message(start.env.note)
        self._exporter = make_exporter(
            start.config, settings, start.last.planned.plan, start.resumed, self._progress.message
        )
        if self._exporter is not None:
            stack.callback(self._exporter.close)
        self._checkpoints = Checkpoints(start.run.path / "checkpoints", settings.keep)
        stack.callback(self._checkpoints.close)
        self._phase = stack.enter_context(ExitStack())
        """Closes the resources of one phase; reused by the next."""

    def go(self) -> Loop:
        """Runs all phases and finishes the folder; returns the last phase's loop."""
        start, stack = self._start, self._stack
        at, loop = self._begin()
        recorder = make_recorder(start.run, start.config, start.settings, loop.reached, self._tell)
        stack.callback(recorder.close)
        self._tell_beginning(loop.reached, recorder)
        best = BestPolicy(start.run, start.last.algorithm, self._tell)
        patience = start.settings.patience
        evaluations = BackgroundEvaluation(_evaluator(start), best.offer, patience, self._tell)
        stack.callback(evaluations.close)
        loop = self._run_phases(at, loop, recorder, evaluations)
        if self._exporter is not None:
            self._exporter.ended()
        loop.timeline.write(start.run, last=True)
        if start.callbacks.stopped_by is not None:
            self._tell(f"The callback {start.callbacks.stopped_by} stopped the run.")
        finish(start, loop, evaluations, recorder, best, self._stop, self._progress)
        self._checkpoints.close()
        if start.callbacks:
            self._announce("end", loop.reached.env_steps, loop.reached.updates, {})
        return loop

    def _tell_beginning(self, reached: Reached, recorder: MetricsWriter) -> None:
        """Says what this start does differently: other options, or another run's parameters."""
        if self._start.warm is not None:
            self._tell(str(self._start.warm))
        if self._start.changed:
            self._tell(sentence(self._start.changed, reached.updates))
            phase = float(len(self._start.config["changes"]))
            row = {"time_s": reached.seconds, "updates": float(reached.updates), "phase": phase}
            recorder.record(reached.env_steps, row)

    def _begin(self) -> tuple[int, Loop]:
        """Returns (index of the phase to begin with, its loop)."""
        resumed = self._start.resumed
        try:
            at, started = 0, None
            if resumed:
                at, started = restored(self._start, self._checkpoints, self._tell)
            return at, self._launched(at, started)
        except Exception as error:
            if self._stop:  # Ctrl-C also reaches environment processes, which may die before us
                raise self._stop.stopped("before training began.") from error
            if resumed and isinstance(error, UserError):
                self._status.withdraw()
            raise

    def _run_phases(
        self, at: int, loop: Loop, recorder: MetricsWriter, evaluations: BackgroundEvaluation
    ) -> Loop:
        """Runs the loops of the phases from `at` on; returns the last."""
        stop, checkpoints = self._stop, self._checkpoints
        while True:
            phase = self._start.phases[at].phase
            meta = _meta(self._start, phase)
            _introduce(self._start, phase, loop, self._tell)
            ends = True
            try:
                loop.run(phase.end, stop, recorder, self._progress, checkpoints, evaluations, meta)
                ends = bool(stop) or loop.ends(evaluations, stop)
            except Exception as error:
                if not stop:  # otherwise the stop itself may be the cause, as in _begin
                    with contextlib.suppress(UserError):  # the recorder may be the cause
                        loop.write_row(recorder)
                    self._keep(loop, error)
                    raise
            at += 1
            over = ends or at == len(self._start.phases)
            self._save(loop)
            if over:
                return loop
            loop.write_row(recorder)
            # Fetch the state before closing the runtime that holds it.
            before = Started(loop.good.state(), None, loop.reached)
            self._phase.close()
            loop = self._launched(at, before, after=loop)

    def _save(self, loop: Loop) -> None:
        """Saves the state between phases or at the end.

        After a stop request, a side whose process is gone cannot be saved any more: the last
        checkpoint then stays the newest.
        """
        try:
            loop.save(self._checkpoints)
            loop.saved(self._checkpoints)
        except UserError as error:
            if not self._stop:
                raise
            self._checkpoints.wait()
            latest = self._checkpoints.latest()
            kept = "nothing is saved" if latest is None else f"update {latest} is saved"
            self.saved = f"{kept}, and what came later is lost: {_full_stop(str(error))}"

    def _launched(self, at: int, started: Started | None, after: Loop | None = None) -> Loop:
        """Launches the loop of a phase; `after` is the previous phase's loop, if any."""
        prepared = self._start.phases[at]
        record = None
        if self._start.settings.record is not None and prepared.phase.online:
            record = self._start.settings.record
            if self._start.resumed and after is None:  # a resumed run writes a new dataset
                record += f"-from-{0 if started is None else started.reached.updates}"
        loop = launch(
            self._start,
            prepared,
            started,
            record,
            self._watchers(),
            self._announce if self._start.callbacks else None,
            self._tell,
            self._phase,
        )
        if after is not None:
            loop.go_on_after(after)
        self._loop = loop
        self._stop.training(loop.runtime.ask_to_stop)
        return loop

    def _watchers(self) -> list[Callable[[dict[str, float], Timeline], None]]:
        """The functions called with every report."""

        def written(_: dict[str, float], timeline: Timeline) -> None:
            with contextlib.suppress(UserError):  # metrics and checkpoints report a full disk
                timeline.write(self._start.run)

        return [written] if self._exporter is None else [written, self._exporter.publish]

    def _announce(
        self, name: EventName, step: int, update: int, metrics: Mapping[str, float]
    ) -> bool:
        """Tells the callbacks of an event; returns whether one of them stops the run."""
        start, loop = self._start, self._loop
        assert loop is not None
        place = step, update, start.last.phase.end, loop.elapsed
        start.callbacks.call(
            TrainingEvent(name, *place, dict(metrics), loop.eval_return, start.run)
        )
        return start.callbacks.stopped_by is not None

    def _workers(self) -> list[Activity]:
        return [] if self._loop is None else self._loop.runtime.status()

    def _reached(self) -> dict[str, Any]:
        loop = self._loop
        if loop is None:
            return {"env_steps": 0, "last_report": 0.0}
        return {"env_steps": loop.reached.env_steps, "last_report": loop.last_report}

    def _tell(self, text: str) -> None:
        self._progress.message(text)
        self._status.message(text)

    def _keep(self, loop: Loop, error: Exception) -> None:
        """Saves the last good state when an error ends the run; a `UserError` then mentions it."""
        checkpoints = self._checkpoints
        with contextlib.suppress(UserError):  # report the first error, not a failed save
            loop.save(checkpoints)
            checkpoints.wait()
        if isinstance(error, Diverged) and self._exporter is not None:
            self._exporter.diverged()
        if isinstance(error, UserError):
            raise UserError(f"{_full_stop(str(error))} {self._kept(error)}") from error

    def _kept(self, error: UserError) -> str:
        """What is left of a run that an error ended."""
        saved, run = self._checkpoints.latest(), self._start.run.path
        if isinstance(error, Diverged) and saved is not None:
            return f"Update {saved} is saved in {run}"
        if not saved:  # update 0 is what the run began with
            return "It ended before its first update."
        again = command("train", "--resume", run)
        first = "once that is repaired, " if _recurs(error) else ""
        return f"Update {saved} is saved: {first}go on with {again}"


def _recurs(error: BaseException | None) -> bool:
    """Whether an error arose in the user's own code, here or in a process of environments."""
    while error is not None:
        if user_line(error) or getattr(error, "traceback", ""):
            return True
        error = error.__cause__
    return False


def _full_stop(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _title(start: RunStart) -> str:
    plan, seeds = start.last.planned.plan, start.settings.seeds
    acting = f", {plan.num_envs} environments" if start.last.planned.graph.unrolls else ""
    what = f"{plan.algorithm} on {plan.env}, {plan.strategy}{acting}"
    return what if seeds == 1 else f"{what}, {seeds} seeds"


def _advice(start: RunStart) -> str | None:
    """Suggests more environments where one program would step them at little cost."""
    planned, algorithm = start.last.planned, start.last.algorithm
    chosen = start.resumed or algorithm.num_envs != type(algorithm).num_envs
    compiled = planned.plan.fused and planned.graph.unrolls
    if chosen or not compiled or algorithm.num_envs * start.settings.seeds >= WIDE:
        return None
    return (
        f"One program steps all {algorithm.num_envs} environments: --num-envs {WIDE} would take "
        f"more steps per second, and changes the result."
    )


def _introduce(start: RunStart, phase: Phase, loop: Loop, tell: Callable[[str], None]) -> None:
    """Prints the kind of steps of a phase, for runs with recorded data."""
    if start.recorded is None:
        return
    left, reader = max(phase.end - loop.reached.env_steps, 0), start.recorded.reader
    data = f"{reader.num_steps:,} recorded steps of {reader.folder}"
    if phase.online:
        tell(f"{left:,} environment steps, with batches from the replay and {data}.")
        return
    read = ", read as they are needed" if start.recorded.streamed else ""
    tell(f"{left:,} gradient steps on {data}{read}; nobody acts.")
    if start.silent is not None:
        tell(f"Nothing is evaluated: {start.silent}.")


def _ending(error: BaseException | None, stop: Stop) -> str:
    """The reason why a run ended, in words."""
    if error is not None:
        return str(error) or type(error).__name__
    return "done" if stop.signal is None else f"stopped by {stop.signal.name}"


def _evaluator(start: RunStart) -> Evaluator | None:
    """The evaluator; None without an environment."""
    if start.silent is not None:
        return None
    episodes, seed = start.settings.episodes, start.config["seed"]
    return Evaluator(start.last.algorithm, start.env, episodes=episodes, seed=seed)


def _meta(start: RunStart, phase: Phase) -> dict[str, Any]:
    """The metadata of checkpoints; `online` is included only for runs with recorded data."""
    meta = {"algorithm": start.config["algorithm"], "options": start.config["options"]}
    return meta if start.recorded is None else meta | {"online": phase.online}
