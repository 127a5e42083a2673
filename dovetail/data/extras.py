"""Packages that only datasets need: `pip install 'dovetail[data]'`."""

import importlib
from typing import Any

from dovetail.errors import UserError


def package(name: str) -> Any:
    """Imports the module `name`; raises a `UserError` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"Datasets need {name.partition('.')[0]}, which is not installed: "
            "pip install 'dovetail[data]'"
        ) from error
