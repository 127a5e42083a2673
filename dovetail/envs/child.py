"""The main loop of an environment process: one Gymnasium `VectorEnv`, stepped via shared memory.

It imports numpy, Gymnasium and the environments' own dependencies but not JAX, so processes start
quickly and stay small. It serves exchanges until it is asked to close, and exits when its parent
process is gone.
"""

import contextlib
import faulthandler
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle
from multiprocessing.synchronize import Semaphore
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from dovetail.envs.faults import fault
from dovetail.envs.info_values import table
from dovetail.envs.makers import report_info
from dovetail.envs.segment import (
    COMMAND,
    DONE,
    FINAL,
    WORDS,
    SegmentLayout,
    SharedArrays,
    Views,
    at,
    attach,
)

STEP, RESET, CLOSE = range(3)
"""Commands."""
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a whole process group, as schedulers and closing terminals send them."""
LONGEST = 20_000
"""Maximum characters of an error message: more might not fit into the pipe at once."""
_LOOK_ROUND = 1.0
"""Seconds between checks that the parent is still alive."""
_SPIN = 100e-6
"""Seconds of polling before blocking: waking an idle core takes about as long."""


@dataclass(frozen=True)
class ChildJob:
    """Arguments of an environment process."""

    env_id: str
    build: bytes
    """Pickled function: number of environments → `VectorEnv`."""
    index: int
    """Index of this process."""
    rows: slice
    """Which of the segment's environments belong to this process."""
    first: int
    """Number within the run of the segment's first environment."""
    go: Semaphore
    done: Semaphore
    bell: Semaphore | None
    spins: bool
    """Whether to poll briefly before blocking; not where many share a bell and the cores."""
    parent: int
    info: tuple[str, ...] = ()
    """Keys of the environments' `info` to report."""

    @property
    def num_envs(self) -> int:
        """Number of environments it makes."""
        return self.rows.stop - self.rows.start


@dataclass(frozen=True)
class ChildReady:
    """A process's description of the environments it has made."""

    observation: gymnasium.Space[Any]
    action: gymnasium.Space[Any]
    autoreset: AutoresetMode | None
    listed: bool
    """Whether `reset` takes a list of seeds."""


def spin(over: Callable[[], bool]) -> bool:
    """Polls `over` for a moment, yielding the core; returns whether it became true."""
    end = time.perf_counter() + _SPIN
    while not over():
        if time.perf_counter() > end:
            return False
        os.sched_yield()
    return True


class Misfit(Exception):
    """The environments returned an array of the wrong shape."""


def leave_signals_to_parent() -> None:
    """Disregards the signals that end a whole group: the parent saves, then ends this process.

    A handler, not a blocked or ignored signal: programs that an environment starts would inherit
    those and could no longer be ended.
    """
    for number in ENDING:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def serve(job: ChildJob, connection: Connection) -> None:
    """Makes the environments and steps them until the parent is done. Runs in the child process."""
    leave_signals_to_parent()
    log = recv_handle(connection)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log, all_threads=False)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError):  # the parent closed the pipe during startup
        venv = _make(job, connection)
        if venv is not None:
            layout: SegmentLayout = connection.recv()
            memory = attach(recv_handle(connection), layout.size())
            connection.send(None)
            _Server(job, connection, venv, layout.views(memory, job.rows)).run()
            venv.close()


def _end_with_parent() -> None:
    """Exits when the parent does; in a thread, because the environments may be stuck."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # meant for the main thread
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _make(job: ChildJob, connection: Connection) -> VectorEnv[Any, Any, Any] | None:
    """Makes the environments and reports them, or the failure, to the parent."""
    failed = "cannot be brought into a process of its own: define it in a module or file; there is"
    try:
        load: Any = getattr(ForkingPickler, "loads")  # noqa: B009  (its stub is wrong)
        build: Callable[[int], VectorEnv[Any, Any, Any]] = load(job.build)
        failed = "could not be made:"
        venv = build(job.num_envs)
        if venv.num_envs != job.num_envs:
            raise ValueError(f"{job.num_envs} environments asked for, {venv.num_envs} made")
        report_info(venv, job.info)
        metadata = venv.metadata or {}
        mode = getattr(venv, "autoreset_mode", None) or metadata.get("autoreset_mode")
        mode = None if mode is None else AutoresetMode(mode)
        listed = isinstance(venv, SyncVectorEnv)
        made = ChildReady(venv.single_observation_space, venv.single_action_space, mode, listed)
        connection.send(made)
    except BaseException as error:
        _tell(connection, f"{job.env_id} {failed} {type(error).__name__}: {error}")
        return None
    return venv


def _tell(connection: Connection, sentence: str) -> None:
    """Sends the message and the traceback of the exception being handled."""
    with contextlib.suppress(OSError):  # the parent is gone
        connection.send((sentence[:LONGEST], traceback.format_exc()[-LONGEST:]))


class _Server:
    """Serves exchanges."""

    def __init__(
        self, job: ChildJob, connection: Connection, venv: VectorEnv[Any, Any, Any], views: Views
    ) -> None:
        self._job, self._connection, self._venv, self._views = job, connection, venv, views
        self._words = views.words[job.index * WORDS : (job.index + 1) * WORDS]
        self._count = self._turn = 0
        self._steps = 0

    def run(self) -> None:
        """Serves until asked to close, or until the parent is gone."""
        words, acquire, done = self._words, self._job.go.acquire, self._job.done.release
        bell = None if self._job.bell is None else self._job.bell.release
        asked = partial(acquire, False)
        while True:
            if not (self._job.spins and spin(asked)) and not acquire(True, _LOOK_ROUND):
                if os.getppid() != self._job.parent:
                    return
                continue
            command = words[COMMAND]
            if command == CLOSE:
                return
            self._count += 1
            # Written before the semaphore is released: the parent reads it afterwards.
            words[DONE] = self._count if self._answer(command) else -self._count
            done()
            if bell is not None:
                bell()

    def _answer(self, command: int) -> bool:
        """Steps or resets; returns whether it succeeded."""
        try:
            if command == STEP:
                self._steps += 1
                self._turn ^= 1
                self._step()
            else:
                self._reset(*self._connection.recv())
        except BaseException as error:
            call = "step" if command == STEP else "reset"
            if isinstance(error, Misfit):
                told = f"{error} (step {self._steps})."
            else:
                first = self._job.first + self._job.rows.start
                told = fault(error, self._venv, call, self._steps, first)
            _tell(self._connection, f"{self._job.env_id}: {told}")
            return False
        return True

    def _step(self) -> None:
        # Environments may keep a reference to the action, so it must not be overwritten later.
        action = self._views.action
        given = _copied(action.tree) if action.only is None else action.only.copy()
        raw, reward, terminated, truncated, infos = self._venv.step(given)
        outcome = self._views.outcomes[self._turn]
        self._show(outcome.observation, raw)
        _fill(outcome.reward, reward, "rewards")
        _fill(outcome.terminated, terminated, "ends")
        _fill(outcome.truncated, truncated, "ends")
        if outcome.info is not None:
            outcome.info[...] = table(infos, self._job.info, self._job.num_envs)
        if outcome.final is not None and "final_obs" in infos:
            ended = outcome.terminated | outcome.truncated
            self._show_finals(outcome.final, infos["final_obs"], ended)
            self._words[FINAL] = self._count

    def _reset(self, seed: Any, options: dict[str, Any] | None) -> None:
        """Resets into the last step's result buffer: only steps alternate buffers."""
        mask = (options or {}).get("reset_mask")
        if mask is not None and not mask.any():  # only other processes' episodes ended
            return
        self._steps = self._steps if mask is not None else 0
        raw, _ = self._venv.reset(seed=seed, options=options)
        self._show(self._views.outcomes[self._turn].observation, raw)

    def _show(self, batch: SharedArrays, raw: Any) -> None:
        if batch.only is not None:
            _fill(batch.only, raw, "observations")
            return
        for path, array in zip(batch.paths, batch.arrays, strict=True):
            _fill(array, at(raw, path), "observations")

    def _show_finals(self, batch: SharedArrays, finals: Any, ended: np.ndarray) -> None:
        """Writes final observations, given as a batch or as an object array of single ones."""
        listed = isinstance(finals, np.ndarray) and finals.dtype == object
        for path, array in zip(batch.paths, batch.arrays, strict=True):
            if listed:
                for i in np.flatnonzero(ended):
                    array[i] = at(finals[i], path)
            else:
                array[ended] = np.asarray(at(finals, path))[ended]


def _fill(array: np.ndarray, found: Any, what: str) -> None:
    """Writes into shared memory, never broadcasting."""
    if type(found) is not np.ndarray:
        found = np.asarray(found)
    if found.shape != array.shape:
        raise Misfit(f"returned {what} of shape {found.shape}, not {array.shape}")
    array[...] = found


def _copied(tree: Any) -> Any:
    """A deep copy of a batch."""
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_copied(value) for value in tree)
    return tree.copy()
