"""A trained policy: maps an environment's own observations to its own actions."""

from collections.abc import Mapping
from typing import Any, Literal, overload

import jax
import numpy as np
from gymnasium import spaces

from dovetail.data.spaces import Space
from dovetail.envs.spaces import SpaceMap, space_map
from dovetail.errors import UserError
from dovetail.evaluation.programs import Leaves, loaded_program
from dovetail.evaluation.space_record import leaves, short, space_from_json

State = tuple[np.ndarray, ...]
"""The memory of a recurrent policy, as `Policy.predict` returns it."""


class Policy:
    """A trained policy, as returned by `dovetail.load`."""

    algorithm: str
    """The class name of the algorithm that trained it."""
    env: str
    """The training environment: "backend:name"."""
    observation_space: Space
    """The environment's own observations."""
    action_space: Space
    """The environment's own actions."""
    mean_return: float | None
    """The mean greedy return of its evaluation; None if it was not evaluated."""
    env_steps: int
    """Number of environment steps it was trained for."""
    updates: int
    """Number of learner updates: the version of the weights."""

    def __init__(self, record: Mapping[str, Any], weights: Leaves, carry: Leaves) -> None:
        self.algorithm, self.env = record["algorithm"], record["env"]
        self.mean_return = record["return"]
        self.env_steps, self.updates = record["env_steps"], record["updates"]
        self.observation_space = space_from_json(record["spaces"]["observation"])
        self.action_space = space_from_json(record["spaces"]["action"])
        mapped = record["spaces"]["mapped"]
        seen = self.observation_space if mapped else spaces.Discrete(1)
        self._map: SpaceMap = space_map(seen, self.action_space, self.env)
        self._inputs = (
            None if mapped else [np.dtype(str(entry["dtype"])) for entry in record["inputs"]]
        )
        self._weights, self._carry = jax.device_put(weights), carry
        self._version = record["versions"]["jax"]
        self._programs: dict[str, Any] = record["programs"]
        self._compiled: dict[str, Any] = {}
        self.seed(0)
        self._compile("greedy")

    def seed(self, seed: int) -> None:
        """Starts the random numbers of sampled actions anew."""
        self._generator = np.random.default_rng(seed)

    @overload
    def predict(
        self,
        observation: Any,
        state: State | None = None,
        episode_start: Any = None,
        deterministic: bool = True,
        *,
        reward: Any = None,
        return_log_prob: Literal[False] = False,
    ) -> tuple[Any, State | None]: ...

    @overload
    def predict(
        self,
        observation: Any,
        state: State | None = None,
        episode_start: Any = None,
        deterministic: bool = True,
        *,
        reward: Any = None,
        return_log_prob: Literal[True],
    ) -> tuple[Any, State | None, Any]: ...

    def predict(
        self,
        observation: Any,
        state: State | None = None,
        episode_start: Any = None,
        deterministic: bool = True,
        *,
        reward: Any = None,
        return_log_prob: bool = False,
    ) -> tuple[Any, State | None] | tuple[Any, State | None, Any]:
        """Returns (action, state) for the environment's observation, or for a batch of them.

        A batch is what a Gymnasium vector environment shows: every array has one more axis in
        front. Actions are the environment's own, within its bounds. They are greedy, or sampled as
        in training unless `deterministic`.

        A recurrent policy has a state: pass the returned one at the next step, and None at the
        start of an episode. In a batch, `episode_start` [B] marks the environments that start one.
        The state of other policies is None. `reward` [B] is the reward of the previous action, for
        policies that use it.

        With `return_log_prob` the result is (action, state, log-probability). It is that of a
        sampled action; for continuous ones the log-density before they are scaled to the bounds.
        """
        raw, size = self._batch(observation)
        count = 1 if size is None else size
        carry = self._carried(state, size)
        began = state is None if episode_start is None else episode_start
        first = np.broadcast_to(np.asarray(began, np.bool_), count)
        rewards = np.broadcast_to(np.asarray(0 if reward is None else reward, np.float32), count)
        given = (self._weights, carry, self._encoded(raw), rewards, first)
        log_prob: Any = None
        if deterministic:
            if return_log_prob:
                raise UserError(
                    "The log-probability is that of a sampled action: give deterministic=False."
                )
            action, after = self._compile("greedy")(*given)
        else:
            act = self._sampling(return_log_prob)
            keys = self._generator.integers(2**32, size=(count, 2), dtype=np.uint32)
            action, log_prob, after = act(*given, keys)
        chosen = np.asarray(self._map.decode(np.array(action)), self.action_space.dtype)
        memory = tuple(np.asarray(leaf) for leaf in after) or None
        if size is None:
            chosen = chosen[0]
            memory = None if memory is None else tuple(leaf[0] for leaf in memory)
        if not return_log_prob:
            return chosen, memory
        return chosen, memory, np.asarray(log_prob) if size is not None else np.asarray(log_prob)[0]

    def __repr__(self) -> str:
        spaces = f"{short(self.observation_space)} → {short(self.action_space)}"
        value = "not evaluated"
        if self.mean_return is not None:
            value = f"mean return {self.mean_return:.4g}"
        where = f"{self.algorithm} on {self.env}"
        return f"Policy({where}, step {self.env_steps:,}, {value}: {spaces})"

    def _compile(self, name: str) -> Any:
        if name not in self._compiled:
            self._compiled[name] = loaded_program(self._programs[name], self._version)
        return self._compiled[name]

    def _sampling(self, return_log_prob: bool) -> Any:
        if "sample" not in self._programs:
            raise UserError(
                f"The policy of {self.algorithm} was exported without its act, so its actions "
                "cannot be sampled: give deterministic=True."
            )
        if return_log_prob and not self._programs["sample"]["log_prob"]:
            raise UserError(
                f"{self.algorithm} does not tell the probabilities of its actions: leave out "
                "return_log_prob."
            )
        return self._compile("sample")

    def _batch(self, observation: Any) -> tuple[Any, int | None]:
        """The observation as a batch, and its size; None for a single one."""
        found: dict[tuple[str | int, ...], np.ndarray] = {}
        sizes: set[int | None] = set()
        for path, space in leaves(self.observation_space):
            array = self._array(_at(observation, path, self.env), path, space)
            single = array.shape == space.shape
            sizes.add(None if single else len(array))
            found[path] = array[None] if single else array
        if len(sizes) > 1:
            raise UserError(
                f"The arrays of the observation for {self.env} are not of one batch: give every "
                "one of them the same first axis, or none of them one."
            )
        return _rebuilt(self.observation_space, found, ()), sizes.pop()

    def _array(self, value: Any, path: tuple[str | int, ...], space: Space) -> np.ndarray:
        what = f"The observation's part {_name(path)}" if path else "The observation"
        try:
            array = np.asarray(value)
            fits = array.dtype.kind in "biuf"
        except ValueError:  # rows of different lengths
            array, fits = np.zeros(0), False
        if not fits:
            raise UserError(
                f"{what} is a {type(value).__name__} without numbers in rows, but the policy for "
                f"{self.env} takes {short(space)}."
            )
        if array.shape != space.shape and array.shape[1:] != space.shape:
            raise UserError(
                f"{what} has shape {array.shape}, but the policy for {self.env} takes "
                f"{space.shape}, or a batch of them with one more axis in front."
            )
        if array.shape != space.shape and len(array) == 0:
            raise UserError(f"{what} is empty, but the policy for {self.env} takes {short(space)}.")
        if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            low = np.asarray(space.start)
            counts = space.n if isinstance(space, spaces.Discrete) else space.nvec
            if np.any(array < low) or np.any(array >= low + counts):
                raise UserError(
                    f"{what} holds {array.ravel()[:5].tolist()}, which is outside {space}."
                )
        return array

    def _encoded(self, raw: Any) -> Leaves:
        """The arrays that the programs take; an environment without spaces shows just these."""
        if self._inputs is None:
            return tuple(jax.tree.leaves(self._map.encode(raw)))
        pairs = zip(jax.tree.leaves(raw), self._inputs, strict=True)
        return tuple(np.asarray(leaf, dtype) for leaf, dtype in pairs)

    def _carried(self, state: Any, size: int | None) -> Leaves:
        count = 1 if size is None else size
        if state is None:
            return tuple(np.broadcast_to(x, (count, *np.shape(x))) for x in self._carry)
        lead = () if size is None else (size,)
        given = tuple(map(np.shape, state))
        if given != tuple((*lead, *np.shape(x)) for x in self._carry):
            of = "one observation" if size is None else f"a batch of {size} observations"
            raise UserError(
                f"The state does not belong to {of}: its arrays have the shapes "
                f"{', '.join(map(str, given))}; pass the state that predict returned for the step "
                "before, or None at the start of an episode."
            )
        return tuple(x[None] for x in state) if size is None else tuple(state)


def _at(observation: Any, path: tuple[str | int, ...], env: str) -> Any:
    """The array of an observation at `path`."""
    found: Any = observation
    for number, part in enumerate(path):
        if isinstance(part, str):
            there = isinstance(found, Mapping) and part in found
        else:
            there = isinstance(found, tuple | list) and part < len(found)
        if not there:
            where = f"part {_name(path[:number])}" if number else "observation"
            kind = f"a dict with the key {part!r}" if isinstance(part, str) else "a tuple"
            raise UserError(
                f"The {where} is a {type(found).__name__}, but the policy for {env} takes {kind}: "
                "pass the environment's own observation."
            )
        found = _entry(found, part)
    return found


def _entry(tree: Any, part: Any) -> Any:
    return tree[part]


def _name(path: tuple[str | int, ...]) -> str:
    return repr(".".join(map(str, path)))


def _rebuilt(space: Space, found: Mapping[Any, np.ndarray], path: tuple[str | int, ...]) -> Any:
    """The observation with these arrays."""
    if isinstance(space, spaces.Dict):
        return {k: _rebuilt(part, found, (*path, k)) for k, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_rebuilt(p, found, (*path, i)) for i, p in enumerate(space.spaces))
    return found[path]
