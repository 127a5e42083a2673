"""Environments in separate processes, connected to this one by shared memory.

Environments written in Python hold the GIL, so threads cannot step them in parallel; processes can.
Actions and step results lie in one segment, and semaphores hand them over: an exchange costs a few
microseconds. Several `ProcessVectorEnv`s can be in flight at once, and one thread can wait for any
of them at a shared bell. If a process raises, is killed or hangs, the error names its environments,
the step and its position in the code.
"""

import os
import time
import weakref
from collections.abc import Callable
from multiprocessing.synchronize import Semaphore
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from dovetail.envs import segment
from dovetail.envs.child import RESET, STEP, ChildJob, ChildReady, spin
from dovetail.envs.member import (
    GRACE,
    SLICE,
    Member,
    ProcessFailed,
    pickled,
    semaphore,
)
from dovetail.envs.segment import COMMAND, DONE, FINAL, WORDS, SegmentLayout, StepResult
from dovetail.errors import UserError
from dovetail.loading import leave_if_unguarded

__all__ = ["PATIENCE", "ProcessFailed", "ProcessVectorEnv", "make_bell", "sendable"]

PATIENCE = 30.0
"""Default time limit of one step or reset, in seconds."""
START_LIMIT = 120.0
"""Seconds that a process may take to make its environments, unless its patience is longer."""

Build = Callable[[int], VectorEnv[Any, Any, Any]]
"""Makes that many environments; it is pickled and sent to processes."""
Seeding = Callable[[list[int]], Any]
"""Converts the environments' seeds into the seed argument of `reset`."""


def sendable(build: Any) -> bool:
    """Whether a factory can be pickled for a process."""
    try:
        pickled(build, "")
    except UserError:
        return False
    return True


def make_bell() -> Semaphore:
    """A semaphore that several `ProcessVectorEnv`s release whenever one of them finishes a step."""
    return semaphore("A bell")


def one_seed(seeds: list[int]) -> int:
    """A single seed derived from all of `seeds`, for back ends that take only one."""
    return int(np.random.SeedSequence(seeds).generate_state(1)[0])


class ProcessVectorEnv(VectorEnv[Any, Any, Any]):
    """A batch of environments in one process, or split among several.

    `reset` and `step_wait` return views of shared memory. They stay valid until the next `reset`,
    or until the next `step_wait` returns.
    """

    def __init__(
        self,
        build: Build,
        num_envs: int,
        env_id: str,
        *,
        processes: int = 1,
        seeding: Seeding | None = None,
        bell: Semaphore | None = None,
        first: int = 0,
        patience: float = PATIENCE,
        info: tuple[str, ...] = (),
    ) -> None:
        """Starts the processes; each makes its share of the environments with `build`.

        Each releases `bell` after every step and reset; messages call environment 0 `first`;
        `info` are keys to report.
        """
        self._members: list[Member] = []
        self._finalizer = weakref.finalize(self, _end, self._members, os.getpid())
        leave_if_unguarded()
        self.num_envs = num_envs
        self._env_id, self._patience, self._info = env_id, patience, info
        self._sent = self._missing = self._steps = self._turn = 0
        self._since = 0.0
        count = max(1, min(processes, num_envs))
        self._spins = count > 1 or bell is None
        sent = pickled(build, env_id)
        # Only the C-level methods are kept; they keep the semaphores alive. The names are unlinked
        # at the end of this function, once every process has opened them: nothing can leak.
        goes, done = [semaphore(env_id) for _ in range(count)], semaphore(env_id)
        self._done = done.acquire
        try:
            for k, go in enumerate(goes):
                rows = slice(k * num_envs // count, (k + 1) * num_envs // count)
                job = ChildJob(
                    env_id, sent, k, rows, first, go, done, bell, self._spins, os.getpid(), info
                )
                self._members.append(Member(job))
            self._share(self._made(), seeding)
        except BaseException:
            self.close()
            raise

    def _made(self) -> ChildReady:
        """The processes' description of their environments, which are all alike."""
        told = [self._heard_starting(member) for member in self._members]
        for found in told:
            if not isinstance(found, ChildReady):
                raise ProcessFailed(*found)
        return told[0]

    def _heard_starting(self, member: Member) -> Any:
        return member.hear(max(START_LIMIT, self._patience), "as it started")

    def _share(self, made: ChildReady, seeding: Seeding | None) -> None:
        """Creates the segment, passes it to the processes, and prepares for stepping."""
        for space in (made.observation, made.action):
            if not segment.fits(space):
                raise UserError(
                    f"{self._env_id} has the space {space}, whose elements differ in size and "
                    "cannot lie in shared memory: wrap the environment."
                )
        self.single_observation_space, self.single_action_space = made.observation, made.action
        self.observation_space = batch_space(made.observation, self.num_envs)
        self.action_space = batch_space(made.action, self.num_envs)
        self.metadata = {"autoreset_mode": made.autoreset} if made.autoreset else {}
        self._seeding: Seeding = seeding or (list if made.listed else one_seed)
        count = len(self._members)
        finals = made.autoreset is AutoresetMode.SAME_STEP
        layout = SegmentLayout(
            made.observation, made.action, self.num_envs, count, finals, len(self._info)
        )
        descriptor = segment.create(layout.size(), self._env_id, self.num_envs)
        for member in self._members:
            member.say(layout)
            member.pass_file(descriptor)
        views = layout.views(segment.attach(descriptor, layout.size()), slice(None))
        for k, member in enumerate(self._members):
            self._heard_starting(member)
            member.share(views.words[k * WORDS : (k + 1) * WORDS])
        self._action, self._outcomes = views.action, views.outcomes
        self._only = views.action.only
        self._calls = [(member.words, member.go) for member in self._members]

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Starts a new episode everywhere, or only where `options["reset_mask"]` is set;
        environment i is seeded with seed[i], or seed + i."""
        if self._missing:  # a step whose result was never collected
            self._collect()
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
        mask = (options or {}).get("reset_mask")
        self._steps = self._steps if mask is not None else 0
        self._send(RESET)
        for member in self._members:
            share = options
            if mask is not None:
                share = {**(options or {}), "reset_mask": mask[member.rows]}
            own = None if seeds is None else self._seeding(list(seeds[member.rows]))
            member.say((own, share))
        self._collect()
        return self._outcomes[self._turn].observation.tree, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One transition in every environment."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Starts a transition in every environment; `step_wait` returns it."""
        if self._missing:
            raise UserError(f"{self._env_id} was asked for a step while another is under way.")
        only = self._only
        if only is not None and type(actions) is np.ndarray and actions.shape == only.shape:
            only[...] = actions
        else:
            self._write(actions)
        self._steps += 1
        # Alternate the result buffers: the last step's results stay readable.
        self._turn ^= 1
        self._send(STEP)

    def step_wait(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Waits for the transition started by `step_async`."""
        if not self._missing:
            raise UserError(f"{self._env_id} was asked for a step's result before the step.")
        self._collect()
        outcome = self._outcomes[self._turn]
        infos = {} if outcome.final is None else self._finals(outcome)
        if outcome.info is not None:  # NaN where a value is missing
            infos |= {key: outcome.info[:, i] for i, key in enumerate(self._info)}
        return (
            outcome.observation.tree,
            outcome.reward,
            outcome.terminated,
            outcome.truncated,
            infos,
        )

    def ready(self) -> bool:
        """Whether `step_wait` would return or raise at once."""
        if self._all_done():
            return True
        return self._overdue() or any(member.dead() for member in self._members)

    def close_extras(self, **kwargs: Any) -> None:
        """Ends the processes: asks, then kills."""
        self._finalizer()

    def _write(self, actions: Any) -> None:
        for path, array in zip(self._action.paths, self._action.arrays, strict=True):
            found = np.asarray(segment.at(actions, path))
            if found.shape != array.shape:
                raise UserError(
                    f"{self._env_id} was given actions of shape {found.shape}: its "
                    f"{self.num_envs} environments take {array.shape}."
                )
            array[...] = found

    def _send(self, command: int) -> None:
        if self.closed:
            raise UserError(f"{self._env_id} was used after its processes had ended.")
        self._sent += 1
        self._missing = len(self._calls)
        self._since = time.monotonic()
        for words, go in self._calls:
            words[COMMAND] = command
            go()

    def _collect(self) -> None:
        """Waits until every process has finished the command; raises if one failed."""
        if self._spins:
            # Short steps finish while polling, without a wake-up.
            spin(self._all_done)
        while self._missing:
            if self._done(True, SLICE):
                self._missing -= 1
            else:
                self._look_round()
        sent = self._sent
        for words, _ in self._calls:
            if words[DONE] != sent:
                self._raise_told()

    def _all_done(self) -> bool:
        sent = self._sent
        for words, _ in self._calls:  # noqa: SIM110  (`all` would be slower)
            if words[DONE] != sent and words[DONE] != -sent:
                return False
        return True

    def _look_round(self) -> None:
        """Raises if a process has died or exceeded its time limit."""
        for member in self._members:
            if member.dead():
                raise self._over(member.death(self._when()))
        if self._overdue():
            busy = [m for m in self._members if abs(m.words[DONE]) != self._sent]
            raise self._over(busy[0].hanging(self._patience, self._when()))

    def _overdue(self) -> bool:
        return time.monotonic() - self._since > self._patience

    def _when(self) -> str:
        return f"at step {self._steps}" if self._calls[0][0][COMMAND] == STEP else "in reset"

    def _over(self, error: UserError) -> UserError:
        self._missing = 0
        self.close()
        return error

    def _raise_told(self) -> None:
        """Raises the error reported by the first process that failed."""
        failed = [member for member in self._members if member.words[DONE] == -self._sent]
        told = [member.hear(self._patience, self._when()) for member in failed]
        for member in failed:
            member.words[DONE] = self._sent  # report a failure only once
        raise ProcessFailed(*told[0])

    def _finals(self, outcome: StepResult) -> dict[str, Any]:
        for words, _ in self._calls:
            if words[FINAL] == self._sent and outcome.final is not None:
                ended = outcome.terminated | outcome.truncated
                return {"final_obs": outcome.final.tree, "_final_obs": ended}
        return {}


def _end(members: list[Member], owner: int) -> None:
    """Ends all the processes, unless this is a fork of the process that started them."""
    if os.getpid() != owner:
        return
    for member in members:
        member.ask_to_close()
    deadline = time.monotonic() + GRACE
    for member in members:
        member.wait(deadline)
    for member in members:
        member.end()
    members.clear()
