"""Restores a resumed run from its last checkpoint, in the phase that wrote it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from dovetail.errors import UserError
from dovetail.replay.data import without_data
from dovetail.run.checkpoint import Checkpoints, DamagedCheckpoint
from dovetail.training.announcing import accepted
from dovetail.training.changes import record
from dovetail.training.loop import Reached
from dovetail.training.prepare import RunStart
from dovetail.training.start import shapes


class Started(NamedTuple):
    """The state with which a phase starts."""

    state: Any
    actor: Any
    """The actors' state; None after an offline phase."""
    reached: Reached


def restored(
    start: RunStart, checkpoints: Checkpoints, tell: Callable[[str], None]
) -> tuple[int, Started | None]:
    """Returns (index of the phase to continue, its starting state; None for a fresh one).

    Without a chosen checkpoint it is the latest intact one. A run that was killed before its first
    checkpoint begins anew.
    """
    steps = checkpoints.steps()
    if start.checkpoint is not None:
        return _restored(start, checkpoints, start.checkpoint)
    # A finished run had checkpoints, which are missing now: that is an error.
    if not steps and not (start.run.path / "summary.json").exists():
        accepted()
        start.run.write_json("config.json", start.config)
        tell(f"{start.run.path} has no checkpoint yet: it begins anew, from its config.json.")
        return 0, None
    while len(steps) > 1:
        try:
            return _restored(start, checkpoints, steps[-1])
        except DamagedCheckpoint as error:
            damage = str(error).partition(";")[0]
            tell(f"{damage}; the run goes on from checkpoint {steps[-2]} instead.")
            steps.pop()
    return _restored(start, checkpoints, steps[0] if steps else None)


def _restored(start: RunStart, checkpoints: Checkpoints, step: int | None) -> tuple[int, Started]:
    config, phases = start.config, start.phases
    expect = {"algorithm": config["algorithm"], "options": config["options"]}
    at = 0
    if start.recorded is not None:
        acted = checkpoints.meta(step)["online"]
        at = next((i for i, one in enumerate(phases) if one.phase.online == acted), 0)
    prepared = phases[at]
    plan, env = prepared.planned.plan, prepared.planned.env
    like = shapes(prepared.algorithm, env.jax, plan.num_envs, start.settings.seeds)
    actor = like[1] if prepared.phase.online else ()
    tree, meta = checkpoints.restore(
        {"state": without_data(like[0]), "actor": actor}, step, expect=expect
    )
    reached = Reached(
        meta["updates"], meta["env_steps"], meta["seconds"], meta["time_to_threshold"]
    )
    _refuse_finished(start, reached)
    if start.changed:
        entry = record(start.changed, reached.updates, reached.env_steps)
        config["changes"] = [*config.get("changes", ()), entry]
    accepted()
    start.run.write_config(config)  # the total or options may have changed
    if not prepared.phase.online:
        over = reached.env_steps >= prepared.phase.end
        return min(at + over, len(phases) - 1), Started(tree["state"], None, reached)
    return at, Started(tree["state"], tree["actor"], reached)


def _refuse_finished(start: RunStart, reached: Reached) -> None:
    steps = start.last.phase.end
    try:
        ended = start.run.summary.get("final_return") is not None or start.silent is not None
    except UserError:  # a damaged summary.json, which this start will replace
        ended = False
    if reached.env_steps >= steps and ended:
        option = "--online-steps" if start.config.get("online_steps") else "--total-steps"
        raise UserError(
            f"{start.run.path} has taken {reached.env_steps:,} steps already, and its total is "
            f"{steps:,}: give a larger one with {option}."
        )
