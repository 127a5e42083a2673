"""Reads numbers from the `info` of Gymnasium's vector environments.

Does not import JAX: environment processes use it too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

FINAL = "final_info"
"""Where vector environments put the `info` of a step that ended an episode and reset it."""


def table(infos: Mapping[str, Any], keys: Sequence[str], num_envs: int) -> np.ndarray:
    """The values of `keys` as float32[num_envs, len(keys)], NaN where one is missing.

    An ended episode's own `info` comes before that of the reset in the same step.
    """
    found = np.full((num_envs, len(keys)), np.nan, np.float32)
    finals = infos.get(FINAL)
    for column, key in enumerate(keys):
        _fill(found[:, column], infos, key)
        if isinstance(finals, Mapping):
            _fill(found[:, column], finals, key)
        elif finals is not None:
            _fill_listed(found[:, column], finals, key)
    return found


def _fill(column: np.ndarray, infos: Mapping[str, Any], key: str) -> None:
    """Writes an array [B] of `infos`, where its mask `_key` is set."""
    values = infos.get(key)
    if values is None:
        return
    numbers = _numbers(values, len(column))
    mask = np.asarray(infos.get(f"_{key}", np.ones(len(column), np.bool_)), np.bool_)
    if numbers is not None:
        np.copyto(column, numbers, where=mask)


def _fill_listed(column: np.ndarray, finals: Any, key: str) -> None:
    """Writes from one dict for each environment, None where no episode ended."""
    for row, info in enumerate(finals):
        if isinstance(info, Mapping) and key in info:
            number = _numbers([info[key]], 1)
            if number is not None:
                column[row] = number[0]


def _numbers(values: Any, size: int) -> np.ndarray | None:
    """The values as float32[size]; None if they are no plain numbers."""
    try:
        found = np.asarray(values, np.float32)
    except (TypeError, ValueError):
        return None
    return found if found.shape == (size,) else None
