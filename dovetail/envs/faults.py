"""Error messages that name the environment of a batch that raised.

Does not import JAX: environment processes use it too.
"""

from types import TracebackType
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from dovetail.envs.makers import Alone

_INDEX_VARIABLE = {
    Alone.step.__code__: "i",
    SyncVectorEnv.step.__code__: "i",
    SyncVectorEnv.reset.__code__: "i",
    AsyncVectorEnv._raise_if_errors.__code__: "index",  # pyright: ignore[reportPrivateUsage]
}
"""The local variable that holds the environment's index in each of Gymnasium's loops."""


def fault(
    error: BaseException, venv: VectorEnv[Any, Any, Any], call: str, step: int, first: int = 0
) -> str:
    """The error message, naming the environment that raised where that can be determined;
    environment 0 of the batch is called `first`."""
    misfit = _misfit(venv) if isinstance(venv, SyncVectorEnv) else None
    if misfit is not None:
        index, found, expected = misfit
        return (
            f"environment {first + index} returned an observation {found} where its space is "
            f"{expected} (step {step})."
        )
    index = _index_in(error.__traceback__)
    who = "an environment" if index is None else f"environment {first + index}"
    return f"{who} raised {type(error).__name__} in {call} at step {step}: {error}"


def _index_in(traceback: TracebackType | None) -> int | None:
    """The index in Gymnasium's loop when one of its environments raised."""
    while traceback is not None:
        name = _INDEX_VARIABLE.get(traceback.tb_frame.f_code)
        if name is not None and name in traceback.tb_frame.f_locals:
            return int(traceback.tb_frame.f_locals[name])
        traceback = traceback.tb_next
    return None


def _misfit(venv: SyncVectorEnv) -> tuple[int, str, str] | None:
    """The first environment whose last observation does not fit its Box space."""
    space = venv.single_observation_space
    if not isinstance(space, gymnasium.spaces.Box):
        return None
    seen: list[Any] = venv._env_obs  # pyright: ignore[reportPrivateUsage]
    for index, observation in enumerate(seen):
        if observation is None:  # not reset yet
            continue
        found = np.asarray(observation)
        if found.shape != space.shape or not np.can_cast(found.dtype, space.dtype, "same_kind"):
            return index, f"{found.dtype}{list(found.shape)}", f"{space.dtype}{list(space.shape)}"
    return None
