"""Attributes that import their module on first use, so that importing a package is cheap."""

import importlib
from collections.abc import Callable, Iterable
from typing import Any


def lazy_attributes(
    targets: Iterable[str], modules: Iterable[str] = (), package: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` for a package.

    `targets` have the form "module:Name"; `modules` are submodules of `package`.
    """
    places = {target.partition(":")[2]: target.partition(":")[0] for target in targets}
    inner = list(modules)
    public = sorted([*places, *inner])

    def getattribute(name: str) -> Any:
        if name in places:
            return getattr(importlib.import_module(places[name]), name)
        if name in inner:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"no attribute {name!r}; there are: {', '.join(public)}")

    return getattribute, lambda: public, public
