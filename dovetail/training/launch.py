"""Builds the loop of a phase: the runtime for its plan and the initial states."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import jax

from dovetail.data.episode import Source
from dovetail.data.recorder import Recorder
from dovetail.data.recorder import record as record_to
from dovetail.evaluation.play import knows_probabilities
from dovetail.replay.data import Data, is_data, with_data
from dovetail.runtime.interface import Runtime
from dovetail.telemetry.timeline import Timeline
from dovetail.training.loop import Announce, Loop, Reached, Snapshot
from dovetail.training.prepare import PreparedPhase, RunStart
from dovetail.training.recording import Recording
from dovetail.training.restore import Started
from dovetail.training.start import first_state, resumed_keys, shapes


def launch(
    start: RunStart,
    prepared: PreparedPhase,
    started: Started | None,
    record: str | None,
    watchers: Sequence[Callable[[dict[str, float], Timeline], None]],
    announce: Announce | None,
    tell: Callable[[str], None],
    stack: ExitStack,
) -> Loop:
    """Builds the loop of a phase.

    It begins from `started`, the state of a checkpoint or of the previous phase, or from a fresh
    state. `record` is the folder of the dataset to write, if any; `watchers` are called with every
    report; `announce` tells the callbacks of an event; `stack` closes the loop's resources.
    """
    algorithm, settings = prepared.algorithm, start.settings
    reached = Reached() if started is None else started.reached
    runtime = _runtime(start, prepared, tell, stack)
    recording = None
    if record is not None:
        recorder = stack.enter_context(_recorder(start, prepared, record))
        recording = Recording(recorder, prepared.planned.graph, reached.updates)
    feed = data = None
    if start.recorded is not None:
        feed = start.recorded.feed(algorithm)
        stack.callback(feed.close)
        data = feed.take(reached.updates)
    state, actor, keys = _states(start, prepared, started, data)
    actor = runtime.load(
        state,
        actor,
        episode_keys=keys,
        turn=reached.updates,
        watched=acting_leaves(algorithm.acting, state, settings.seeds),
    )
    return Loop(
        runtime,
        Snapshot(lambda replay=True: state, lambda: actor, reached.updates, reached.env_steps),
        reached,
        settings,
        threshold=start.config["threshold"],
        acting=algorithm.acting,
        began=start.began,
        watchers=watchers,
        feed=feed,
        recording=recording,
        announce=announce,
        info=prepared.planned.env.spec.info if prepared.phase.online else (),
        tell=tell,
    )


def _runtime(
    start: RunStart,
    prepared: PreparedPhase,
    tell: Callable[[str], None],
    stack: ExitStack,
) -> Runtime:
    """Creates the runtime of a phase and starts compiling."""
    algorithm, planned, settings = prepared.algorithm, prepared.planned, start.settings
    runtime = prepared.place.runtime(
        planned, start.config["steps"], settings, tell, start.run.path / "replay"
    )
    stack.callback(runtime.close)
    if start.resumed and prepared.place.forgets:
        tell("The replay begins empty: its servers ended with the run (--durable keeps it).")
    runtime.prepare(*shapes(algorithm, planned.env.jax, planned.plan.num_envs, settings.seeds))
    return runtime


def _recorder(start: RunStart, prepared: PreparedPhase, folder: str) -> Recorder:
    """The writer of the phase's dataset."""
    known = knows_probabilities(prepared.algorithm, explore=True)
    return record_to(folder, prepared.planned.env, (_source(start),), log_probabilities=known)


def _source(start: RunStart) -> Source:
    """The origin of the recorded episodes, for the dataset's metadata."""
    config = start.config
    return Source(
        environment=start.last.planned.env.spec.id,
        kind="training",
        run=str(start.run.path),
        algorithm=config["algorithm"],
        seed=config["seed"],
        dovetail=config["versions"]["dovetail"],
    )


def _states(
    start: RunStart, prepared: PreparedPhase, started: Started | None, data: Data | None
) -> tuple[Any, Any, jax.Array | None]:
    """Returns (learner's state, actors' state, keys for the next episodes of host environments).

    The keys are None if the actors' own keys are used.
    """
    algorithm, plan, env = prepared.algorithm, prepared.planned.plan, prepared.planned.env
    state, actor = first_state(
        algorithm, env.jax, plan.num_envs, start.config["seed"], start.settings.seeds, data
    )
    if started is None:
        return state if start.warm is None else start.warm.into(state), actor, None
    if started.actor is not None:
        keys = resumed_keys(started.actor, started.reached.updates) if env.jax is None else None
        return with_data(started.state, data), started.actor, keys
    if prepared.phase.online:
        return algorithm.go_online(started.state, state), actor, None
    return with_data(started.state, data), actor, None


def acting_leaves(acting: Callable[[Any], Any], state: Any, seeds: int) -> list[int]:
    """The positions of the learner's leaves that acting uses; all positions if it uses none."""
    # Seeds share the recorded steps, which have no seed axis.
    axes = jax.tree.map(lambda part: None if is_data(part) else 0, state, is_leaf=is_data)
    traced = jax.make_jaxpr(acting if seeds == 1 else jax.vmap(acting, (axes,)))(state).jaxpr
    read = {id(atom) for equation in traced.eqns for atom in equation.invars}
    read |= {id(atom) for atom in traced.outvars}
    found = [i for i, leaf in enumerate(traced.invars) if id(leaf) in read]
    return found or list(range(len(traced.invars)))
