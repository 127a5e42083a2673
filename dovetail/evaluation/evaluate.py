"""Evaluation: a policy's returns over a fixed number of episodes, greedy or exploring.

Every call uses the same random numbers, separate from training's, so that a result depends on the
parameters only. The counted episodes are fixed beforehand: counting the first to finish would
over-represent short episodes. Counted episodes can be recorded.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.algorithm import Algorithm, Params
from dovetail.envs.batched import BatchStep
from dovetail.envs.interface import HostEnv, HostStep, JaxEnv
from dovetail.errors import UserError
from dovetail.evaluation.play import (
    MAX_STEPS,
    Manner,
    Played,
    StepRecord,
    acting,
    acting_on_host,
    played,
)
from dovetail.functions.statistics import bootstrap_interval
from dovetail.graph.unroll import (
    Act,
    ActorState,
    EpisodeSums,
    Step,
    initial_actor,
    no_episodes,
    step_once,
)
from dovetail.graph.unroll import StepRecord as Turn

if TYPE_CHECKING:
    from dovetail.envs.resolve import Env

STREAM = 0x65766C
"""Mixed with the seed, so that evaluation shares no random numbers with training."""

HOST_ENVS = 20
"""Default maximum number of host environments: enough to amortize a call to the policy."""

STEPS_PER_CALL = 64
"""Steps of JAX environments between two checks for cancellation."""


@dataclass(frozen=True)
class Evaluation:
    """The returns and lengths of the evaluated episodes."""

    returns: np.ndarray
    """Undiscounted returns, float64[episodes]."""
    lengths: np.ndarray
    """Lengths in environment steps, int64[episodes]."""
    cut: int
    """Number of episodes cut at the step limit; they count with the return so far."""
    which: str | int | None = None
    """Which policy of a run was evaluated, if one was: "best", "last" or a checkpoint's number."""
    env_steps: int | None = None
    """Number of environment steps for which that policy was trained."""

    @property
    def mean(self) -> float:
        """The mean return."""
        return float(self.returns.mean())

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the mean return, by percentile bootstrap: unlike a normal
        approximation it stays within the range of the returns."""
        if len(self.returns) < 2:
            return -np.inf, np.inf
        low, high = bootstrap_interval(self.returns, np.mean)
        return float(low), float(high)


Play = Callable[[Params, threading.Event], Evaluation | None]


class Evaluator:
    """Evaluates one algorithm in one environment; can be called repeatedly, from any thread.

    It owns the compiled functions and the host environments, if any; both are created at the first
    call. The parameters must not be donated during a call: pass a
    `dovetail.run.checkpoint.snapshot` if training donates its state.
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
        record: StepRecord | None = None,
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
        self._calling: float | None = None
        """When the current call of the host environments began."""
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
        """Evaluates the parameters; returns None if cancelled."""
        with self._playing:
            if self._cancelled.is_set():
                return None
            return self._play(params, self._cancelled)

    def cancel(self) -> None:
        """Cancels the running evaluation, which ends soon; it and all later ones return None."""
        self._cancelled.set()

    def close(self) -> None:
        """Cancels, waits for the running evaluation, and closes the environments; safe to call
        twice."""
        self.cancel()
        with self._playing:
            if self._host is not None:
                self._host.close()
                self._host = None

    def calling_seconds(self) -> float:
        """Seconds that the current call of the host environments has taken; 0 without one."""
        since = self._calling
        return 0.0 if since is None else time.monotonic() - since

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """A call of the host environments."""
        self._calling = time.monotonic()
        try:
            return call(*arguments)
        finally:
            self._calling = None

    def _host_play(
        self,
        algorithm: Algorithm,
        make: Callable[[int], HostEnv],
        num_envs: int,
        episodes: int,
        seed: int,
        manner: Manner,
    ) -> Play:
        act = acting_on_host(algorithm, manner.explore)
        seeds = _own_seeds(seed, num_envs)
        quota = np.full(num_envs, episodes // num_envs)
        quota[: episodes % num_envs] += 1
        keys = jax.vmap(jax.random.key)(np.array(seeds))

        def play(params: Params, cancelled: threading.Event) -> Evaluation | None:
            host = self._host = make(num_envs) if self._host is None else self._host
            tally = _Tally(quota, manner.record)
            begun = _begun(algorithm, (), self._timed(host.reset, seeds), keys)
            step = _host_step(partial(self._timed, host.step), manner)
            return _play_host(act, step, params, begun, tally, cancelled)

        return play


def _side_by_side(env: "Env", episodes: int, num_envs: int | None = None) -> int:
    """Number of environments for `episodes`; JAX environments play one episode each."""
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
    record: StepRecord | None = None,
) -> Evaluation:
    """Evaluates a policy over `episodes` episodes, greedily unless `explore`.

    JAX environments play one episode each, all in parallel. There are `num_envs` host environments,
    each with a fixed share of the episodes. An episode is cut after `max_steps` steps and counts
    with its return so far; a host environment then continues without a reset. `record` is called
    with the played steps.
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
    """Evaluation's seeds: non-negative 31-bit integers, which every host environment accepts."""
    sequence = np.random.SeedSequence([seed % 2**64, STREAM])
    return [int(word) >> 1 for word in sequence.generate_state(count)]


def _begun(algorithm: Algorithm, env: Any, observation: Any, keys: jax.Array) -> ActorState:
    """The actors' state at the start of an episode; all environment numbers are 0."""
    begun = initial_actor(env, observation, algorithm.initial_carry(), keys)
    alone = jnp.zeros_like(begun.number)
    return begun._replace(timestep=begun.timestep._replace(number=alone), number=alone)


class _Playing(NamedTuple):
    """The state of JAX environments that play one episode each; leading axis [episodes]."""

    env: Any
    over: jax.Array
    """Whether the episode is over; later steps do not count."""
    cut: jax.Array
    """Whether it was cut at the step limit."""
    steps: jax.Array


class _Now(NamedTuple):
    """The progress of an evaluation in JAX environments."""

    actor: ActorState
    ended: EpisodeSums


def _jax_step(env: JaxEnv, max_steps: int) -> Step:
    """Steps every environment once, without resets after the end of an episode."""

    def step(now: _Playing, action: Any, keys: jax.Array) -> BatchStep:
        after = jax.vmap(env.step)(now.env, action, keys)
        terminated, truncated = (x.astype(bool) for x in (after.terminated, after.truncated))
        valid = ~now.over
        cut = valid & ~(terminated | truncated) & (now.steps + 1 >= max_steps)
        over = now.over | terminated | truncated | cut
        return BatchStep(
            state=_Playing(after.state, over, now.cut | cut, now.steps + 1),
            observation=after.observation,
            next_observation=after.observation,
            reward=jnp.where(valid, after.reward, 0).astype(jnp.float32),
            terminated=valid & terminated,
            truncated=valid & (truncated | cut),
            first=jnp.zeros_like(valid),
            valid=valid,
        )

    return step


def _jax_play(algorithm: Algorithm, env: JaxEnv, episodes: int, seed: int, manner: Manner) -> Play:
    act, step = acting(algorithm, manner.explore), _jax_step(env, manner.max_steps)
    record = manner.record
    step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))

    seeds = np.array(_own_seeds(seed, episodes))

    @jax.jit
    def begin(seeds: jax.Array) -> _Now:
        keys = jax.vmap(jax.random.key)(seeds)
        state, observation = jax.vmap(env.reset)(step_keys(keys, 0))
        never = jnp.zeros(episodes, bool)
        playing = _Playing(state, never, never, jnp.zeros(episodes, jnp.int32))
        begun = _begun(algorithm, playing, observation, keys)
        return _Now(begun, no_episodes(episodes))

    def advance(params: Params, now: _Now) -> tuple[_Now, Played]:
        actor, number = now.actor, now.actor.step[0]
        keys = (actor.keys, number), step_keys(actor.keys, number + 1)
        turn = step_once(act, step, params, actor, keys)
        ended = jax.tree.map(jnp.add, now.ended, turn.episodes)
        return _Now(turn.actor, ended), played(turn)

    # Stops early once every episode is over.
    @jax.jit
    def some(params: Params, now: _Now) -> tuple[_Now, jax.Array]:
        until = now.actor.step[0] + STEPS_PER_CALL
        now = jax.lax.while_loop(
            lambda now: (now.actor.step[0] < until) & ~now.actor.env.over.all(),
            lambda now: advance(params, now)[0],
            now,
        )
        return now, now.actor.env.over.all()

    # A scan, not a while loop: recorded steps need a static length.
    @jax.jit
    def recorded(params: Params, now: _Now) -> tuple[_Now, jax.Array, Played]:
        now, played = jax.lax.scan(lambda now, _: advance(params, now), now, length=STEPS_PER_CALL)
        return now, now.actor.env.over.all(), played

    def play(params: Params, cancelled: threading.Event) -> Evaluation | None:
        now, finished = begin(seeds), False
        while not finished:
            if cancelled.is_set():
                return None
            if record is None:
                now, over = some(params, now)
            else:
                now, over, shown = recorded(params, now)
                record(jax.tree.map(np.asarray, shown))
            finished = bool(over)
        returns = np.asarray(now.ended.returns, np.float64)
        lengths = np.asarray(now.ended.lengths, np.int64)
        return Evaluation(returns, lengths, int(np.asarray(now.actor.env.cut).sum()))

    return play


class _Tally:
    """Collects the episodes of host environments, up to each environment's quota."""

    def __init__(self, quota: np.ndarray, record: StepRecord | None) -> None:
        self.quota, self.record = quota, record
        self.returns = np.zeros((len(quota), quota.max()))
        self.lengths = np.zeros((len(quota), quota.max()), np.int64)
        self.played = np.zeros(len(quota), np.int64)
        self.left = int(quota.sum())
        self.cut = 0

    def add(self, turn: Turn) -> None:
        """Adds one step of every environment."""
        counts = self.played < self.quota
        if self.record is not None:
            row = played(turn)
            row = row._replace(valid=row.valid & counts)
            self.record(jax.tree.map(lambda x: np.asarray(x)[None], row))
        number, returns, lengths = turn.episodes[:3]
        if not np.count_nonzero(number):
            return
        ended = np.flatnonzero((np.asarray(number) > 0) & counts)
        self.returns[ended, self.played[ended]] = np.asarray(returns)[ended]
        self.lengths[ended, self.played[ended]] = np.asarray(lengths)[ended]
        self.played[ended] += 1
        self.left -= len(ended)
        self.cut += int(turn.actor.env.cut[ended].sum())

    def evaluation(self) -> Evaluation:
        counted = np.arange(self.returns.shape[1]) < self.quota[:, None]
        return Evaluation(self.returns[counted], self.lengths[counted], self.cut)


class _OnHost(NamedTuple):
    """Bookkeeping for host environments, which hold their state themselves."""

    length: np.ndarray
    """Length of the current episode so far."""
    cut: np.ndarray
    """Whether the last step reached the step limit."""


def _host_step(step_envs: Callable[[Any], HostStep], manner: Manner) -> Step:
    """Steps every environment once; an episode at the step limit counts as truncated."""

    def step(now: _OnHost, action: Any, _: Any) -> BatchStep:
        after = step_envs(np.asarray(action))
        valid = after.valid
        ended = (after.terminated | after.truncated) & valid
        length = now.length + valid
        cut = ~ended & (length >= manner.max_steps)
        shown, begins = after.observation, after.first
        if manner.record is not None:  # the recorder keeps them; the next step may reuse the arrays
            shown, begins = jax.tree.map(np.array, (shown, begins))
        flags: Any = {"first": begins, "valid": valid, "terminated": after.terminated & valid}
        flags["truncated"] = (after.truncated & valid) | cut
        reward: Any = np.where(valid, after.reward, 0)
        return BatchStep(
            state=_OnHost(np.where(ended | cut, 0, length), cut),
            observation=shown,
            next_observation=after.next_observation,
            reward=reward,
            **flags,
        )

    return step


def _play_host(
    act: Act,
    step: Step,
    params: Params,
    begun: ActorState,
    tally: _Tally,
    cancelled: threading.Event,
) -> Evaluation | None:
    none = np.zeros(len(tally.quota), np.int64)
    keys, actor = begun.keys, jax.tree.map(np.array, begun._replace(keys=(), carry=()))
    returns = np.zeros(len(none))
    actor = actor._replace(
        env=_OnHost(none, none > 0), carry=begun.carry, episode_return=returns, episode_length=none
    )
    number = 0
    while tally.left:
        if cancelled.is_set():
            return None
        turn = step_once(act, step, params, actor, ((keys, number), None))
        tally.add(turn)
        actor, number = turn.actor, number + 1
    return tally.evaluation()
