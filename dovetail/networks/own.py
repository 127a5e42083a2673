"""A user's own network: from an observation to a vector of features.

It is a class without required arguments, an object, or a function that returns an object, with
`init(key, observation) → params` and `apply(params, observation) → features [n, size]`, as
`flax.linen` modules have. Observations have one leading batch axis [n] and are float32; images are
scaled to 0 … 1. The algorithm's hidden layers and heads follow it.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.errors import UserError
from dovetail.loading import load_object
from dovetail.networks.cnn import as_floats
from dovetail.networks.layers import Params

EXAMPLES = 2
"""Batch size with which the shape of the features is found; 1 would hide a missing batch axis."""


@dataclass(frozen=True)
class OwnNetwork:
    """A user's network for observations like `observation`."""

    network: Any
    """A class, an object, a function, or the reference "file.py:Name" of one."""
    observation: Any
    """A pytree of jax.ShapeDtypeStruct, as in EnvSpec."""

    @property
    def size(self) -> int:
        """Number of features; raises unless there is one vector for each observation."""
        params = jax.eval_shape(self.init, jax.random.key(0))
        made = self._made()
        shown = self._examples()
        found = jax.eval_shape(lambda p: self._called(made.apply, p, shown), params)
        shape = getattr(found, "shape", None)
        if shape is None or len(shape) != 2 or shape[0] != EXAMPLES:
            told = f"shape {shape}" if shape is not None else f"a {type(found).__name__}"
            raise UserError(
                f"The network {self._name} returned {told} for a batch of {EXAMPLES} observations: "
                f"return one vector for each, of shape ({EXAMPLES}, size)."
            )
        return int(shape[1])

    def init(self, key: jax.Array) -> Params:
        """New parameters."""
        return self._called(self._made().init, key, self._examples())

    def apply(self, params: Params, observation: Any) -> jax.Array:
        """Features [..., size] of an observation with any leading axes."""
        leaves = jax.tree.leaves(self.observation)
        first = jax.tree.leaves(observation)[0]
        lead = first.shape[: first.ndim - len(leaves[0].shape)]
        rows = jax.tree.map(
            lambda spec, x: as_floats(x).reshape(-1, *spec.shape), self.observation, observation
        )
        features = self._called(self._made().apply, params, rows)
        return features.astype(jnp.float32).reshape(*lead, features.shape[-1])

    def _examples(self) -> Any:
        return jax.tree.map(
            lambda spec: jnp.zeros((EXAMPLES, *spec.shape), jnp.float32), self.observation
        )

    def _made(self) -> Any:
        """The object with `init` and `apply`."""
        found = self.network
        found = load_object(found, "network") if isinstance(found, str) else found
        if isinstance(found, type) or (callable(found) and not hasattr(found, "apply")):
            try:
                found = found()
            except TypeError as error:
                raise UserError(
                    f"The network {self._name} cannot be made ({error}): give each of its "
                    "arguments a default."
                ) from error
        if not (callable(getattr(found, "init", None)) and callable(getattr(found, "apply", None))):
            raise UserError(
                f"The network {self._name} has no init and apply: write "
                "init(key, observation) → params and apply(params, observation) → features, or a "
                "flax.linen module."
            )
        return found

    def _called(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except UserError:
            raise
        except Exception as error:
            told = str(error).partition("\n")[0].rstrip(".")
            raise UserError(
                f"The network {self._name} raised {type(error).__name__}{self._line(error)}: "
                f"{told}."
            ) from error

    @property
    def _name(self) -> str:
        """Its name, with the file and line of its definition where they can be found."""
        found = self._definition()
        name = getattr(found, "__qualname__", None) or type(found).__name__
        try:
            file, line = inspect.getsourcefile(found), inspect.getsourcelines(found)[1]
        except (OSError, TypeError):
            return name
        return f"{name} ({file}:{line})"

    def _definition(self) -> Any:
        found = self.network
        found = load_object(found, "network") if isinstance(found, str) else found
        return found if isinstance(found, type) or inspect.isfunction(found) else type(found)

    def _line(self, error: BaseException) -> str:
        """ " at line N" of the deepest frame in the file of the definition."""
        try:
            file = inspect.getsourcefile(self._definition())
        except TypeError:
            return ""
        line, frame = "", error.__traceback__
        while frame is not None:
            if file is not None and Path(frame.tb_frame.f_code.co_filename) == Path(file):
                line = f" in line {frame.tb_lineno}"
            frame = frame.tb_next
        return line
