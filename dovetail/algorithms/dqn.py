"""DQN, https://www.nature.com/articles/nature14236, with the parts of Rainbow as options.

Actors explore epsilon-greedily and insert their steps into a replay; the learner samples items of
up to `n_step` steps from it and moves the value of their first action towards their rewards and the
value of where they led, as a slowly following copy of the network sees it. What old weights did is
as good as what new ones do, so it bears any staleness.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dovetail.algorithm import RL, Algorithm, Carry, Correction, Metrics, Timestep
from dovetail.envs.interface import Discrete
from dovetail.errors import check_option
from dovetail.functions.bootstrapping import n_step, row
from dovetail.functions.exploration import epsilon_greedy, linear
from dovetail.networks import layers
from dovetail.networks.q_network import QNetwork
from dovetail.replay.replay import Replay
from dovetail.replay.sample import Sample, importance_weights
from dovetail.replay.table import Prioritised, Table, Transitions, Uniform


class Row(NamedTuple):
    """What the replay keeps of a step."""

    observation: Any
    action: Any
    reward: Any
    terminated: Any


class Acting(NamedTuple):
    """What actors need: the network's weights and how often to act at random."""

    network: Any
    epsilon: jax.Array


class LearnerState(NamedTuple):
    """The learner's state."""

    params: Any
    target: Any
    optimiser: Any
    replay: Replay
    key: jax.Array
    updates: jax.Array


@dataclass(frozen=True)
class DQN(Algorithm):
    """Deep Q-learning from a replay; each part of Rainbow can be switched on alone."""

    actions: ClassVar[tuple[type, ...]] = (Discrete,)
    correction: ClassVar[Correction] = Correction("learning off-policy", None)

    unroll_length: int = 4
    """Steps each environment takes between two updates."""
    gradient_steps: int = 2
    """Gradient steps of an update, in one compiled call."""
    batch_size: int = 128
    """Items of a gradient step."""
    learning_rate: float = 1e-3
    """Adam's step size."""
    discount: float = 0.99
    """How much a reward one step later counts."""
    n_step: int = 1
    """Steps whose rewards are taken as they were before a value stands for the rest."""
    capacity: int = 50_000
    """The most items in the replay."""
    begin_at: int = 1_000
    """Items in the replay before anything is learned."""
    target_rate: float = 0.01
    """How far the target network moves towards the network with each gradient step."""
    epsilon_start: float = 1.0
    """The share of random actions at the start."""
    epsilon_end: float = 0.05
    """The share of random actions in the end."""
    epsilon_share: float = 0.2
    """The share of the run after which it is `epsilon_end`."""
    double: bool = True
    """Whether the network chooses the action that the target network values,
    https://arxiv.org/abs/1509.06461."""
    duelling: bool = False
    """Whether a state's value and the actions' advantages are apart,
    https://arxiv.org/abs/1511.06581."""
    prioritised: bool = False
    """Whether items of larger errors are sampled more often, https://arxiv.org/abs/1511.05952."""
    priority_exponent: float = 0.6
    """The power of the error that priorities are; 0 makes all alike."""
    importance_exponent: float = 0.4
    """How much of the bias of priorities is taken back; 1 for all."""
    max_grad_norm: float = 10.0
    """Gradients are scaled down to this norm."""
    hidden: tuple[int, ...] = (128, 128)
    """Sizes of the hidden layers."""
    activation: str = "relu"
    """Activation of the hidden layers: elu, gelu, relu, silu or tanh."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_grad_norm"):
            check_option(name, getattr(self, name), getattr(self, name) > 0, "more than 0")
        whole = ("unroll_length", "gradient_steps", "batch_size", "n_step", "capacity", "begin_at")
        for name in whole:
            check_option(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")
        shares = ("discount", "target_rate", "epsilon_start", "epsilon_end", "epsilon_share")
        for name in (*shares, "priority_exponent", "importance_exponent"):
            check_option(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "0 to 1")
        items = self.capacity
        check_option("begin_at", self.begin_at, self.begin_at <= items, f"1 to {items}")
        check_option("hidden", self.hidden, all(n > 0 for n in self.hidden), "sizes above 0")
        layers.activation(self.activation)

    @property
    def network(self) -> QNetwork:
        """The network for the task's spaces."""
        env = self.task.env
        assert isinstance(env.action, Discrete)
        return QNetwork(env.observation, env.action.n, self.hidden, self.activation, self.duelling)

    @property
    def table(self) -> Table:
        """The replay's options."""
        sampler = Prioritised(self.priority_exponent) if self.prioritised else Uniform()
        return Table(Transitions(self.n_step), self.capacity, sampler)

    def init(self, key: jax.Array) -> LearnerState:
        """New weights, a fresh optimiser, an empty replay."""
        network_key, key = jax.random.split(key)
        params = self.network.init(network_key)
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        example = Row(
            observation=self.task.env.observation,
            action=jax.ShapeDtypeStruct((), jnp.int32),
            reward=scalar,
            terminated=jax.ShapeDtypeStruct((), jnp.bool_),
        )
        return LearnerState(
            params=params,
            target=params,
            optimiser=self.optimiser().init(params),
            replay=self.task.replay(self.table, example),
            key=key,
            updates=jnp.zeros((), jnp.int32),
        )

    def optimiser(self) -> optax.GradientTransformation:
        """Adam with clipped gradients."""
        clip = optax.clip_by_global_norm(self.max_grad_norm)
        return optax.chain(clip, optax.adam(self.learning_rate))

    def acting(self, state: LearnerState) -> Acting:
        """The weights, and how often to explore by now."""
        steps = state.updates * (self.unroll_length * self.task.num_envs)
        over = self.epsilon_share * self.task.steps
        epsilon = linear(self.epsilon_start, self.epsilon_end, over, steps)
        return Acting(state.params, epsilon)

    def act(
        self, params: Acting, carry: Carry, timestep: Timestep, key: jax.Array
    ) -> tuple[jax.Array, tuple[()], Carry]:
        """Epsilon-greedy."""
        values = self.network.apply(params.network, timestep.observation)
        return epsilon_greedy(key, values, params.epsilon), (), carry

    def greedy(self, params: Acting, carry: Carry, timestep: Timestep) -> tuple[jax.Array, Carry]:
        """The action of the highest value."""
        values = self.network.apply(params.network, timestep.observation)
        return jnp.argmax(values, axis=-1).astype(jnp.int32), carry

    def iteration(self, rl: RL, state: LearnerState) -> tuple[LearnerState, Metrics]:
        """Actors insert what they did; the learner learns from samples of what is there."""
        params = rl.broadcast(self.acting(state))
        steps = rl.unroll(self.act, params, self.unroll_length)
        rows = Row(steps.observation, steps.action, steps.reward, steps.terminated)
        final = Row(steps.next_observation, None, None, None)
        replay = rl.insert(state.replay, steps, rows, final)
        key = jax.random.fold_in(state.key, state.updates)
        draws = jax.random.uniform(key, (self.gradient_steps, self.batch_size))
        replay, sample = rl.sample(replay, draws)
        state, errors, metrics = self.learn(rl, state, sample)
        if self.prioritised:
            replay = rl.update_priorities(replay, sample.keys, errors + 1e-6)
        return state._replace(replay=replay, updates=state.updates + 1), metrics

    def learn(
        self, rl: RL, state: LearnerState, sample: Sample
    ) -> tuple[LearnerState, jax.Array, Metrics]:
        """(state, errors, metrics): a gradient step on each part of a sample, once there is enough
        to sample from."""
        weights = jnp.asarray(sample.mask[:, :, 0], jnp.float32)  # what was broken off has no step
        if self.prioritised:
            weights *= importance_weights(
                sample.probabilities, sample.size, self.importance_exponent
            )
        enough = jnp.min(sample.size) >= self.begin_at

        def step(state: LearnerState, part: Any) -> tuple[LearnerState, Any]:
            gradients, (errors, metrics) = jax.grad(self._loss, has_aux=True)(
                state.params, state.target, *part
            )
            updates, optimiser = self.optimiser().update(
                rl.mean(gradients), state.optimiser, state.params
            )
            params = optax.apply_updates(state.params, updates)
            target = optax.incremental_update(params, state.target, self.target_rate)
            new = state._replace(params=params, target=target, optimiser=optimiser)
            return jax.tree.map(lambda a, b: jnp.where(enough, a, b), new, state), (errors, metrics)

        kept = state._replace(replay=())  # type: ignore[arg-type]
        kept, (errors, metrics) = jax.lax.scan(step, kept, (sample.rows, sample.mask, weights))
        means = {name: jnp.where(enough, jnp.mean(x), 0.0) for name, x in metrics.items()}
        return kept, errors, means

    def _loss(
        self, params: Any, target: Any, rows: Row, mask: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Huber's loss of the temporal-difference errors."""
        steps = n_step(rows.reward, rows.terminated, mask, self.discount)
        after = row(rows.observation, steps.last)
        following = self.network.apply(target, after)
        judged = self.network.apply(params, after) if self.double else following
        best = jnp.argmax(judged, axis=-1)
        values = jnp.take_along_axis(following, best[:, None], axis=1)[:, 0]
        goal = jax.lax.stop_gradient(steps.reward + steps.discount * values)
        first = jax.tree.map(lambda x: x[:, 0], rows.observation)
        found = self.network.apply(params, first)
        taken = jnp.take_along_axis(found, rows.action[:, :1], axis=1)[:, 0]
        errors = taken - goal
        loss = jnp.mean(weights * optax.losses.huber_loss(taken, goal))
        return loss, (jnp.abs(errors), {"loss": loss, "value": jnp.mean(taken)})
