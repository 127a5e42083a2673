"""A `HostEnv` over any Gymnasium `VectorEnv`, whatever its autoreset mode.

Steps are checked (shapes, finite numbers) and every failure is reported with the environment's id,
index and step. The common path has no loop over environments and adds a few microseconds.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import jax
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from dovetail.envs.faults import fault
from dovetail.envs.info_values import table
from dovetail.envs.interface import EnvSpec, HostStep, Observation
from dovetail.envs.makers import report_info
from dovetail.envs.processes import ProcessVectorEnv, one_seed
from dovetail.envs.spaces import SpaceMap, space_map
from dovetail.errors import UserError


def autoreset_mode(venv: VectorEnv[Any, Any, Any], env_id: str) -> AutoresetMode:
    """The mode that a vector environment declares in its metadata."""
    # Prefer the attribute: Gymnasium's vectorizers write the mode into shared class metadata.
    mode = getattr(venv, "autoreset_mode", None) or (venv.metadata or {}).get("autoreset_mode")
    if mode is None:
        raise UserError(
            f"{env_id} does not say how it resets finished episodes: set "
            'metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP} (or SAME_STEP '
            "or DISABLED) on its vector environment."
        )
    return AutoresetMode(mode)


_SQUARED = (np.dtype(np.float32), np.dtype(np.float64))
"""Dtypes whose squares one BLAS call can sum."""


class VectorHost:
    """A batch of Gymnasium environments behind Dovetail's interface."""

    def __init__(
        self,
        venv: VectorEnv[Any, Any, Any],
        env_id: str,
        threshold: float | None = None,
        seeding: Callable[[list[int]], Any] | None = None,
        *,
        threads: bool = False,
        first: int = 0,
        info: Sequence[str] = (),
    ) -> None:
        """`seeding` converts the list of seeds into the argument of `venv.reset(seed=…)`; `threads`
        goes into the spec; messages call environment 0 `first`; `info` are keys to report."""
        self._venv = venv
        self._spaces: SpaceMap = space_map(
            venv.single_observation_space, venv.single_action_space, env_id
        )
        self._decode = self._spaces.decode
        mapped = self._spaces
        self.spec = EnvSpec(
            env_id,
            mapped.observation,
            mapped.action,
            threshold,
            threads,
            mapped.bounds,
            tuple(info),
            mapped.spaces,
        )
        report_info(venv, info)
        self.num_envs = int(venv.num_envs)
        self._first = first
        self._process = venv if isinstance(venv, ProcessVectorEnv) else None
        self._action: np.ndarray | None = None
        listed = isinstance(venv, SyncVectorEnv | AsyncVectorEnv | ProcessVectorEnv)
        self._seeding: Callable[[list[int]], Any] = seeding or (list if listed else one_seed)
        self._mode = autoreset_mode(venv, env_id)
        self._finish = {
            AutoresetMode.NEXT_STEP: self._next_step,
            AutoresetMode.SAME_STEP: self._same_step,
            AutoresetMode.DISABLED: self._disabled,
        }[self._mode]
        self._shapes = jax.tree.map(
            lambda leaf: (self.num_envs, *leaf.shape), self._spaces.observation
        )
        self._single = isinstance(self._spaces.observation, jax.ShapeDtypeStruct)
        raw = venv.single_observation_space
        self._as_it_is = self._single and isinstance(raw, gymnasium.spaces.Box)
        self._dtype = self._spaces.observation.dtype if self._as_it_is else None
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._all = np.ones(self.num_envs, np.bool_)
        self._steps = 0
        self._closed = False

    def reset(self, seeds: list[int]) -> Observation:
        """Starts an episode in every environment, environment i seeded with seeds[i]."""
        if len(seeds) != self.num_envs:
            raise UserError(
                f"{self.spec.id} has {self.num_envs} environments but was given {len(seeds)} seeds."
            )
        self._steps = 0
        self._ended = np.zeros(self.num_envs, np.bool_)
        try:
            seed: Any = self._seeding([int(seed) for seed in seeds])
            raw, _ = self._venv.reset(seed=seed)
        except UserError:
            raise
        except Exception as error:
            raise self._failure(error, "reset") from error
        return self._observe(raw, None)

    def step(self, action: np.ndarray) -> HostStep:
        """One transition in every environment."""
        self._steps += 1
        try:
            stepped = self._venv.step(self._decode(action))
        except UserError:
            raise
        except Exception as error:
            raise self._failure(error, "step") from error
        return self._checked(action, stepped)

    def send(self, action: np.ndarray) -> None:
        """Starts one transition in every environment. If the environments are in this process,
        `receive` makes it."""
        if self._process is not None:
            self._steps += 1
            self._process.step_async(self._decode(action))
        self._action = action

    def receive(self) -> HostStep:
        """Waits for the transition started by `send`."""
        action, self._action = self._action, None
        if action is None:
            raise UserError(f"{self.spec.id} was asked for a step's result before the step.")
        if self._process is None:
            return self.step(action)
        return self._checked(action, self._process.step_wait())

    def ready(self) -> bool:
        """Whether `receive` would return without waiting for another process."""
        return self._process is None or self._process.ready()

    def _checked(self, action: np.ndarray, stepped: tuple[Any, ...]) -> HostStep:
        """Checks a step's results and converts them to a `HostStep`."""
        raw, reward, terminated, truncated, infos = stepped
        observation = raw if self._fits(raw) else self._observe(raw, action)
        reward = np.asarray(reward, np.float32)
        if reward.shape != self._ended.shape:
            raise self._wrong(f"returned rewards of shape {reward.shape}, not ({self.num_envs},)")
        if not _is_finite(reward):
            raise self._not_finite("reward", reward, action)
        terminated = np.asarray(terminated, np.bool_)
        # An episode that terminated was not cut short: termination wins.
        truncated = np.greater(truncated, terminated)
        after = self._finish(observation, reward, terminated, truncated, infos)
        if self.spec.info:
            return after._replace(info=table(infos, self.spec.info, self.num_envs))
        return after

    def close(self) -> None:
        """Releases the environments' resources; safe to call twice."""
        if not self._closed:
            self._closed = True
            forced = {"terminate": True} if isinstance(self._venv, AsyncVectorEnv) else {}
            self._venv.close(**forced)

    def _next_step(
        self,
        observation: Observation,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        infos: dict[str, Any],
    ) -> HostStep:
        first = self._ended
        if np.count_nonzero(first):  # some vector environments pay a reward for a reset step
            reward = np.where(first, np.float32(0), reward)
        self._ended = terminated | truncated
        return HostStep(observation, observation, reward, terminated, truncated, first, ~first)

    def _same_step(
        self,
        observation: Observation,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        infos: dict[str, Any],
    ) -> HostStep:
        first = terminated | truncated
        final = observation
        if np.count_nonzero(first):
            final = self._final(observation, np.flatnonzero(first), infos)
        return HostStep(observation, final, reward, terminated, truncated, first, self._all)

    def _disabled(
        self,
        observation: Observation,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        infos: dict[str, Any],
    ) -> HostStep:
        first = terminated | truncated
        final = observation
        if np.count_nonzero(first):
            final = jax.tree.map(np.copy, observation)  # the reset writes into the same buffer
            try:
                raw, _ = self._venv.reset(options={"reset_mask": first.copy()})
            except UserError:
                raise
            except Exception as error:
                raise self._failure(error, "reset") from error
            observation = self._observe(raw, None)
        return HostStep(observation, final, reward, terminated, truncated, first, self._all)

    def _final(
        self, observation: Observation, ended: np.ndarray, infos: dict[str, Any]
    ) -> Observation:
        """`observation` with the true final observations where episodes ended."""
        finals = infos.get("final_obs")
        if finals is None:
            raise self._wrong(
                "ended an episode in autoreset mode same_step without infos['final_obs']", ended[0]
            )
        listed = isinstance(finals, np.ndarray) and finals.dtype == object
        rows = _stack([finals[i] for i in ended]) if listed else _take(finals, ended)
        try:
            last = self._spaces.encode(rows)
        except Exception as error:
            raise self._wrong(
                f"returned a final observation outside its space ({error})"
            ) from error
        if self._single:
            # A copy: `observation` already holds the new episodes' first observations.
            final = observation.copy()
            final[ended] = last
        else:
            final = jax.tree.map(np.copy, observation)
            for whole, part in zip(jax.tree.leaves(final), jax.tree.leaves(last), strict=True):
                whole[ended] = part
        self._check_finite(final, None)
        return final

    def _observe(self, raw: Any, action: np.ndarray | None) -> Observation:
        """The encoded observation, with its shape and finiteness checked."""
        try:
            observation = self._spaces.encode(raw)
        except Exception as error:
            raise self._wrong(f"returned an observation outside its space ({error})") from error
        if self._single and observation.shape != self._shapes:
            raise self._wrong(
                f"returned observations of shape {observation.shape}, but its space and "
                f"{self.num_envs} environments make {self._shapes}"
            )
        self._check_finite(observation, action)
        return observation

    def _fits(self, raw: Any) -> bool:
        """Whether the observation is valid and needs no encoding: the common case."""
        return (
            self._as_it_is
            and type(raw) is np.ndarray
            and raw.dtype == self._dtype
            and raw.shape == self._shapes
            and (raw.dtype == np.uint8 or _is_finite(raw))
        )

    def _check_finite(self, observation: Observation, action: np.ndarray | None) -> None:
        for leaf in (observation,) if self._single else jax.tree.leaves(observation):
            if leaf.dtype != np.uint8 and not _is_finite(leaf):
                raise self._not_finite("observation", leaf, action)

    def _not_finite(self, what: str, values: np.ndarray, action: np.ndarray | None) -> UserError:
        bad = ~np.isfinite(values.reshape(self.num_envs, -1)).all(axis=1)
        index = int(np.flatnonzero(bad)[0])
        value = values[index]
        if action is not None and not np.isfinite(action).all():
            return self._wrong(
                f"was given the action {action[index].tolist()} and returned the {what} "
                f"{value.tolist()}: training has diverged; try a smaller learning rate",
                index,
            )
        return self._wrong(
            f"returned the {what} {value.tolist()}, which is not finite: repair the environment",
            index,
        )

    def _wrong(self, sentence: str, index: int | None = None) -> UserError:
        place = "" if index is None else f"environment {self._first + index} "
        return UserError(f"{self.spec.id}: {place}{sentence} (step {self._steps}).")

    def _failure(self, error: Exception, call: str) -> UserError:
        """The error, naming the environment that raised where that can be determined."""
        told = fault(error, self._venv, call, self._steps, self._first)
        return UserError(f"{self.spec.id}: {told}")


def _is_finite(values: np.ndarray) -> bool:
    """Whether no number is NaN or infinite. The sum of squares is not finite if any number is not,
    and takes a fraction of the time; it may also overflow where numbers are merely huge, so the
    slow check decides then."""
    if values.dtype in _SQUARED and math.isfinite(np.vdot(values, values)):
        return True
    return np.count_nonzero(np.isfinite(values)) == values.size


def _stack(raws: list[Any]) -> Any:
    """Stacks single observations into a batch."""
    if isinstance(raws[0], dict):
        return {key: _stack([raw[key] for raw in raws]) for key in raws[0]}
    if isinstance(raws[0], tuple):
        return tuple(_stack(list(entries)) for entries in zip(*raws, strict=True))
    return np.array(raws)


def _take(raw: Any, rows: np.ndarray) -> Any:
    """Some rows of a batch of observations."""
    if isinstance(raw, dict):
        return {key: _take(value, rows) for key, value in raw.items()}
    if isinstance(raw, tuple):
        return tuple(_take(value, rows) for value in raw)
    return np.asarray(raw)[rows]
