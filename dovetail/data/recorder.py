"""Recording: the trajectories of several environments, written as episodes when they end.

Trajectories are time-major, [T, B, …], as `unroll` makes them; each is told to `Recorder.add` in
the order in which the environments lived through them. What is open when the recording ends is
written too, marked as cut; what was under way when it began is marked as not begun. Episodes too
long to be kept in memory are written in pieces, marked as both.
"""

import contextlib
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
"""Bytes that all episodes under way may take; beyond, what there is of the largest is written."""


class Steps(NamedTuple):
    """What `Recorder.add` takes, a part of `Trajectory`: leaves [T, B, …]."""

    observation: Any
    action: Any
    reward: Any
    terminated: Any
    truncated: Any
    first: Any
    valid: Any
    next_observation: Any
    log_probability: Any = None
    """None where it is not known."""


class Recorder:
    """Writes episodes as they end: in the order of time, then of environments."""

    def __init__(self, writer: Writer, num_envs: int) -> None:
        self.writer = writer
        self.source = 0
        """Which of the dataset's sources the next trajectories come from."""
        metadata = writer.metadata
        self._codec = Codec(metadata.observation, metadata.action, metadata.environment)
        self._open: list[list[tuple[Steps, int]]] = [[] for _ in range(num_envs)]
        """Each environment's episode so far, in pieces; of what came next only the last row."""
        self._bytes = [0] * num_envs
        """What each of these takes."""

    def add(self, trajectory: Any, version: int | Array = -1) -> None:
        """Records a trajectory, which has the fields of `Steps`, of weights of this `version`: one
        for all, or one for each environment."""
        steps = Steps(*(getattr(trajectory, name) for name in Steps._fields))
        lanes: Steps = jax.tree.map(lambda x: np.swapaxes(np.asarray(x), 0, 1), steps)
        ended: list[tuple[int, int, Episode]] = []
        versions = np.broadcast_to(version, len(self._open)).tolist()
        for env in range(len(self._open)):
            valid = np.flatnonzero(lanes.valid[env])
            if len(valid):
                lane = jax.tree.map(lambda x, e=env, v=valid: x[e][v], lanes)
                ended += self._follow(env, lane, valid, versions[env])
        for _, _, episode in sorted(ended, key=lambda one: one[:2]):
            self.writer.write(episode)
        while sum(self._bytes) > OPEN_BYTES:
            largest = max(range(len(self._bytes)), key=self._bytes.__getitem__)
            self.writer.write(self._finished(largest, cut=True))

    def _follow(
        self, env: int, lane: Steps, times: Array, version: int
    ) -> list[tuple[int, int, Episode]]:
        """Goes on with one environment; what ended, with when and where."""
        found: list[tuple[int, int, Episode]] = []
        ends = lane.terminated | lane.truncated
        begins = np.flatnonzero(lane.first).tolist()
        bounds: set[int] = {len(ends), *(np.flatnonzero(ends) + 1).tolist(), *begins}
        start = 0
        for stop in sorted(bound for bound in bounds if bound > 0):
            if self._open[env] and self._breaks(env, lane, start):
                found.append((int(times[start]) - 1, env, self._finished(env, cut=True)))
            part = jax.tree.map(lambda x, a=start, b=stop: x[a:b], lane)
            after = jax.tree.map(lambda x: x[-1:].copy(), part.next_observation)
            part = part._replace(next_observation=after)
            self._open[env].append((part, version))
            self._bytes[env] += sum(leaf.nbytes for leaf in jax.tree.leaves(part))
            if ends[stop - 1]:
                found.append((int(times[stop - 1]), env, self._finished(env, cut=False)))
            start = stop
        return found

    def _breaks(self, env: int, lane: Steps, start: int) -> bool:
        """Whether the open episode does not go on here: its environment was set up anew, or an
        asynchronous policy brought another environment's steps."""
        before, _ = self._open[env][-1]
        same = jax.tree.map(
            lambda seen, after: np.array_equal(seen[start], after[-1]),
            lane.observation,
            before.next_observation,
        )
        return bool(lane.first[start]) or not all(jax.tree.leaves(same))

    def _finished(self, env: int, cut: bool) -> Episode:
        """The environment's open episode as a whole."""
        pieces, self._open[env], self._bytes[env] = self._open[env], [], 0
        steps: Steps = jax.tree.map(lambda *x: np.concatenate(x), *(part for part, _ in pieces))
        seen = jax.tree.map(
            lambda x, after: np.concatenate([x, after[-1:]]),
            steps.observation,
            steps.next_observation,
        )
        truncated = steps.truncated.copy()
        if cut:
            truncated[-1] = True
        versions = [np.full(len(part.reward), version) for part, version in pieces]
        infos = {VERSION: np.concatenate(versions)}
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
        """Writes what is open as cut episodes, unless told to leave it out; closes the dataset."""
        for env, pieces in enumerate(self._open):
            if pieces and cut:
                self.writer.write(self._finished(env, cut=True))
        self.writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if error is None and (self.writer.episodes or any(self._open)):
            self.close()
        else:
            self.writer.abandon()


def record(
    folder: str | Path,
    env: Env,
    num_envs: int,
    sources: tuple[Source, ...],
    *,
    log_probabilities: bool,
) -> Recorder:
    """A recorder of environments like `env` into a new dataset; it begins with the first source."""
    observation, action, spec = own_spaces(env)
    infos = (VERSION,)
    if log_probabilities:
        infos += (LOG_PROBABILITY,)
        if isinstance(env.spec.action, Continuous) and env.spec.action.bounded:
            infos += (SAMPLED_ACTION,)
    metadata = Metadata(observation, action, env.spec.id, spec, sources, infos)
    return Recorder(Writer(folder, metadata), num_envs)


def own_spaces(env: Env) -> tuple[Space, Space, str | None]:
    """(observation, action, Gymnasium's description) of what the environment itself shows and
    takes; of what algorithms see, where that is not known."""
    with contextlib.suppress(Exception):  # whatever keeps a single one from being made
        assert env.single is not None
        with env.single() as single:
            codec = Codec(single.observation_space, single.action_space, env.spec.id)
            if (codec.observation, codec.action) == (env.spec.observation, env.spec.action):
                described = single.spec.to_json() if single.spec is not None else None
                return single.observation_space, single.action_space, described
    return *spaces_of(env.spec), None
