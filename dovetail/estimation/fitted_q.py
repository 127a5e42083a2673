"""Fitted-Q evaluation, https://arxiv.org/abs/1903.08738: the values of a given policy, learned from
recorded steps by temporal differences.

Several members learn at once, in one compiled program: the first from all episodes, each of the
others from episodes resampled with replacement (as Poisson weights). Their disagreement measures
the uncertainty due to the data. Values bootstrap at truncations and are zero after terminations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dovetail.data.blocks import whole_episodes
from dovetail.data.episode import Rows
from dovetail.data.hdf5 import Piece
from dovetail.data.reader import Reader
from dovetail.data.stream import Stream
from dovetail.envs.interface import ActionSpace, Continuous, Discrete, MultiDiscrete
from dovetail.errors import check_option
from dovetail.estimation.parts import STEPS, Array, filled, rows_at_once
from dovetail.networks.encoder import Encoder
from dovetail.networks.layers import init_layers
from dovetail.networks.mlp import MLP

Tell = Callable[[int, int], None]

PER_CALL = 20
"""Updates per compiled call."""
CHECKS = 20
"""Number of batches on which convergence of the values is measured."""


@dataclass(frozen=True)
class FittedQ:
    """Options of fitted-Q evaluation."""

    gamma: float = 0.99
    """Discount factor."""
    updates: int = 10_000
    """Gradient steps."""
    batch: int = 256
    """Steps per gradient step."""
    members: int = 10
    """Members trained on resampled episodes, in addition to the one trained on all."""
    learning_rate: float = 1e-3
    """Adam's initial step size; it decays linearly to a tenth."""
    tau: float = 0.1
    """Fraction by which the target weights move toward the online weights at every update: values
    settle over several horizons, 1 / (1 - gamma), of 1 / tau updates each."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Sizes of the hidden layers."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_option("gamma", self.gamma, 0 <= self.gamma < 1, "0 or more, less than 1")
        for name in ("updates", "batch", "members"):
            check_option(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")


class Values(NamedTuple):
    """The learned values."""

    params: Any
    """Of all members, with leading axis [1 + members]."""
    network: "ActionValue"
    scale: float
    """Factor of the network's outputs."""
    weights: Array
    """Weight of each episode for each member [1 + members, episodes]."""
    epsilon: float
    lack: float
    """Estimated change of the first member's values until convergence: the mean of r + γ v(s') -
    q(s, a) over recorded steps, times the horizon."""

    def first_states(self, reader: Reader, own: Array) -> Array:
        """Every member's values of the episodes' first states [1 + members, episodes]."""
        lengths = reader.episodes.lengths
        begins = np.cumsum(lengths + 1) - lengths - 1
        rule = jax.jit(jax.vmap(self.network.policy_value, in_axes=(0, None, None, None)))
        found: list[Array] = []
        for run in whole_episodes(np.ones_like(lengths), rows_at_once(reader)):
            rows = reader.pieces([Piece(number, 0, 1) for number in run])
            chosen = own[begins[run.start : run.stop]]
            found.append(np.asarray(rule(self.params, rows.observation, chosen, self.epsilon)))
        return self.scale * np.concatenate(found, axis=1)

    def along(self, rows: Rows, own: Array) -> tuple[Array, Array]:
        """(q(s, a), v(s)) of the first member at rows of the dataset."""
        params = jax.tree.map(lambda x: x[0], self.params)
        seen, action, own = jax.tree.map(filled, (rows.observation, rows.action, own))
        taken = np.asarray(_taken(self.network, params, seen, action))
        value = np.asarray(_policy_value(self.network, params, seen, own, self.epsilon))
        return self.scale * taken[: len(rows.action)], self.scale * value[: len(rows.action)]


@dataclass(frozen=True)
class ActionValue:
    """A Q-network: one output per action if they are Discrete, otherwise one output for the
    observation and action together."""

    observation: Any
    action: ActionSpace
    hidden: tuple[int, ...]

    def init(self, key: jax.Array) -> Any:
        """New parameters."""
        encoder = Encoder(self.observation)
        inputs = encoder.size + (0 if isinstance(self.action, Discrete) else self._width)
        layers = {"encoder": encoder.layers(), "tower": self._tower.layers(inputs)}
        return init_layers(key, layers)

    def value(self, params: Any, observation: Any, action: Any) -> jax.Array:
        """q of observations [n, …] and actions [n, …]."""
        return self.values(params, observation, action[:, None])[:, 0]

    def values(self, params: Any, observation: Any, actions: Any) -> jax.Array:
        """q of observations [n, …] and several actions each [n, k, …]."""
        features = Encoder(self.observation).apply(params["encoder"], observation)
        if isinstance(self.action, Discrete):
            outputs = self._tower.apply(params["tower"], features)
            return jnp.take_along_axis(outputs, actions, axis=-1)
        n, k = actions.shape[:2]
        numbers = self._numbers(actions.reshape(n * k, -1))
        joined = jnp.concatenate([jnp.repeat(features, k, axis=0), numbers], axis=-1)
        return self._tower.apply(params["tower"], joined).reshape(n, k)

    def policy_value(self, params: Any, observation: Any, own: Any, epsilon: float) -> jax.Array:
        """v of observations [n, …], where the policy's actions are `own` [n, draws, …]."""
        value = self.values(params, observation, own).mean(axis=1)
        if not isinstance(self.action, Discrete):
            return value
        features = Encoder(self.observation).apply(params["encoder"], observation)
        mean = self._tower.apply(params["tower"], features).mean(axis=-1)
        return (1 - epsilon) * value + epsilon * mean

    @property
    def _tower(self) -> MLP:
        outputs = self.action.n if isinstance(self.action, Discrete) else 1
        return MLP((*self.hidden, outputs), "relu", output_scale=0.1)

    @property
    def _width(self) -> int:
        match self.action:
            case Continuous(size, _):
                return size
            case MultiDiscrete(nvec):
                return sum(nvec)
            case Discrete(n):
                return n

    def _numbers(self, action: jax.Array) -> jax.Array:
        if isinstance(self.action, Continuous):  # the environment clips to the bounds
            return jnp.clip(action, -1.0, 1.0) if self.action.bounded else action
        if not isinstance(self.action, MultiDiscrete):
            return action
        hots = [jax.nn.one_hot(action[..., i], n) for i, n in enumerate(self.action.nvec)]
        return jnp.concatenate(hots, axis=-1)


_taken = jax.jit(ActionValue.value, static_argnums=0)
_policy_value = jax.jit(ActionValue.policy_value, static_argnums=0)


class _Learner(NamedTuple):
    params: Any
    target: Any
    optimizer: Any


class _Batch(NamedTuple):
    observation: Any
    action: Any
    reward: Any
    terminated: Any
    own: Any
    """The policy's actions at the successor [batch, draws, …]."""
    weights: Any
    """[batch, 1 + members]"""


def fit(
    reader: Reader,
    own: Array,
    options: FittedQ,
    *,
    epsilon: float = 0.0,
    tell: Tell | None = None,
) -> Values:
    """The values of a policy whose actions at the dataset's rows are `own` [rows, draws, …], mixed
    with a fraction `epsilon` of uniform ones."""
    rng = np.random.default_rng(options.seed)
    shape = (options.members, reader.num_episodes)
    weights = np.concatenate([np.ones((1, shape[1])), rng.poisson(1.0, shape)]).astype(np.float32)
    network = ActionValue(reader.codec.observation, reader.codec.action, options.hidden_sizes)
    schedule = optax.linear_schedule(
        options.learning_rate, 0.1 * options.learning_rate, options.updates
    )
    optimizer = optax.adam(schedule)
    keys = jax.random.split(jax.random.key(options.seed), 1 + options.members)
    params = jax.vmap(network.init)(keys)
    target = jax.tree.map(jnp.copy, params)
    # The learner is donated, so its arrays must not share buffers.
    learner = _Learner(jax.tree.map(jnp.copy, params), target, jax.vmap(optimizer.init)(params))
    horizon = min(1 / (1 - options.gamma), float(reader.episodes.lengths.mean()))
    # Keeps the network's outputs near one.
    scale = max(_typical_reward(reader) * horizon, 1e-6)
    rule = _Rule(network, options.gamma, epsilon, scale)
    advance = jax.jit(_advance(rule, optimizer, options), donate_argnums=0)
    # A sample's slot is the number of its step; this finds its episode.
    ends = np.cumsum(reader.episodes.lengths)

    def batch(sample: Any) -> _Batch:
        episode = np.searchsorted(ends, sample.keys.slot, side="right")
        chosen = own[sample.keys.slot + episode + 1]  # each earlier episode has one extra row
        added: dict[str, Any] = {"own": chosen, "weights": weights[:, episode].T}
        return sample.rows._replace(**added)

    with Stream(reader, PER_CALL * options.batch, row=_row, seed=options.seed) as stream:
        for call in range(-(-options.updates // PER_CALL)):
            learner = advance(learner, batch(next(stream)))
            if tell is not None:
                jax.block_until_ready(learner.params)
                tell(call * PER_CALL, options.updates)
        first = jax.tree.map(lambda x: x[0], learner.params)
        found = [float(_lack(rule, first, batch(next(stream)))) for _ in range(CHECKS)]
    lack = scale * horizon * sum(found) / CHECKS
    return Values(learner.params, network, scale, weights, epsilon, lack)


def _row(rows: Rows) -> _Batch:
    return _Batch(rows.observation, rows.action, rows.reward, rows.terminated, (), ())


def _typical_reward(reader: Reader) -> float:
    """Root mean square of the rewards."""
    total = squares = 0.0
    for run in whole_episodes(reader.episodes.lengths, STEPS):
        lengths = reader.episodes.lengths[run.start : run.stop]
        pieces = [Piece(number, 0, int(n)) for number, n in zip(run, lengths, strict=True)]
        rewards = reader.storage.read(pieces, ["rewards"])["rewards"].astype(np.float64)
        total, squares = total + len(rewards), squares + float((rewards**2).sum())
    return (squares / total) ** 0.5


@dataclass(frozen=True)
class _Rule:
    """The Bellman equation of a policy's values, in units of `scale`."""

    network: ActionValue
    discount: float
    epsilon: float
    scale: float

    def found(self, params: Any, batch: _Batch) -> jax.Array:
        """q(s, a) [batch]."""
        seen = jax.tree.map(lambda x: x[:, 0], batch.observation)
        return self.network.value(params, seen, batch.action[:, 0])

    def goal(self, params: Any, batch: _Batch) -> jax.Array:
        """r + γ v(s') [batch]; v(s') is zero after a termination."""
        seen = jax.tree.map(lambda x: x[:, 1], batch.observation)
        value = self.network.policy_value(params, seen, batch.own, self.epsilon)
        goes_on = self.discount * (1.0 - batch.terminated[:, 0])
        return batch.reward[:, 0] / self.scale + goes_on * value


@partial(jax.jit, static_argnums=0)
def _lack(rule: _Rule, params: Any, batch: _Batch) -> jax.Array:
    """Mean Bellman error: the mean target minus the mean of q."""
    return jnp.mean(rule.goal(params, batch) - rule.found(params, batch))


def _advance(
    rule: _Rule, optimizer: optax.GradientTransformation, options: FittedQ
) -> Callable[[_Learner, _Batch], _Learner]:
    """Several updates of all members, as one function."""

    def loss(params: Any, goal: jax.Array, batch: _Batch, weight: jax.Array) -> jax.Array:
        return jnp.mean(weight * (rule.found(params, batch) - goal) ** 2)

    def update(learner: _Learner, batch: _Batch, weight: jax.Array) -> _Learner:
        goal = rule.goal(learner.target, batch)
        gradients = jax.grad(loss)(learner.params, goal, batch, weight)
        updates, state = optimizer.update(gradients, learner.optimizer, learner.params)
        params = optax.apply_updates(learner.params, updates)
        target = optax.incremental_update(params, learner.target, options.tau)
        return _Learner(params, target, state)

    def one(learner: _Learner, batch: _Batch) -> tuple[_Learner, None]:
        return jax.vmap(update, in_axes=(0, None, 1))(learner, batch, batch.weights), None

    def several(learner: _Learner, batch: _Batch) -> _Learner:
        parts = jax.tree.map(lambda x: x.reshape(PER_CALL, options.batch, *x.shape[1:]), batch)
        return jax.lax.scan(one, learner, parts)[0]

    return several
