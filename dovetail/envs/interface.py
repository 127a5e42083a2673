"""The environment interface: a spec, and one of two ways to step.

A `JaxEnv` is a pair of pure functions for *one* environment, without autoreset; Dovetail maps it
over the batch and resets finished episodes. A `HostEnv` is a batch of environments that live
outside JAX and step on numpy arrays. Both report every transition alike: its successor
(`next_observation`, the true final observation at an episode's end) and the observation to act on
next (`observation`, already the new episode's first).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:  # environment processes import this module without JAX
    import jax

Observation = Any
"""A pytree of arrays; its structure is `EnvSpec.observation`."""


@dataclass(frozen=True)
class Discrete:
    """Actions 0 … n-1, an int32 scalar."""

    n: int


@dataclass(frozen=True)
class MultiDiscrete:
    """Several discrete choices at once: int32[len(nvec)], entry i in 0 … nvec[i]-1."""

    nvec: tuple[int, ...]


@dataclass(frozen=True)
class Continuous:
    """float32[size]. Algorithms see a bounded entry as [-1, 1], clipped and rescaled by the
    environment's adapter; unbounded entries pass through."""

    size: int
    bounded: bool


ActionSpace = Discrete | MultiDiscrete | Continuous


@dataclass(frozen=True)
class EnvSpec:
    """Observations and actions of one environment, without a batch axis."""

    id: str
    """Back end and name, as given on the command line: "gymnasium:CartPole-v1"."""
    observation: Any
    """A pytree of jax.ShapeDtypeStruct: a vector or image, or a dict of named ones."""
    action: ActionSpace
    threshold: float | None = None
    """Mean return at which the task counts as solved, where there is a conventional one."""
    threads: bool = True
    """Whether threads can step it in parallel: false for Python environments, which hold the
    GIL."""
    bounds: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """(lowest, highest) of each entry of continuous actions in the environment's own units, which
    [-1, 1] maps to; None if the adapter does not know them."""
    info: tuple[str, ...] = ()
    """Keys of `info` whose values each step reports, for logging."""
    spaces: tuple[Any, Any] | None = field(default=None, compare=False, repr=False)
    """The environment's own Gymnasium spaces (observation, action), before they are mapped; None
    if it has none, as a `JaxEnv` that takes and shows what algorithms see."""


class JaxStep(NamedTuple):
    """The result of `JaxEnv.step`; `observation` is the successor, never a reset's."""

    state: Any
    observation: Observation
    reward: "jax.Array"
    terminated: "jax.Array"
    truncated: "jax.Array"
    info: "Mapping[str, jax.Array]" = {}  # noqa: RUF012  (never changed)
    """Numbers to log with `--log-info`, by name; the same names in every step."""


@runtime_checkable
class JaxEnv(Protocol):
    """One environment as pure functions; Dovetail maps it over a batch and resets it."""

    spec: EnvSpec

    def reset(self, key: "jax.Array") -> tuple[Any, Observation]:
        """Starts a new episode: (state, observation)."""
        ...

    def step(self, state: Any, action: "jax.Array", key: "jax.Array") -> JaxStep:
        """One transition. No autoreset."""
        ...


class HostStep(NamedTuple):
    """One step of a batch of host environments: numpy arrays with leading axis [B].

    The next `step` may reuse the arrays: copy them to keep them.
    """

    observation: Observation
    """The observation to act on next: the new episode's first where one started."""
    next_observation: Observation
    """The successor of the action: the true final observation where the episode ended."""
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    first: np.ndarray
    """Whether `observation` starts an episode."""
    valid: np.ndarray
    """False where the back end ignored the action and only reset (next-step autoreset)."""
    info: Any = ()
    """Numbers to log: the values of `EnvSpec.info`, float32[B, K], NaN where one is missing; or
    arrays [B] by name, from your own `HostEnv`."""


@runtime_checkable
class HostEnv(Protocol):
    """A batch of environments outside JAX."""

    spec: EnvSpec
    num_envs: int

    def reset(self, seeds: list[int]) -> Observation:
        """Starts an episode in every environment, environment i seeded with seeds[i]."""
        ...

    def step(self, action: np.ndarray) -> HostStep:
        """One transition in every environment."""
        ...

    def close(self) -> None:
        """Releases the environments' resources; safe to call twice."""
        ...


@runtime_checkable
class SplitHostEnv(HostEnv, Protocol):
    """A `HostEnv` whose step has two halves: `step` is `send`, then `receive`.

    The arrays from `receive` stay valid across the next `send`; the next `receive` may reuse them.
    """

    def send(self, action: np.ndarray) -> None:
        """Starts one transition in every environment."""
        ...

    def receive(self) -> HostStep:
        """Waits for the transition started by `send`."""
        ...

    def ready(self) -> bool:
        """Whether `receive` would return without waiting for another process."""
        ...
