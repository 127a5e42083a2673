"""Recording a training: an algorithm that also hands its trajectories to the learner, and a runtime
that passes them on to a `dovetail.data.Recorder`.

The trajectory of the last iteration becomes a part of the learner's state, by a `gather` like any
other, so every policy carries it and no runtime knows of it. It is taken out again before anyone
else sees the state: checkpoints, evaluations and exports are those of the algorithm itself.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np

from dovetail.algorithm import RL, Algorithm, Metrics, Params, Timestep, Trajectory
from dovetail.batching import act_for_one
from dovetail.data.episode import Source
from dovetail.data.recorder import Lanes, Recorder, Steps, record
from dovetail.envs.resolve import Env
from dovetail.errors import UserError
from dovetail.playing import knows_probabilities
from dovetail.runtime.report import Part, Pending, Report, joined

jex.source_info_util.register_exclusion(os.path.abspath(__file__))  # no user's line is here


class RecordedState(NamedTuple):
    """A learner's state, and what was lived through in the last iteration."""

    state: Any
    lived: Steps
    """Leaves [T, B, …], as `Recorder.add` takes them."""


def recorded(algorithm: Algorithm) -> Algorithm:
    """The same algorithm, of a class that keeps what it lives through in its state."""
    kind = type(algorithm)
    made = object.__new__(type(kind.__name__, (_Recorded, kind), {"__module__": kind.__module__}))
    made.__dict__.update(algorithm.__dict__)
    return made


class _Recorded(Algorithm):
    """Put before an algorithm's own class."""

    def init(self, key: jax.Array) -> RecordedState:
        """Nothing was lived through yet."""
        state = super().init(key)
        return RecordedState(state, nothing_lived(self, state))

    def acting(self, state: Any) -> Params:
        """That of the algorithm's own state."""
        return super().acting(state.state if isinstance(state, RecordedState) else state)

    def iteration(self, rl: RL, state: Any) -> tuple[Any, Metrics]:
        """The algorithm's own; what it unrolls is gathered beside it."""
        if not isinstance(state, RecordedState):
            return super().iteration(rl, state)
        watching = _Watching(rl)
        new, metrics = super().iteration(watching, state.state)  # type: ignore[arg-type]
        if len(watching.seen) != 1:
            raise UserError(
                f"{type(self).__name__} unrolls {len(watching.seen)} times in an iteration, and "
                "--record takes what is unrolled once: leave it out."
            )
        return RecordedState(new, rl.gather(_steps(watching.seen[0]))), metrics


class _Watching:
    """An `rl` that keeps what is unrolled."""

    def __init__(self, rl: RL) -> None:
        self._rl = rl
        self.seen: list[Trajectory] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rl, name)

    def unroll(self, act: Any, params: Params, length: int, bootstrap: Any = None) -> Trajectory:
        """Unrolls, and keeps it."""
        self.seen.append(self._rl.unroll(act, params, length, bootstrap))
        return self.seen[-1]


class _Unrolling(Exception):
    """Ends an iteration that is only to tell what it unrolls."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length


class _Asking:
    """An `rl` that is only asked how long an unroll is; any other boundary changes nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda tree, *more: tree

    def unroll(self, act: Any, params: Params, length: int, bootstrap: Any = None) -> Any:
        raise _Unrolling(length)


def nothing_lived(algorithm: Algorithm, state: Any) -> Steps:
    """Zeros where the steps of an iteration of a bound algorithm will stand."""
    plain = _plain(algorithm)
    try:
        jax.eval_shape(lambda state: plain.iteration(_Asking(), state), state)  # type: ignore[arg-type]
    except _Unrolling as found:
        length = found.length
    else:
        raise UserError(
            f"{type(algorithm).__name__} does not unroll, so there is nothing to --record: leave "
            "it out."
        )

    def acted(state: Any, key: jax.Array) -> tuple[Any, Any]:
        seen = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), plain.task.env.observation)
        timestep = Timestep(seen, jnp.float32(0), jnp.bool_(True))
        return act_for_one(plain)(plain.acting(state), plain.initial_carry(), timestep, key)[:2]

    action, extras = jax.eval_shape(acted, state, jax.random.key(0))

    def zeros(leaf: Any) -> jax.Array:
        return jnp.zeros((length, plain.task.num_envs, *leaf.shape), leaf.dtype)

    number, flag = (jax.ShapeDtypeStruct((), kind) for kind in (jnp.float32, jnp.bool_))
    chance = jax.tree.map(zeros, getattr(extras, "log_prob", None))
    flags = {name: zeros(flag) for name in ("terminated", "truncated", "first", "valid")}
    before, after = (jax.tree.map(zeros, plain.task.env.observation) for _ in range(2))
    return Steps(
        observation=before,
        action=jax.tree.map(zeros, action),
        reward=zeros(number),
        next_observation=after,
        log_probability=chance,
        **flags,
    )


def _plain(algorithm: Algorithm) -> Algorithm:
    """The algorithm itself, without what records it."""
    if not isinstance(algorithm, _Recorded):
        return algorithm
    made = object.__new__(type(algorithm).__mro__[2])
    made.__dict__.update(algorithm.__dict__)
    return made


def _steps(trajectory: Trajectory) -> Steps:
    named = {name: getattr(trajectory, name) for name in Steps._fields[:-1]}
    return Steps(**named, log_probability=getattr(trajectory.extras, "log_prob", None))


class RecordingRuntime:
    """A runtime whose learner's state is the algorithm's own; what is lived through is recorded.

    One iteration goes on at a time, else only the last one's steps would be seen.
    """

    def __init__(self, runtime: Any, algorithm: Algorithm, recorder: Recorder) -> None:
        """`algorithm` is bound, and the one that the user gave."""
        self._runtime, self._algorithm, self.recorder = runtime, algorithm, recorder
        self._update = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def prepare(self, state: Any, actor: Any) -> None:
        """Starts to compile for states of these shapes."""
        lived = jax.eval_shape(lambda state: nothing_lived(self._algorithm, state), state)
        self._runtime.prepare(RecordedState(state, lived), actor)

    def load(self, state: Any, actor: Any, *, turn: int = 0, **more: Any) -> Any:
        """Sets what iteration number `turn` starts from."""
        self._update = turn
        lived = nothing_lived(self._algorithm, state)
        return self._runtime.load(RecordedState(state, lived), actor, turn=turn, **more)

    def advance(self, iterations: int) -> Pending:
        """Begins the first of that many iterations; the others begin while they are waited for."""
        update, self._update = self._update, self._update + iterations
        updates = range(update, self._update)
        return _Recording(self._runtime, self._runtime.advance(1), self.recorder, updates)


class _Recording(NamedTuple):
    """Iterations on their way, to be recorded."""

    runtime: Any
    first: Pending
    recorder: Recorder
    updates: range
    """Their numbers: as many updates the newest weights have seen."""

    def wait(self) -> Report:
        """Waits until they are done, and records each while the next goes on."""
        reports: list[Report] = []
        pending = self.first
        for update in self.updates:
            reports.append(pending.wait())
            lived: Steps = jax.tree.map(np.asarray, reports[-1].state(replay=False).lived)
            if update != self.updates[-1]:
                pending = self.runtime.advance(1)
            self._record(lived, reports[-1].parts or [Part(0, update, 0)], update)
        state = reports[-1].state
        return dataclasses.replace(
            joined(reports), state=lambda replay=True: state(replay=replay).state
        )

    def _record(self, lived: Steps, parts: Sequence[Part], update: int) -> None:
        count = lived.reward.shape[1]
        each = count // len(parts)  # environments of a part
        actor, turn, behind = (np.repeat(column, each) for column in zip(*parts, strict=True))
        env = each * actor + np.arange(count) % each
        self.recorder.add(lived, update - behind, Lanes(env, turn))


def record_training(folder: str, algorithm: Algorithm, env: Env, source: Source) -> Recorder:
    """The recorder of a bound algorithm's training."""
    known = knows_probabilities(algorithm, explore=True)
    return record(folder, env, (source,), log_probabilities=known)


def not_recorded(policy: Any) -> UserError:
    """What to say of a policy that does not bring all steps to one learner."""
    return UserError(
        f"--record takes what one learner gathers, and {type(policy).__name__} does not bring it "
        "all steps: choose another policy, as local or actor-learner."
    )
