"""Error messages that name the environment of a batch that raised.

Does not import JAX: environment processes use it too.
"""

from types import TracebackType
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from dovetail.envs.makers import Alone
from dovetail.errors import defined_at, is_users, user_line

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
    if old := _like_old_gym(error, venv, index, call):
        return f"{who} {old}"
    place = user_line(error)
    where = f" ({place})" if place else ""
    return f"{who} raised {type(error).__name__} in {call} at step {step}: {error}{where}"


def _like_old_gym(
    error: BaseException, venv: VectorEnv[Any, Any, Any], index: int | None, call: str
) -> str:
    """The end of a sentence about an environment with the old Gym's interface; empty if it is not
    one."""
    told, frame = str(error), error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None or is_users(frame.tb_frame.f_code.co_filename):
        return ""  # it arose in the environment's own code, or in another process
    # A step that ends an episode may fail in the reset after it.
    in_reset = "expected 2" in told or call == "reset"
    own = venv.envs[index or 0].unwrapped if isinstance(venv, SyncVectorEnv) else None
    where = defined_at(getattr(type(own), "reset" if in_reset else "step", None))
    if "unexpected keyword argument 'seed'" in told or "keyword argument 'options'" in told:
        return f"has an old reset: {where}write it as reset(self, *, seed=None, options=None)."
    if "unpack" not in told:
        return ""
    if in_reset:
        return f"has an old reset: {where}return (observation, info), not the observation alone."
    return (
        f"has an old step: {where}return (observation, reward, terminated, truncated, info), five "
        "values; the old Gym's four had done in place of terminated and truncated."
    )


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
