"""The phases of a run: offline, from recorded data only, and online, with acting."""

from dataclasses import dataclass
from typing import Any

from dovetail.algorithm import Algorithm, Task
from dovetail.envs.resolve import Env
from dovetail.errors import UserError, check_option
from dovetail.replay.data import DataSpec
from dovetail.replay.service.remote import Served
from dovetail.strategies.fused import Fused
from dovetail.strategies.interface import Strategy
from dovetail.strategies.local import Local
from dovetail.training.planning import Planned, default_strategy, resolve_strategy


@dataclass(frozen=True)
class Phase:
    """A part of a run with one strategy."""

    online: bool
    """Whether it acts; if not, its steps are gradient steps."""
    strategy: Strategy
    end: int
    """The run's number of steps at the end of the phase."""


def begins_offline(algorithm: Algorithm, data: bool, online_steps: int) -> bool:
    """Whether a run begins with an offline phase: the algorithm needs data, or acts only later."""
    return data and (algorithm.needs_data or online_steps > 0)


def acts_at_all(algorithm: Algorithm, data: bool, online_steps: int) -> bool:
    """Whether a run has an online phase."""
    return online_steps > 0 or not begins_offline(algorithm, data, online_steps)


def phases(
    algorithm: Algorithm, strategy: Strategy, steps: int, online_steps: int, data: bool
) -> list[Phase]:
    """The phases of a run; the last one uses `strategy`."""
    if not begins_offline(algorithm, data, online_steps):
        return [Phase(True, strategy, steps)]
    if online_steps == 0:
        return [Phase(False, strategy, steps)]
    return [
        # Nothing steps in an offline phase, so everything is one program, whatever acts later.
        Phase(False, Fused(), steps),
        Phase(True, strategy, steps + online_steps),
    ]


def check_steps(steps: int, online_steps: int, data: bool) -> None:
    """Raises on invalid numbers of steps."""
    check_option("total_steps", steps, steps >= 1, "1 or more")
    check_option("online_steps", online_steps, online_steps >= 0, "0 or more")
    if online_steps and not data:
        raise UserError(
            f"--online-steps {online_steps} go on acting after learning from recorded data, but "
            "there are none: give --data, or only --total-steps."
        )


def choose_strategy(
    algorithm: Algorithm,
    strategy: Strategy | str | None,
    env: Any,
    data: bool,
    online_steps: int,
    served: bool = False,
) -> Strategy:
    """Returns the requested strategy, or the default.

    The default is Fused for an offline run and Local with a `served` replay; otherwise it depends
    on the environment.
    """
    if strategy is None and served:
        return Local()
    if strategy is None and begins_offline(algorithm, data, online_steps) and online_steps == 0:
        return Fused()
    return resolve_strategy(strategy, env)


def acting_strategy(strategy: Strategy, env: Any, found: Env) -> Strategy:
    """A strategy with which an offline run can go on acting: not Fused for a host environment."""
    return default_strategy(env) if isinstance(strategy, Fused) and found.jax is None else strategy


def task_of(
    planned: Planned, steps: int, data: DataSpec | None, online: bool, served: Served | None
) -> Task:
    """The algorithm's task in a phase."""
    plan = planned.plan
    of_all = (plan.num_envs, plan.shards, data, online, served)
    return Task(planned.env.spec, plan.update_envs, steps, *of_all)
