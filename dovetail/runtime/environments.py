"""The environments of one actor: in the actor's thread, or in other threads and processes.

After a failure they can be set up again: the old environments are closed, and new ones begin new
episodes.
"""

import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Semaphore
from queue import Empty, SimpleQueue
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.envs import batched
from dovetail.envs.interface import HostEnv, HostStep, JaxEnv, Observation, SplitHostEnv
from dovetail.envs.member import ProcessFailed
from dovetail.envs.processes import make_bell
from dovetail.envs.resolve import Env
from dovetail.errors import UserError
from dovetail.graph.unroll import ActorState, env_key
from dovetail.plan.ir import Instance, Plan, WorkerKind

JOIN_SECONDS = 5.0
"""Time limit for joining a stepping thread at the end."""


class Stepper(Protocol):
    """A batch of environments that step together."""

    state: object
    """The state of JAX environments, leaves [B, …]; empty for host environments."""

    def reset(self, keys: jax.Array) -> Observation | None:
        """Begins an episode in each environment with its key from `keys` [B].

        Returns the observations; None for JAX environments, whose state is set by the caller.
        """
        ...

    def step(self, action: np.ndarray, step: int) -> HostStep:
        """One transition; `step` is its number, for errors and random keys."""
        ...

    def close(self) -> None:
        """Closes the environments."""
        ...


class HostStepper:
    """Host environments, which hold their own state."""

    def __init__(self, make: Callable[[], HostEnv]) -> None:
        self.state: object = ()
        self._make = make
        self._env: HostEnv | None = None

    def reset(self, keys: jax.Array) -> Observation:
        """Recreates the environments and begins an episode in each."""
        self.close()
        # New ones, because environments that raised may be in any state.
        self._env = self._make()
        return initial_observation(self._env, keys)

    def step(self, action: np.ndarray, step: int) -> HostStep:
        """One transition; errors of the environments name the step number."""
        env = self._env
        assert env is not None
        try:
            return env.step(action)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{env.spec.id} raised {type(error).__name__} at step {step}: {error}"
            ) from error

    def close(self) -> None:
        """Closes the environments."""
        if self._env is not None:
            self._env.close()
            self._env = None


class JaxStepper:
    """A JAX environment stepped from the host, one compiled call per step."""

    def __init__(self, env: JaxEnv) -> None:
        self.state: object = ()
        self._keys: jax.Array | None = None

        def step(
            state: object, action: np.ndarray, keys: jax.Array, number: jax.Array
        ) -> batched.BatchStep:
            return batched.step(env, state, action, jax.vmap(env_key, (0, None))(keys, number))

        self._step: Callable[..., batched.BatchStep] = jax.jit(step)

    def reset(self, keys: jax.Array) -> None:
        """Stores the keys; the caller sets the state."""
        self._keys = keys

    def step(self, action: np.ndarray, step: int) -> HostStep:
        """One transition."""
        after = self._step(self.state, action, self._keys, np.int32(step))
        self.state = after.state
        return HostStep(*jax.tree.map(np.asarray, after[1:]))  # the same fields without the state

    def close(self) -> None:
        """Does nothing: there is nothing to close."""


class Port(Protocol):
    """Environments on another worker: `send` an action, then `receive` the result when `ready`."""

    def reset(self, keys: jax.Array, bell: Semaphore) -> Observation | None:
        """Like `Stepper.reset`; `bell` is released after every transition from now on."""
        ...

    def send(self, action: np.ndarray, step: int) -> None:
        """Starts a transition."""
        ...

    def ready(self) -> bool:
        """Whether `receive` would return immediately."""
        ...

    def receive(self) -> HostStep:
        """Waits for the transition and returns its result."""
        ...

    def close(self) -> None:
        """Stops the worker."""
        ...


class ThreadPort:
    """A thread that steps its environments on request; a stuck one is replaced by another."""

    def __init__(
        self, name: str, make: Callable[[], Stepper], patience: float, envs: tuple[int, int]
    ) -> None:
        """`make` creates a stepper; `envs` are the first environment and the one after the last."""
        self._name, self._make, self._patience, self._envs = name, make, patience, envs
        self._ring: Callable[[], None] = lambda: None
        self._start()

    def _start(self) -> None:
        self.stepper = self._make()
        self._flying = False
        """Whether a step is in progress."""
        self._orders: SimpleQueue[tuple[np.ndarray, int] | None] = SimpleQueue()
        self._done: SimpleQueue[HostStep | BaseException] = SimpleQueue()
        # A replaced thread must never touch what belongs to its successor.
        own = (self.stepper, self._orders, self._done)
        self._thread = threading.Thread(
            target=self._work, args=own, name=f"dovetail-{self._name}", daemon=True
        )
        self._thread.start()

    def reset(self, keys: jax.Array, bell: Semaphore) -> Observation | None:
        """Begins an episode in each; abandons a thread that is still in a step."""
        self._ring = bell.release
        if self._flying:
            self._orders.put(None)
            self._start()
        return self.stepper.reset(keys)

    def send(self, action: np.ndarray, step: int) -> None:
        """Starts a transition."""
        self._flying, self._step = True, step
        self._orders.put((action, step))

    def ready(self) -> bool:
        """Whether the transition is done."""
        return not self._done.empty()

    def receive(self) -> HostStep:
        """Returns the result of the transition, or raises the environments' error."""
        try:
            after = self._done.get(timeout=self._patience)
        except Empty:
            raise self._stuck() from None
        self._flying = False
        if isinstance(after, BaseException):
            raise after
        return after

    def _stuck(self) -> ProcessFailed:
        """The error that says where the thread is stuck."""
        first, last = self._envs
        frame = sys._current_frames().get(self._thread.ident or 0)  # pyright: ignore[reportPrivateUsage]
        stack = traceback.extract_stack(frame)
        where = f": it is in {stack[-1].name} at {stack[-1].filename}:{stack[-1].lineno}"
        return ProcessFailed(
            f"The thread of environments {first}…{last - 1} did not answer within "
            f"{self._patience:g} s at step {self._step}{where}; repair the environment, or allow "
            "it more seconds with --patience.",
            "".join(traceback.format_list(stack)),
        )

    def close(self) -> None:
        """Stops the thread, then closes the environments; abandons a thread that is stuck."""
        self._orders.put(None)
        self._thread.join(JOIN_SECONDS)
        # A thread that is stuck in `step` still uses the environments.
        if not self._thread.is_alive():
            self.stepper.close()

    def _work(
        self,
        stepper: Stepper,
        orders: "SimpleQueue[tuple[np.ndarray, int] | None]",
        done: "SimpleQueue[HostStep | BaseException]",
    ) -> None:
        while (order := orders.get()) is not None:
            try:
                done.put(stepper.step(*order))
            except BaseException as error:
                done.put(error)
            # Also after an error, else the actor would wait for this group forever.
            self._ring()


class ProcessPort:
    """Environments in a separate process, connected by shared memory."""

    def __init__(self, make: Callable[[Semaphore | None], SplitHostEnv]) -> None:
        self._make = make
        self._env: SplitHostEnv | None = None

    def reset(self, keys: jax.Array, bell: Semaphore) -> Observation:
        """Restarts the process and begins an episode in each environment."""
        self.close()
        self._env = self._make(bell)
        return initial_observation(self._env, keys)

    def send(self, action: np.ndarray, step: int) -> None:
        """Starts a transition."""
        self._there().send(action)

    def ready(self) -> bool:
        """Whether the transition is done or the process has died."""
        return self._there().ready()

    def receive(self) -> HostStep:
        """Returns the result of the transition, or raises the environments' error."""
        return self._there().receive()

    def close(self) -> None:
        """Stops the process."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def _there(self) -> SplitHostEnv:
        assert self._env is not None  # `reset` comes first
        return self._env


class EnvGroup:
    """A share of an actor's environments, on another worker."""

    def __init__(self, part: slice, port: Port) -> None:
        self.part = part
        """Its slice of the actor's environments."""
        self.port = port


class ActorEnvironments:
    """The environments of one actor: one stepper in its thread, or groups on other workers."""

    def __init__(self, stepper: Stepper | None, groups: list[EnvGroup]) -> None:
        self.stepper = stepper
        self.groups = groups
        self.heard: Callable[[bool, float], bool] = lambda block, timeout: False
        """Waits for the bell, a semaphore released after every transition of a group."""

    def reset(self, keys: jax.Array) -> Observation | None:
        """Resets everything; returns the observations [B, …], or None for JAX environments."""
        if self.stepper is not None:
            return self.stepper.reset(keys)
        # Keep only the semaphore's C-level methods, which keep the semaphore itself alive. Its name
        # is unlinked with `bell`, once every process has opened it, so no run can leak it.
        bell = make_bell()
        self.heard = bell.acquire
        shown = [group.port.reset(keys[group.part], bell) for group in self.groups]
        return None if shown[0] is None else jax.tree.map(lambda *xs: np.concatenate(xs), *shown)

    def load(self, state: object) -> None:
        """Sets the state of JAX environments."""
        if self.stepper is not None:
            self.stepper.state = state
        for group in self.groups:
            if isinstance(group.port, ThreadPort):
                part = group.part
                # Environments in processes are host environments, which hold their own state.
                group.port.stepper.state = jax.tree.map(lambda x, part=part: x[part], state)

    def state(self) -> object:
        """The state of JAX environments; empty for host environments."""
        if self.stepper is not None:
            return self.stepper.state
        states = [g.port.stepper.state for g in self.groups if isinstance(g.port, ThreadPort)]
        return jax.tree.map(lambda *xs: jnp.concatenate(xs), *states) if states else ()

    def close(self) -> None:
        """Closes everything, in any state."""
        if self.stepper is not None:
            self.stepper.close()
        for group in self.groups:
            group.port.close()


def make_environments(
    plan: Plan, env: Env, acting: Instance, steps: list[Instance], patience: float
) -> ActorEnvironments:
    """Creates the environments of the actor `acting`, stepped by the instances `steps`.

    A process that takes longer than `patience` seconds for a step is killed.
    """
    kinds = {worker.name: worker.kind for worker in plan.workers}
    first, last = acting.envs or (0, plan.num_envs)
    if len(steps) == 1:
        process = kinds[steps[0].worker] is WorkerKind.PROCESS
        if not process and steps[0].worker == acting.worker:
            return ActorEnvironments(_stepper(env, last - first), [])
        if process:
            make = _process_maker(env, steps[0], patience)
            return ActorEnvironments(HostStepper(lambda: make(None)), [])
    groups: list[EnvGroup] = []
    for step in steps:
        begin, end = step.envs or (first, last)
        port: Port
        if kinds[step.worker] is WorkerKind.PROCESS:
            port = ProcessPort(_process_maker(env, step, patience))
        else:
            make_stepper = partial(_stepper, env, end - begin)
            port = ThreadPort(step.worker, make_stepper, patience, (begin, end))
        groups.append(EnvGroup(slice(begin - first, end - first), port))
    return ActorEnvironments(None, groups)


def _stepper(env: Env, size: int) -> Stepper:
    if env.jax is not None:
        return JaxStepper(env.jax)
    host = env.host
    assert host is not None
    return HostStepper(lambda: host(size))


def _process_maker(
    env: Env, step: Instance, patience: float
) -> Callable[[Semaphore | None], SplitHostEnv]:
    make = env.process
    assert make is not None
    assert step.envs is not None
    first, last = step.envs
    return lambda bell: make(last - first, bell=bell, first=first, patience=patience)


def begin_episodes(
    env: Env, actor_envs: ActorEnvironments | None, actor: ActorState, keys: jax.Array
) -> ActorState:
    """Resets an actor's environments; returns its state with the first observations.

    Each host environment begins an episode with its key from `keys` [B].
    """
    if actor_envs is None:
        return actor
    if env.jax is not None:
        actor_envs.reset(actor.keys)
        return actor
    size = len(keys)
    observation = actor_envs.reset(keys)
    timestep = actor.timestep._replace(
        observation=observation, reward=np.zeros(size, np.float32), first=np.ones(size, np.bool_)
    )
    return actor._replace(
        timestep=timestep,
        episode_return=np.zeros(size, np.float32),
        episode_length=np.zeros(size, np.int32),
    )


def initial_observation(env: HostEnv, keys: jax.Array) -> Observation:
    """Resets host environments, each with a seed drawn from its key."""
    # Seeds are non-negative 31-bit integers: drop one bit.
    bits = np.asarray(jax.vmap(lambda key: jax.random.bits(key, (), jnp.uint32))(keys))
    return jax.tree.map(np.copy, env.reset([int(word) >> 1 for word in bits]))
