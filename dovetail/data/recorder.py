"""Records the trajectories of several environments as episodes, written when they end.

Trajectories are time-major, [T, B, …], as `unroll` makes them, and each environment's are passed to
`Recorder.add` in order. Episodes still open when the recording ends are written too, marked as cut;
those under way when it began are marked as not begun. Episodes too long for memory are written in
pieces, marked as both.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from dovetail.data.episode import LOG_PROBABILITY, SAMPLED_ACTION, VERSION, Episode, Source
from dovetail.data.hdf5 import Array
from dovetail.data.metadata import Metadata
from dovetail.data.spaces import Codec, Space, spaces_of
from dovetail.data.writer import Writer
from dovetail.envs.interface import Continuous
from dovetail.envs.resolve import Env

OPEN_BYTES = 1 << 30
"""Maximum bytes of all open episodes; beyond it, the largest is written in its current state."""


class RecordedSteps(NamedTuple):
    """The argument of `Recorder.add`, a part of `Trajectory`: leaves [T, B, …]."""

    observation: Any
    action: Any
    reward: Any
    terminated: Any
    truncated: Any
    first: Any
    valid: Any
    next_observation: Any
    log_probability: Any = None
    """None where unknown."""


class Lanes(NamedTuple):
    """The environments behind the columns of a trajectory, [B] each."""

    env: Array
    """Environment number."""
    turn: Array
    """Number of its unroll: a gap means that steps are missing."""


class Lane:
    """One environment's episode so far."""

    def __init__(self) -> None:
        self.pieces: list[tuple[RecordedSteps, int]] = []
        """Steps with the version of their weights; of `next_observation` only the last row."""
        self.turn: int | None = None
        """Number of the unroll that the last piece came from."""
        self.bytes = 0
        """Size of the pieces."""

    def add(self, part: RecordedSteps, version: int) -> None:
        """Appends steps to the open episode."""
        # A copy, so that the other rows can be freed.
        after = jax.tree.map(lambda x: x[-1:].copy(), part.next_observation)
        part = part._replace(next_observation=after)
        self.pieces.append((part, version))
        self.bytes += sum(leaf.nbytes for leaf in jax.tree.leaves(part))

    def breaks(self, steps: RecordedSteps, start: int) -> bool:
        """Whether the open episode does not continue at `start`: its environment was set up anew,
        or steps in between are missing."""
        if not self.pieces:
            return False
        before, _ = self.pieces[-1]
        same = jax.tree.map(
            lambda seen, after: np.array_equal(seen[start], after[-1]),
            steps.observation,
            before.next_observation,
        )
        return bool(steps.first[start]) or not all(jax.tree.leaves(same))

    def take(self) -> tuple[RecordedSteps, Array]:
        """The whole episode and the version of each step's weights; empties the lane."""
        pieces, self.pieces, self.bytes = self.pieces, [], 0
        steps: RecordedSteps = jax.tree.map(
            lambda *x: np.concatenate(x), *(part for part, _ in pieces)
        )
        versions = [np.full(len(part.reward), version) for part, version in pieces]
        return steps, np.concatenate(versions)


class Recorder:
    """Writes episodes as they end, ordered by time, then by environment."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.source = 0
        """Index of the source that the next trajectories come from."""
        metadata = writer.metadata
        self._codec = Codec(metadata.observation, metadata.action, metadata.environment)
        self._lanes: dict[int, Lane] = defaultdict(Lane)
        """By environment number."""
        self._added = 0

    def add(self, trajectory: Any, version: int | Array = -1, of: Lanes | None = None) -> None:
        """Records a trajectory with the fields of `RecordedSteps`, made by weights of `version`:
        one number, or one per column. Without `of`, the columns are the same environments in every
        call, and no steps are missing."""
        steps = RecordedSteps(*(getattr(trajectory, name) for name in RecordedSteps._fields))
        columns: RecordedSteps = jax.tree.map(lambda x: np.swapaxes(np.asarray(x), 0, 1), steps)
        count = len(columns.reward)
        if of is None:
            of = Lanes(np.arange(count), np.full(count, self._added))
        self._added += 1
        rows = of.env.tolist(), of.turn.tolist(), np.broadcast_to(version, count).tolist()
        ended: list[tuple[int, int, Episode]] = []
        for i, (env, turn, own_version) in enumerate(zip(*rows, strict=True)):
            lane, valid = self._lanes[env], np.flatnonzero(columns.valid[i])
            missing = lane.turn is not None and turn != lane.turn + 1
            lane.turn = turn
            if missing and lane.pieces:
                # -1 sorts before all episodes that end within this trajectory.
                ended.append((-1, env, self._finished(lane, cut=True)))
            if len(valid):
                column = jax.tree.map(lambda x, i=i, v=valid: x[i][v], columns)
                found = self._follow(lane, column, valid, own_version)
                ended += [(time, env, episode) for time, episode in found]
        # By time and environment, so that the order does not depend on the number of actors.
        for _, _, episode in sorted(ended, key=lambda one: one[:2]):
            self.writer.write(episode)
        # Bounds the memory when episodes are very long.
        while sum(lane.bytes for lane in self._lanes.values()) > OPEN_BYTES:
            largest = max(self._lanes.values(), key=lambda lane: lane.bytes)
            self.writer.write(self._finished(largest, cut=True))

    def _follow(
        self, lane: Lane, steps: RecordedSteps, times: Array, version: int
    ) -> Iterator[tuple[int, Episode]]:
        """Continues one environment's episode; yields the episodes that end, with their time."""
        ends = steps.terminated | steps.truncated
        begins = np.flatnonzero(steps.first).tolist()
        bounds: set[int] = {len(ends), *(np.flatnonzero(ends) + 1).tolist(), *begins}
        start = 0
        for stop in sorted(bound for bound in bounds if bound > 0):
            if lane.breaks(steps, start):
                yield int(times[start]) - 1, self._finished(lane, cut=True)
            lane.add(jax.tree.map(lambda x, a=start, b=stop: x[a:b], steps), version)
            if ends[stop - 1]:
                yield int(times[stop - 1]), self._finished(lane, cut=False)
            start = stop

    def _finished(self, lane: Lane, cut: bool) -> Episode:
        """The open episode of a lane."""
        steps, versions = lane.take()
        # An episode of n steps has n + 1 observations: the successor of the last step comes last.
        seen = jax.tree.map(
            lambda x, after: np.concatenate([x, after[-1:]]),
            steps.observation,
            steps.next_observation,
        )
        truncated = steps.truncated.copy()
        if cut:
            truncated[-1] = True
        infos = {VERSION: versions}
        if steps.log_probability is not None:
            infos[LOG_PROBABILITY] = steps.log_probability
        if SAMPLED_ACTION in self.writer.metadata.infos:
            infos[SAMPLED_ACTION] = steps.action
        return Episode(
            observations=self._codec.own_observations(seen),
            actions=self._codec.own_actions(steps.action),
            rewards=steps.reward,
            terminations=steps.terminated,
            truncations=truncated,
            infos=infos,
            source=self.source,
            cut=cut,
            begun=bool(steps.first[0]),
        )

    def close(self, cut: bool = True) -> None:
        """Writes open episodes as cut, unless `cut` is false; closes the dataset."""
        for _, lane in sorted(self._lanes.items()):
            if lane.pieces and cut:
                self.writer.write(self._finished(lane, cut=True))
        self.writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        begun = self.writer.episodes or any(lane.pieces for lane in self._lanes.values())
        if error is None and begun:
            self.close()
        else:
            self.writer.abandon()


def record(
    folder: str | Path,
    env: Env,
    sources: tuple[Source, ...],
    *,
    log_probabilities: bool,
) -> Recorder:
    """A recorder of environments like `env` into a new dataset; it starts with the first source."""
    observation, action, spec = own_spaces(env)
    infos = (VERSION,)
    if log_probabilities:
        infos += (LOG_PROBABILITY,)
        if isinstance(env.spec.action, Continuous) and env.spec.action.bounded:
            infos += (SAMPLED_ACTION,)
    metadata = Metadata(observation, action, env.spec.id, spec, sources, infos)
    return Recorder(Writer(folder, metadata))


def own_spaces(env: Env) -> tuple[Space, Space, str | None]:
    """(observation, action, Gymnasium's description) of the environment itself, or, if those are
    unknown, of the environment as algorithms see it."""
    with contextlib.suppress(Exception):  # a single environment may fail to be made in any way
        assert env.single is not None
        with env.single() as single:
            codec = Codec(single.observation_space, single.action_space, env.spec.id)
            if (codec.observation, codec.action) == (env.spec.observation, env.spec.action):
                described = single.spec.to_json() if single.spec is not None else None
                return single.observation_space, single.action_space, described
    return *spaces_of(env.spec), None
