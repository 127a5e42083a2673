"""The interface that a user implements.

An algorithm is a frozen dataclass of options with a few pure functions and one method,
`iteration`: the body of the training loop, written as if it ran in one process. The operations of
`rl` (`boundaries.py`) are the boundaries between the loop's sides; the rest is plain JAX. Nothing
in an algorithm names a device, a worker or a process.
"""

import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import jax

from dovetail.boundaries import RL, Params
from dovetail.envs.interface import Continuous, Discrete, EnvSpec, MultiDiscrete
from dovetail.errors import UserError, check_option
from dovetail.replay.data import Data, DataSpec
from dovetail.replay.replay import DeviceReplay, Replay
from dovetail.replay.service.remote import RemoteReplay, Served
from dovetail.replay.table import Table
from dovetail.trajectory import Timestep, Trajectory

__all__ = [
    "NO_CORRECTION",
    "RL",
    "Algorithm",
    "Carry",
    "Correction",
    "Metrics",
    "Params",
    "State",
    "Task",
    "Timestep",
    "Trajectory",
]

Carry = Any
State = Any
Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class Correction:
    """How an algorithm corrects for trajectories of stale weights."""

    name: str
    """The correction in words: "nothing", "the clipped ratio", "V-trace"."""
    staleness: int | None
    """Maximum staleness of a trajectory, in versions; None for no limit."""


NO_CORRECTION = Correction("nothing", 0)
"""Strictly on-policy: learns only from trajectories of the current weights."""


@dataclass(frozen=True)
class Task:
    """The environment, batch and budget for which an algorithm is built."""

    env: EnvSpec
    num_envs: int
    """Number of environments whose steps make up one update."""
    steps: int
    """Total environment steps of the run; gradient steps where nothing acts."""
    all_envs: int = 0
    """Number of environments over all actors; `num_envs` unless given."""
    shards: int = 1
    """Number of equal parts into which the replay is split."""
    data: DataSpec | None = None
    """Recorded steps to learn from, if any."""
    online: bool = True
    """Whether the algorithm acts in the environment, or learns from recorded data only."""
    served: Served | None = None
    """The servers that hold the replay; None if the replay is part of the state."""

    def __post_init__(self) -> None:
        check_option("num_envs", self.num_envs, self.num_envs >= 1, "1 or more")
        if self.all_envs == 0:  # a frozen dataclass can set its own field only this way
            object.__setattr__(self, "all_envs", self.num_envs)

    def replay(self, table: Table, example: Any) -> Replay:
        """Returns an empty replay for rows like `example`, one row per environment and step."""
        if self.served is not None:
            return RemoteReplay.reached(table, example, self.all_envs, self.served)
        return DeviceReplay.empty(table, example, self.all_envs, self.shards)

    def recorded(self, example: Any, window: int) -> Data | tuple[()]:
        """Returns space for the recorded steps, in rows like `example`; () without recorded data.

        `window` is the number of steps in one item.
        """
        return self.data.empty(example, window) if self.data is not None else ()


@dataclass(frozen=True)
class Algorithm:
    """A reinforcement-learning algorithm: options as fields, pure functions as methods.

    Every field of a subclass is an option; the string beneath it is its help text.
    """

    actions: ClassVar[tuple[type, ...]] = (Discrete, MultiDiscrete, Continuous)
    """The supported kinds of action space."""
    correction: ClassVar[Correction] = NO_CORRECTION
    """The off-policy correction, and thereby the staleness that the algorithm tolerates."""
    takes_data: ClassVar[bool] = False
    """Whether it can learn from recorded data."""
    needs_data: ClassVar[bool] = False
    """Whether it requires recorded data (an offline algorithm)."""

    num_envs: int = field(default=8, kw_only=True)
    """Environments that feed one update, whatever the strategy."""

    @property
    def offline_steps(self) -> int:
        """Gradient steps per iteration without acting; offline runs count their steps in these."""
        return 1

    @property
    def recorded_window(self) -> int:
        """Number of steps in one item of recorded data."""
        return 1

    @property
    def recorded_draws_each(self) -> int:
        """Number of recorded items drawn per iteration."""
        return 1

    @property
    def task(self) -> Task:
        """The task given to `bind`."""
        try:
            return self.__dict__["_task"]
        except KeyError:
            raise UserError(
                f"{type(self).__name__} is not bound to a task yet: call bind(task) first."
            ) from None

    def bind(self, task: Task) -> Self:
        """Returns a copy with `self.task` set; raises if the action space is not supported."""
        if not isinstance(task.env.action, self.actions):
            able = " or ".join(kind.__name__ for kind in self.actions)
            raise UserError(
                f"{type(self).__name__} acts in {able} action spaces, but {task.env.id} has "
                f"{task.env.action}: choose another algorithm or environment."
            )
        # Not a dataclass field: a field would become an option on the command line.
        bound = copy.copy(self)
        bound.__dict__["_task"] = task
        return bound

    def init(self, key: jax.Array) -> State:
        """The initial state: parameters, optimizer state, counters, and a random key."""
        raise NotImplementedError(f"{type(self).__name__} does not define init(key).")

    def initial_carry(self) -> Carry:
        """One environment's carry at the start of an episode; () unless recurrent."""
        return ()

    def acting(self, state: State) -> Params:
        """The part of the state that acting needs; also used by evaluation and export."""
        return state.params

    def act(
        self, params: Params, carry: Carry, timestep: Timestep, key: jax.Array
    ) -> tuple[Any, Any, Carry]:
        """Returns (action, extras, carry) for one environment during training.

        Written for one environment, without a batch axis; the runtime maps it over the batch.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define act(…).")

    def greedy(self, params: Params, carry: Carry, timestep: Timestep) -> tuple[Any, Carry]:
        """Returns (action, carry) for one environment in evaluation: no exploration."""
        raise NotImplementedError(f"{type(self).__name__} does not define greedy(…).")

    def act_batch(
        self, params: Params, carry: Carry, timestep: Timestep, keys: jax.Array
    ) -> tuple[Any, Any, Carry]:
        """Returns (action, extras, carry) for a whole batch, every leaf [B, …].

        If defined, it replaces the mapped `act`. The plan decides the batch size B.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define act_batch(…).")

    def greedy_batch(self, params: Params, carry: Carry, timestep: Timestep) -> tuple[Any, Carry]:
        """Returns (action, carry) for a whole batch, every leaf [B, …]; replaces the mapped
        `greedy`."""
        raise NotImplementedError(f"{type(self).__name__} does not define greedy_batch(…).")

    def reset_carry(self, carry: Carry, first: jax.Array) -> Carry:
        """Resets the slots of a batch's carry [B, …] where an episode begins (`first` [B]).

        Define it where a reset is cheaper than writing `initial_carry()` into the slots. For a
        KV cache, for example, it is enough to zero the lengths.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define reset_carry(…).")

    def log_prob(self, params: Params, carry: Carry, timestep: Timestep, action: Any) -> jax.Array:
        """The log-probability (or log-density) of `action` under `act`.

        A stochastic `act` also returns it in its extras, as `log_prob`; recordings store that one.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define log_prob(…).")

    def recorded_row(self, rows: Any) -> Any:
        """Converts recorded rows (`dovetail.data.Rows`) to the algorithm's own row structure."""
        raise NotImplementedError(f"{type(self).__name__} does not define recorded_row(rows).")

    def go_online(self, state: State, fresh: State) -> State:
        """Returns the state after offline training, with the empty `replay` and `data` of a fresh
        state, ready to act."""
        return state._replace(replay=fresh.replay, data=fresh.data)

    def iteration(self, rl: RL, state: State) -> tuple[State, Metrics]:
        """One pass of the training loop: returns (new state, metrics)."""
        raise NotImplementedError(f"{type(self).__name__} does not define iteration(rl, state).")
