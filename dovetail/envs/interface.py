"""What an environment is to Dovetail: a spec, and one of two ways to step.

A `JaxEnv` is a pair of pure functions for *one* environment, without autoreset; Dovetail maps it
over the batch and resets finished episodes. A `HostEnv` is a batch of environments that live
outside JAX and step on numpy arrays. Both say the same about every transition: where it led
(`next_observation`, the true final observation at an episode's end) and what to act on next
(`observation`, already the new episode's first).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:  # processes of environments import this module, and no JAX
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
    """float32[size]. A bounded entry is seen by algorithms as [-1, 1], clipped and rescaled by the
    environment's adapter; an unbounded entry is passed through."""

    size: int
    bounded: bool


ActionSpace = Discrete | MultiDiscrete | Continuous


@dataclass(frozen=True)
class EnvSpec:
    """What one environment shows and takes, without a batch axis."""

    id: str
    """Back end and name, as the command line takes them: "gymnasium:CartPole-v1"."""
    observation: Any
    """A pytree of jax.ShapeDtypeStruct: a vector or image, or a dict of named ones."""
    action: ActionSpace
    threshold: float | None = None
    """The mean return at which the task counts as solved, where the field agrees on one."""
    threads: bool = True
    """Whether threads step it side by side: not so for environments written in Python, which hold
    its lock."""
    bounds: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """(lowest, highest) of each entry of continuous actions in the environment's own numbers, where
    its adapter knows them: what [-1, 1] stands for."""


class JaxStep(NamedTuple):
    """What `JaxEnv.step` returns; `observation` is what the action led to, never a reset's."""

    state: Any
    observation: Observation
    reward: "jax.Array"
    terminated: "jax.Array"
    truncated: "jax.Array"


@runtime_checkable
class JaxEnv(Protocol):
    """One environment as pure functions; mapped over a batch and reset by Dovetail."""

    spec: EnvSpec

    def reset(self, key: "jax.Array") -> tuple[Any, Observation]:
        """A new episode: (state, observation)."""
        ...

    def step(self, state: Any, action: "jax.Array", key: "jax.Array") -> JaxStep:
        """One transition. No autoreset."""
        ...


class HostStep(NamedTuple):
    """One step of a batch of host environments: numpy arrays with leading axis [B].

    The arrays may be reused by the next `step`: who keeps them, copies them.
    """

    observation: Observation
    """What to act on next: the first observation of the new episode where one began."""
    next_observation: Observation
    """Where the action led: the true final observation where the episode ended."""
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    first: np.ndarray
    """Whether `observation` begins an episode."""
    valid: np.ndarray
    """False where the back end ignored the action and only reset (next-step autoreset)."""


@runtime_checkable
class HostEnv(Protocol):
    """A batch of environments outside JAX."""

    spec: EnvSpec
    num_envs: int

    def reset(self, seeds: list[int]) -> Observation:
        """Begins an episode in every environment, environment i seeded with seeds[i]."""
        ...

    def step(self, action: np.ndarray) -> HostStep:
        """One transition in every environment."""
        ...

    def close(self) -> None:
        """Releases what the environments hold; safe to call twice."""
        ...


@runtime_checkable
class SplitHostEnv(HostEnv, Protocol):
    """A `HostEnv` whose step comes in two halves: `step` is `send` and then `receive`.

    What `receive` returns may be reused by the next `receive`, not yet by the next `send`.
    """

    def send(self, action: np.ndarray) -> None:
        """Asks for one transition in every environment."""
        ...

    def receive(self) -> HostStep:
        """The transition that was asked for."""
        ...

    def ready(self) -> bool:
        """Whether `receive` would not wait for another process."""
        ...
