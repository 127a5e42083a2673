"""Attributes that import their module on first use, so that importing a package costs nothing."""

import importlib
from collections.abc import Callable, Iterable
from typing import Any


def lazy_attributes(
    targets: Iterable[str],
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, from targets written "module:Name"."""
    places = {target.partition(":")[2]: target.partition(":")[0] for target in targets}

    def getattribute(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"no attribute {name!r}; there are: {', '.join(sorted(places))}")
        return getattr(importlib.import_module(places[name]), name)

    return getattribute, lambda: sorted(places), sorted(places)
