"""Evaluation: the policy's returns over a fixed number of episodes, greedy unless told to explore.

It has random numbers of its own, the same in every call, so a result depends on the parameters
alone and not on when training asked. Which episodes count is settled beforehand, never by which
finish first: short episodes would be over-represented. Those that count can be recorded.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.algorithm import Algorithm, Params
from dovetail.envs.interface import HostEnv, JaxEnv
from dovetail.errors import UserError
from dovetail.playing import MAX_STEPS, Manner, Played, Record, batched

if TYPE_CHECKING:
    from dovetail.envs.resolve import Env

STREAM = 0x65766C
"""Mixed with the seed, so that evaluation shares no random number with training."""

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
        explore: bool = False,
        record: Record | None = None,
    ) -> None:
        manner = Manner(explore, record, max_steps)
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
            self._play = _jax_play(algorithm, env.jax, episodes, seed, manner)
        elif env.host is not None:
            size = _side_by_side(env, episodes, num_envs)
            self._play = self._host_play(algorithm, env.host, size, episodes, seed, manner)
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
        manner: Manner,
    ) -> Play:
        act = jax.jit(batched(algorithm, manner.explore))
        carry = _repeat(algorithm.initial_carry(), num_envs)
        seeds = _own_seeds(seed, num_envs)
        quota = np.full(num_envs, episodes // num_envs)
        quota[: episodes % num_envs] += 1

        def play(params: Params, cancelled: threading.Event) -> Evaluation | None:
            if self._host is None:
                self._host = make(num_envs)
            tally = _Tally(quota, manner)
            return _play_host(self._host, act, params, carry, seeds, tally, cancelled)

        return play


def _side_by_side(env: "Env", episodes: int, num_envs: int | None = None) -> int:
    """How many environments play that many episodes; JAX's play one each."""
    return episodes if env.jax is not None else num_envs or min(episodes, HOST_ENVS)


def evaluate(
    algorithm: Algorithm,
    params: Params,
    env: "Env",
    *,
    episodes: int = 100,
    seed: int = 0,
    num_envs: int | None = None,
    max_steps: int = MAX_STEPS,
    explore: bool = False,
    record: Record | None = None,
) -> Evaluation:
    """The policy's returns over `episodes` episodes, greedy unless it is to `explore`.

    JAX environments play one episode each, all at once. Of host environments there are `num_envs`,
    and each plays its fixed share of the episodes. An episode is cut after `max_steps` steps and
    counts with the return it had; a host environment then goes on from where it stands. `record` is
    shown what is played.
    """
    evaluator = Evaluator(
        algorithm,
        env,
        episodes=episodes,
        seed=seed,
        num_envs=num_envs,
        max_steps=max_steps,
        explore=explore,
        record=record,
    )
    try:
        evaluation = evaluator(params)
    finally:
        evaluator.close()
    assert evaluation is not None
    return evaluation


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


def _jax_play(algorithm: Algorithm, env: JaxEnv, episodes: int, seed: int, manner: Manner) -> Play:
    act, max_steps, record = batched(algorithm, manner.explore), manner.max_steps, manner.record
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

    def advance(params: Params, now: _Episodes) -> tuple[_Episodes, Played]:
        first = jnp.full(episodes, now.step == 0)
        action, log_probability, carry = act(
            params, now.carry, now.observation, now.reward, first, now.keys, now.step
        )
        after = jax.vmap(env.step)(now.state, action, step_keys(now.keys, now.step + 1))
        terminated, truncated = (x.astype(bool) for x in (after.terminated, after.truncated))
        valid = ~now.done & (now.step < max_steps)
        cut = ~terminated & (now.step + 1 >= max_steps)
        reward = after.reward.astype(jnp.float32)
        then = _Episodes(
            now.keys,
            after.state,
            after.observation,
            carry,
            reward,
            now.returns + jnp.where(valid, after.reward, 0),
            now.lengths + valid,
            now.done | (valid & (terminated | truncated)),
            now.step + 1,
        )
        ends = (terminated, truncated | cut)
        seen = (now.observation, action, reward, *ends, first, valid, after.observation)
        return then, Played(*seen, log_probability)

    @jax.jit
    def some(params: Params, now: _Episodes) -> tuple[_Episodes, jax.Array]:
        until = jnp.minimum(now.step + STEPS_PER_CALL, max_steps)
        now = jax.lax.while_loop(
            lambda now: (now.step < until) & ~now.done.all(),
            lambda now: advance(params, now)[0],
            now,
        )
        return now, now.done.all() | (now.step >= max_steps)

    @jax.jit
    def recorded(params: Params, now: _Episodes) -> tuple[_Episodes, jax.Array, Played]:
        now, played = jax.lax.scan(lambda now, _: advance(params, now), now, length=STEPS_PER_CALL)
        return now, now.done.all() | (now.step >= max_steps), played

    def play(params: Params, cancelled: threading.Event) -> Evaluation | None:
        now, finished = begin(seeds), False
        while not finished:
            if cancelled.is_set():
                return None
            if record is None:
                now, over = some(params, now)
            else:
                now, over, played = recorded(params, now)
                record(jax.tree.map(np.asarray, played))
            finished = bool(over)
        returns, lengths = np.asarray(now.returns, np.float64), np.asarray(now.lengths, np.int64)
        return Evaluation(returns, lengths, int((~np.asarray(now.done)).sum()))

    return play


class _Tally:
    """Counts the episodes of host environments, each environment up to its quota."""

    def __init__(self, quota: np.ndarray, manner: Manner) -> None:
        self.quota, self.max_steps, self.record = quota, manner.max_steps, manner.record
        self.returns = np.zeros((len(quota), quota.max()))
        self.lengths = np.zeros((len(quota), quota.max()), np.int64)
        self.played = np.zeros(len(quota), np.int64)
        self.left = int(quota.sum())
        self.cut = 0
        self._return = np.zeros(len(quota))
        self._length = np.zeros(len(quota), np.int64)

    def show(self, seen: Any, action: Any, log_probability: Any, first: Any, step: Any) -> None:
        """Records one step of every environment that has not played its share."""
        assert self.record is not None
        valid = step.valid & (self.played < self.quota)
        cut = ~step.terminated & (self._length + 1 >= self.max_steps)
        ends = (step.terminated, step.truncated | cut)
        after = step.next_observation
        row = Played(seen, action, step.reward, *ends, first, valid, after, log_probability)
        self.record(jax.tree.map(lambda x: np.asarray(x)[None], row))

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
    act: Callable[..., tuple[Any, Any, Any]],
    params: Params,
    carry: Any,
    seeds: list[int],
    tally: _Tally,
    cancelled: threading.Event,
) -> Evaluation | None:
    observation = env.reset(seeds)
    reward, first = np.zeros(env.num_envs, np.float32), np.ones(env.num_envs, bool)
    keys, number = jax.vmap(jax.random.key)(np.array(seeds)), 0
    while tally.left:
        if cancelled.is_set():
            return None
        action, log_probability, carry = act(
            params, carry, observation, reward, first, keys, number
        )
        seen = None if tally.record is None else jax.tree.map(np.array, (observation, first))
        step = env.step(np.asarray(action))
        if seen is not None:
            tally.show(seen[0], action, log_probability, seen[1], step)
        number += 1
        tally.add(step.reward, step.terminated | step.truncated, step.valid)
        observation, reward, first = step.observation, step.reward, step.first
    return tally.evaluation()
