"""What a user implements.

An algorithm is a frozen dataclass of options with a few pure functions and one method,
`iteration`: the body of the training loop, written as if everything were in one place. The
operations of `rl` (`boundaries.py`) are the boundaries between the loop's sides; the rest is plain
JAX. Nothing here says where anything runs.
"""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax

from dovetail.boundaries import RL, Params
from dovetail.envs.interface import Continuous, Discrete, EnvSpec, MultiDiscrete
from dovetail.errors import UserError
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
    """What an algorithm does about trajectories that older weights have made."""

    name: str
    """In words: "nothing", "the clipped ratio", "V-trace"."""
    staleness: int | None
    """How many versions old a trajectory may be; None for any number."""


NO_CORRECTION = Correction("nothing", 0)
"""On-policy: learns only from what its present weights did."""


@dataclass(frozen=True)
class Task:
    """What an algorithm is asked to solve, and how much of it."""

    env: EnvSpec
    num_envs: int
    """Environments whose steps make one update."""
    steps: int
    all_envs: int = 0
    """Environments in all; as many unless given."""
    shards: int = 1
    """Equal parts in which a replay is kept."""
    data: DataSpec | None = None
    """Recorded steps to learn from, if any."""
    online: bool = True
    """Whether it acts in the environment; if not, all it learns from is recorded."""
    served: Served | None = None
    """The servers that keep its replay; None if it is a part of the state."""

    def __post_init__(self) -> None:
        if self.all_envs == 0:
            object.__setattr__(self, "all_envs", self.num_envs)

    def replay(self, table: Table, example: Any) -> Replay:
        """An empty replay for rows like `example` of every environment."""
        if self.served is not None:
            return RemoteReplay.reached(table, example, self.all_envs, self.served)
        return DeviceReplay.empty(table, example, self.all_envs, self.shards)

    def recorded(self, example: Any, window: int) -> Data | tuple[()]:
        """Room for the recorded steps, in rows like `example`; nothing if there are none."""
        return self.data.empty(example, window) if self.data is not None else ()


@dataclass(frozen=True)
class Algorithm:
    """A reinforcement-learning algorithm: options as fields, pure functions as methods.

    Every field of a subclass is an option; the string beneath it is its help text.
    """

    actions: ClassVar[tuple[type, ...]] = (Discrete, MultiDiscrete, Continuous)
    """The kinds of action space it can act in."""
    correction: ClassVar[Correction] = NO_CORRECTION
    """What it corrects with, and so which staleness it bears."""
    takes_data: ClassVar[bool] = False
    """Whether it can learn from recorded data."""
    needs_data: ClassVar[bool] = False
    """Whether it is made for recorded data, and does not begin without."""

    @property
    def offline_steps(self) -> int:
        """Gradient steps of an iteration in which nothing is acted: what such a run counts."""
        return 1

    @property
    def recorded_window(self) -> int:
        """Steps of an item of recorded data."""
        return 1

    @property
    def recorded_draws_each(self) -> int:
        """Recorded items that an iteration draws."""
        return 1

    @property
    def task(self) -> Task:
        """What it was bound to by `bind`."""
        try:
            return self.__dict__["_task"]
        except KeyError:
            raise UserError(
                f"{type(self).__name__} is not bound to a task yet: call bind(task) first."
            ) from None

    def bind(self, task: Task) -> Self:
        """The same options, with `self.task` set; refused if it cannot act in the task's space."""
        if not isinstance(task.env.action, self.actions):
            able = " or ".join(kind.__name__ for kind in self.actions)
            raise UserError(
                f"{type(self).__name__} acts in {able} action spaces, but {task.env.id} has "
                f"{task.env.action}: choose another algorithm or environment."
            )
        bound = copy.copy(self)
        bound.__dict__["_task"] = task
        return bound

    def init(self, key: jax.Array) -> State:
        """The learner's state: parameters, optimizer, counters, and a key of its own."""
        raise NotImplementedError(f"{type(self).__name__} does not define init(key).")

    def initial_carry(self) -> Carry:
        """One environment's carry at the start of an episode; empty unless recurrent."""
        return ()

    def acting(self, state: State) -> Params:
        """What acting needs of the learner's state; what evaluation and export use."""
        return state.params

    def act(
        self, params: Params, carry: Carry, timestep: Timestep, key: jax.Array
    ) -> tuple[Any, Any, Carry]:
        """(action, extras, carry) for one environment while training."""
        raise NotImplementedError(f"{type(self).__name__} does not define act(…).")

    def greedy(self, params: Params, carry: Carry, timestep: Timestep) -> tuple[Any, Carry]:
        """(action, carry) for one environment when evaluated: the best action, no exploration."""
        raise NotImplementedError(f"{type(self).__name__} does not define greedy(…).")

    def act_batch(
        self, params: Params, carry: Carry, timestep: Timestep, keys: jax.Array
    ) -> tuple[Any, Any, Carry]:
        """(action, extras, carry) for a whole batch, every leaf [B, …]: what runs in the place of
        a mapped `act`, if it is defined. How many environments make a batch is the plan's."""
        raise NotImplementedError(f"{type(self).__name__} does not define act_batch(…).")

    def greedy_batch(self, params: Params, carry: Carry, timestep: Timestep) -> tuple[Any, Carry]:
        """(action, carry) for a whole batch: what runs in the place of a mapped `greedy`."""
        raise NotImplementedError(f"{type(self).__name__} does not define greedy_batch(…).")

    def reset_carry(self, carry: Carry, first: jax.Array) -> Carry:
        """A batch's carry [B, …] with the slots where an episode begins, `first` [B], reset.

        Define it where less is to be done than to write `initial_carry()` there: of a cache it is
        enough to forget the lengths.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define reset_carry(…).")

    def log_prob(self, params: Params, carry: Carry, timestep: Timestep, action: Any) -> jax.Array:
        """The log-probability, or density, with which `act` takes an action. Where `act` draws by
        one, its extras have it too, as `log_prob`: that is what recordings keep."""
        raise NotImplementedError(f"{type(self).__name__} does not define log_prob(…).")

    def recorded_row(self, rows: Any) -> Any:
        """What it keeps of recorded rows (`dovetail.data.Rows`), in the structure of its own."""
        raise NotImplementedError(f"{type(self).__name__} does not define recorded_row(rows).")

    def go_online(self, state: State, fresh: State) -> State:
        """What it learned from recorded data, with the `replay` of a fresh state to act into."""
        return state._replace(replay=fresh.replay, data=fresh.data)

    def iteration(self, rl: RL, state: State) -> tuple[State, Metrics]:
        """One pass of the training loop: (new state, metrics)."""
        raise NotImplementedError(f"{type(self).__name__} does not define iteration(rl, state).")
