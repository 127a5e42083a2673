"""Packages that only some features need, installed as extras of Dovetail."""

import importlib
from typing import Any

from dovetail.errors import UserError


def needed(module: str, extra: str) -> Any:
    """Imports a module of an extra; raises a sentence with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"This needs the package {module!r}, which is not installed: pip install "
            f"'dovetail[{extra}]'."
        ) from error
