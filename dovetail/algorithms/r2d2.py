"""R2D2, https://openreview.net/forum?id=r1lyTjAqYX: Ape-X with a memory, learned from sequences.

The replay holds overlapping sequences of steps, and with every step the memory that the actor had
then. The learner begins with the stored memory of a sequence's first step, lets the network read
some steps only to bring that memory up to date (`burn_in`), and learns from the rest. Values are on
a scale like the square root of the return. Sequences may cross the ends of episodes; the memory is
new where one begins. Unusual here: a gated recurrent unit that sees the observation alone, and new
sequences have the highest priority so far, since they are longer than an actor's unroll.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dovetail.algorithm import Carry, Metrics, Timestep, Trajectory
from dovetail.algorithms.value_based import Acting, Batch, Laddered
from dovetail.errors import check_option
from dovetail.functions.bootstrapping import chosen
from dovetail.functions.exploration import epsilon_greedy, epsilon_greedy_log_prob
from dovetail.functions.rescaling import rescale, restore
from dovetail.functions.returns import n_step_returns
from dovetail.networks.q_network import QNetwork
from dovetail.replay.table import Sequences, Table


class SequenceRow(NamedTuple):
    """What the replay keeps of a step."""

    observation: Any
    action: Any
    reward: Any
    terminated: Any
    first: Any
    """Whether the step begins an episode."""
    memory: Any
    """The actor's memory before the step."""


class Acted(NamedTuple):
    """What acting leaves in the trajectory beside the action."""

    memory: Carry
    """Before the step."""
    log_prob: jax.Array


@dataclass(frozen=True)
class R2D2(Laddered):
    """Q-learning with a recurrent network, from sequences with their stored memory."""

    gradient_steps: int = 4
    """Gradient steps of an update, in one compiled call."""
    batch_size: int = 32
    """Sequences of a gradient step."""
    capacity: int = 5_000
    """The most sequences in the replay."""
    begin_at: int = 100
    """Sequences in the replay before anything is learned."""
    n_step: int = 5
    """Steps whose rewards are taken as they were before a value stands for the rest."""
    dueling: bool = True
    """Whether a state's value and the actions' advantages are apart,
    https://arxiv.org/abs/1511.06581."""
    priority_exponent: float = 0.9
    """The power of the error that priorities are; 0 makes all alike."""
    importance_exponent: float = 0.6
    """How much of the bias of priorities is taken back; 1 for all."""
    huber: float = 1.0
    """Errors up to this count by their square, larger ones by their size."""
    hidden: tuple[int, ...] = (64,)
    """Sizes of the hidden layers behind the memory."""
    recurrent: int = 64
    """Size of the memory."""
    burn_in: int = 4
    """Steps of a sequence that only bring the memory up to date."""
    learned: int = 16
    """Steps of a sequence that are learned from."""
    period: int = 8
    """Steps from the beginning of a sequence to that of the next."""
    priority_mix: float = 0.9
    """The share of a sequence's largest error in its priority; the rest is that of the mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(("recurrent", "learned"), lambda x: x >= 1, "1 or more")
        self._check(("burn_in",), lambda x: x >= 0, "0 or more")
        self._check_shares("priority_mix")
        longest = self.burn_in + self.learned
        check_option("period", self.period, 1 <= self.period <= longest, f"1 to {longest}")

    @property
    def network(self) -> QNetwork:
        """The network for the task's spaces."""
        return dataclasses.replace(super().network, recurrent=self.recurrent)

    @property
    def table(self) -> Table:
        """The replay's options: a sequence has one more row, which shows what came after."""
        length = self.burn_in + self.learned + 1
        return Table(Sequences(length, self.period), self.capacity, self.sampler)

    def initial_carry(self) -> Carry:
        """An empty memory."""
        return self.network.initial_carry()

    def example(self) -> Any:
        """The shapes of a row."""
        first, memory = jax.ShapeDtypeStruct((), jnp.bool_), jax.eval_shape(self.initial_carry)
        return SequenceRow(**super().example()._asdict(), first=first, memory=memory)

    def rows(self, steps: Trajectory) -> tuple[Any, Any]:
        """(rows, what was seen after each) of a trajectory."""
        row, final = super().rows(steps)
        rows = SequenceRow(**row._asdict(), first=steps.first, memory=steps.extras.memory)
        return rows, SequenceRow(**final._asdict(), first=None, memory=None)

    def act(
        self, params: Acting, carry: Carry, timestep: Timestep, key: jax.Array
    ) -> tuple[jax.Array, Acted, Carry]:
        """Epsilon-greedy, with the memory that it began with."""
        values, after = self._next(params, carry, timestep)
        epsilon = self.epsilon(params, timestep)
        action = epsilon_greedy(key, values, epsilon)
        return action, Acted(carry, epsilon_greedy_log_prob(values, epsilon, action)), after

    def log_prob(
        self, params: Acting, carry: Carry, timestep: Timestep, action: jax.Array
    ) -> jax.Array:
        """By the share of random actions."""
        values, _ = self._next(params, carry, timestep)
        return epsilon_greedy_log_prob(values, self.epsilon(params, timestep), action)

    def greedy(self, params: Acting, carry: Carry, timestep: Timestep) -> tuple[jax.Array, Carry]:
        """The action of the highest value."""
        values, carry = self._next(params, carry, timestep)
        return jnp.argmax(values, axis=-1).astype(jnp.int32), carry

    def _next(self, params: Acting, carry: Carry, timestep: Timestep) -> tuple[jax.Array, Carry]:
        """What actions are worth, and the memory after what is seen."""
        outputs, carry = self.network.step(
            self.weights(params.network), carry, timestep.observation
        )
        return self.values(outputs), carry

    def loss(
        self, params: Any, target: Any, batch: Batch, noise: Any
    ) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        """(loss, (errors, metrics)) of a batch of sequences."""
        rows, mask = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (batch.rows, batch.mask))
        found = self._read(params, rows)
        following = self._read(target, rows)
        judged = found if self.double else following
        best = chosen(following, jnp.argmax(self.values(judged), axis=-1))[..., 0]
        rows, mask = jax.tree.map(lambda x: x[self.burn_in :], (rows, mask))
        taken = chosen(found, rows.action)[:-1, :, 0]
        # A step is known by the row after it, which begins no episode unless one was broken off.
        known = mask[:-1] & ~rows.first[1:]
        cut = jnp.concatenate([~known[1:], jnp.ones_like(known[:1])])
        returns = n_step_returns(
            *(rows.reward[:-1], restore(best[1:]), rows.terminated[:-1], cut),
            *(self.discount, self.n_step),
        )
        goals = jax.lax.stop_gradient(rescale(returns))
        errors = jnp.where(known, jnp.abs(taken - goals), 0.0)
        losses = jnp.where(known, optax.losses.huber_loss(taken, goals, delta=self.huber), 0.0)
        loss = jnp.mean(batch.weights * losses.mean(axis=0))
        mean = errors.sum(axis=0) / jnp.maximum(known.sum(axis=0), 1)
        mixed = self.priority_mix * errors.max(axis=0) + (1.0 - self.priority_mix) * mean
        return loss, (mixed, {"loss": loss, "value": jnp.mean(restore(taken))})

    def _read(self, params: Any, rows: SequenceRow) -> jax.Array:
        """The outputs [1 + learned, n, …] for a sequence's rows behind the burn-in."""
        memory = rows.memory[0]
        if self.burn_in:
            seen, first = jax.tree.map(lambda x: x[: self.burn_in], (rows.observation, rows.first))
            memory = self.network.unroll(params, memory, seen, first)[1][-1]
        seen, first = jax.tree.map(lambda x: x[self.burn_in :], (rows.observation, rows.first))
        return self.network.unroll(params, jax.lax.stop_gradient(memory), seen, first)[0]
