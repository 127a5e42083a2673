"""Evaluation: the greedy policy's returns over a fixed number of episodes.

It has random numbers of its own, the same in every call, so a result depends on the parameters
alone and not on when training asked. Which episodes count is settled beforehand, never by which
finish first: short episodes would be over-represented.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.algorithm import Algorithm, Params, Timestep
from dovetail.envs.interface import HostEnv, JaxEnv
from dovetail.errors import UserError

if TYPE_CHECKING:
    from dovetail.envs.resolve import Env

STREAM = 0x65766C
"""Mixed with the seed, so that evaluation shares no random number with training."""

MAX_STEPS = 27_000
"""Steps after which an episode is cut: 108,000 Atari frames, the field's usual limit."""

HOST_ENVS = 20
"""Host environments at most, unless told: enough to share the cost of a call to the policy."""

STEPS_PER_CALL = 64
"""Steps of JAX environments between two looks at `cancel`."""


@dataclass(frozen=True)
class Evaluation:
    """What the episodes brought."""

    returns: np.ndarray
    """float64[episodes]: undiscounted."""
    lengths: np.ndarray
    """int64[episodes]: in environment steps."""
    cut: int
    """How many episodes reached the step limit; their returns are what they had by then."""

    @property
    def mean(self) -> float:
        """The mean return."""
        return float(self.returns.mean())

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the mean return (normal approximation)."""
        count = len(self.returns)
        if count < 2:
            return -np.inf, np.inf
        half = 1.96 * float(self.returns.std(ddof=1)) / count**0.5
        return self.mean - half, self.mean + half


Play = Callable[[Params, threading.Event], Evaluation | None]


class Evaluator:
    """Evaluates one algorithm in one environment, as often as it is called, from any thread.

    It owns the compiled functions and, for host environments, the environments; both are made at
    the first call. The parameters it is called with must not be donated meanwhile: give it a
    `dovetail.checkpoint.snapshot` if training donates its state.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        env: "Env",
        *,
        episodes: int = 100,
        seed: int = 0,
        num_envs: int | None = None,
        max_steps: int = MAX_STEPS,
    ) -> None:
        for name, value in (("episodes", episodes), ("max_steps", max_steps)):
            if value < 1:
                raise UserError(f"Evaluation was given {name}={value}: give 1 or more.")
        if num_envs is not None and not 1 <= num_envs <= episodes:
            raise UserError(
                f"Evaluation was given num_envs={num_envs} for {episodes} episodes: "
                "give from 1 to as many as there are episodes."
            )
        self._cancelled = threading.Event()
        self._playing = threading.Lock()
        self._host: HostEnv | None = None
        if env.jax is not None:
            self._play = _jax_play(algorithm, env.jax, episodes, seed, max_steps)
        elif env.host is not None:
            size = num_envs or min(episodes, HOST_ENVS)
            self._play = self._host_play(algorithm, env.host, size, episodes, seed, max_steps)
        else:
            raise UserError(
                f"{env.spec.id} cannot be stepped: it has neither way of an environment."
            )

    def __call__(self, params: Params) -> Evaluation | None:
        """The evaluation of these parameters; None if cancelled before its end."""
        with self._playing:
            if self._cancelled.is_set():
                return None
            return self._play(params, self._cancelled)

    def cancel(self) -> None:
        """Ends the evaluation under way, soon; it and every later one return None."""
        self._cancelled.set()

    def close(self) -> None:
        """Cancels, waits for the evaluation under way, closes the environments; safe twice."""
        self.cancel()
        with self._playing:
            if self._host is not None:
                self._host.close()
                self._host = None

    def _host_play(
        self,
        algorithm: Algorithm,
        make: Callable[[int], HostEnv],
        num_envs: int,
        episodes: int,
        seed: int,
        max_steps: int,
    ) -> Play:
        act = jax.jit(_batched_greedy(algorithm))
        carry = _repeat(algorithm.initial_carry(), num_envs)
        seeds = _own_seeds(seed, num_envs)
        quota = np.full(num_envs, episodes // num_envs)
        quota[: episodes % num_envs] += 1

        def play(params: Params, cancelled: threading.Event) -> Evaluation | None:
            if self._host is None:
                self._host = make(num_envs)
            tally = _Tally(quota, max_steps)
            return _play_host(self._host, act, params, carry, seeds, tally, cancelled)

        return play


def evaluate(
    algorithm: Algorithm,
    params: Params,
    env: "Env",
    *,
    episodes: int = 100,
    seed: int = 0,
    num_envs: int | None = None,
    max_steps: int = MAX_STEPS,
) -> Evaluation:
    """The greedy policy's returns over `episodes` episodes.

    JAX environments play one episode each, all at once. Of host environments there are `num_envs`,
    and each plays its fixed share of the episodes. An episode is cut after `max_steps` steps and
    counts with the return it had; a host environment then goes on from where it stands.
    """
    evaluator = Evaluator(
        algorithm, env, episodes=episodes, seed=seed, num_envs=num_envs, max_steps=max_steps
    )
    try:
        evaluation = evaluator(params)
    finally:
        evaluator.close()
    assert evaluation is not None
    return evaluation


def _batched_greedy(algorithm: Algorithm) -> Callable[..., tuple[Any, Any]]:
    """`greedy` over a batch; where an episode begins, the carry and the last reward are renewed."""
    initial = algorithm.initial_carry()

    def one(
        params: Params, carry: Any, observation: Any, reward: jax.Array, first: jax.Array
    ) -> tuple[Any, Any]:
        carry = jax.tree.map(lambda new, old: jnp.where(first, new, old), initial, carry)
        reward = jnp.where(first, 0, reward).astype(jnp.float32)
        return algorithm.greedy(params, carry, Timestep(observation, reward, first))

    return jax.vmap(one, in_axes=(None, 0, 0, 0, 0))


def _own_seeds(seed: int, count: int) -> list[int]:
    """Evaluation's seeds: non-negative 31-bit integers, what every host environment takes."""
    sequence = np.random.SeedSequence([seed % 2**64, STREAM])
    return [int(word) >> 1 for word in sequence.generate_state(count)]


def _repeat(tree: Any, count: int) -> Any:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), tree)


class _Episodes(NamedTuple):
    """One JAX environment per episode, on their way; leading axis [episodes] but for `step`."""

    keys: jax.Array
    state: Any
    observation: Any
    carry: Any
    reward: jax.Array
    returns: jax.Array
    lengths: jax.Array
    done: jax.Array
    step: jax.Array


def _jax_play(algorithm: Algorithm, env: JaxEnv, episodes: int, seed: int, max_steps: int) -> Play:
    act = _batched_greedy(algorithm)
    step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))

    seeds = np.array(_own_seeds(seed, episodes))

    @jax.jit
    def begin(seeds: jax.Array) -> _Episodes:
        keys = jax.vmap(jax.random.key)(seeds)
        state, observation = jax.vmap(env.reset)(step_keys(keys, 0))
        return _Episodes(
            keys,
            state,
            observation,
            carry=_repeat(algorithm.initial_carry(), episodes),
            reward=jnp.zeros(episodes),
            returns=jnp.zeros(episodes),
            lengths=jnp.zeros(episodes, jnp.int32),
            done=jnp.zeros(episodes, bool),
            step=jnp.int32(0),
        )

    def advance(params: Params, now: _Episodes) -> _Episodes:
        first = jnp.full(episodes, now.step == 0)
        action, carry = act(params, now.carry, now.observation, now.reward, first)
        after = jax.vmap(env.step)(now.state, action, step_keys(now.keys, now.step + 1))
        return _Episodes(
            now.keys,
            after.state,
            after.observation,
            carry,
            after.reward.astype(jnp.float32),
            now.returns + jnp.where(now.done, 0, after.reward),
            now.lengths + ~now.done,
            now.done | after.terminated.astype(bool) | after.truncated.astype(bool),
            now.step + 1,
        )

    @jax.jit
    def some(params: Params, now: _Episodes) -> tuple[_Episodes, jax.Array]:
        until = jnp.minimum(now.step + STEPS_PER_CALL, max_steps)
        now = jax.lax.while_loop(
            lambda now: (now.step < until) & ~now.done.all(), lambda now: advance(params, now), now
        )
        return now, now.done.all() | (now.step >= max_steps)

    def play(params: Params, cancelled: threading.Event) -> Evaluation | None:
        now, finished = begin(seeds), False
        while not finished:
            if cancelled.is_set():
                return None
            now, over = some(params, now)
            finished = bool(over)
        returns, lengths = np.asarray(now.returns, np.float64), np.asarray(now.lengths, np.int64)
        return Evaluation(returns, lengths, int((~np.asarray(now.done)).sum()))

    return play


class _Tally:
    """Counts the episodes of host environments, each environment up to its quota."""

    def __init__(self, quota: np.ndarray, max_steps: int) -> None:
        self.quota, self.max_steps = quota, max_steps
        self.returns = np.zeros((len(quota), quota.max()))
        self.lengths = np.zeros((len(quota), quota.max()), np.int64)
        self.played = np.zeros(len(quota), np.int64)
        self.left = int(quota.sum())
        self.cut = 0
        self._return = np.zeros(len(quota))
        self._length = np.zeros(len(quota), np.int64)

    def add(self, reward: np.ndarray, ended: np.ndarray, valid: np.ndarray) -> None:
        """One step of every environment; steps that are not valid only reset."""
        self._return += np.where(valid, reward, 0)
        self._length += valid
        ended = ended & valid
        over = ended | (self._length >= self.max_steps)
        if over.any():
            self._settle(over, ended)

    def _settle(self, over: np.ndarray, ended: np.ndarray) -> None:
        counts = np.flatnonzero(over & (self.played < self.quota))
        self.returns[counts, self.played[counts]] = self._return[counts]
        self.lengths[counts, self.played[counts]] = self._length[counts]
        self.played[counts] += 1
        self.left -= len(counts)
        self.cut += int((~ended[counts]).sum())
        self._return[over] = 0
        self._length[over] = 0

    def evaluation(self) -> Evaluation:
        counted = np.arange(self.returns.shape[1]) < self.quota[:, None]
        return Evaluation(self.returns[counted], self.lengths[counted], self.cut)


def _play_host(
    env: HostEnv,
    act: Callable[..., tuple[Any, Any]],
    params: Params,
    carry: Any,
    seeds: list[int],
    tally: _Tally,
    cancelled: threading.Event,
) -> Evaluation | None:
    observation = env.reset(seeds)
    reward, first = np.zeros(env.num_envs, np.float32), np.ones(env.num_envs, bool)
    while tally.left:
        if cancelled.is_set():
            return None
        action, carry = act(params, carry, observation, reward, first)
        step = env.step(np.asarray(action))
        tally.add(step.reward, step.terminated | step.truncated, step.valid)
        observation, reward, first = step.observation, step.reward, step.first
    return tally.evaluation()
