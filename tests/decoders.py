"""Toys that act on a whole batch, with a carry that notices a wrong slot and a missed reset."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from toys import Toy, ToyState, uniform

from dovetail.algorithm import RL, Metrics, Timestep

SIZE = 3
"""Entries of the cache."""


@dataclass(frozen=True)
class Decoder(Toy):
    """Acts on the mean of the last observations, which its cache keeps. Has no `act`."""

    def initial_carry(self) -> Any:
        return {
            "cache": jnp.full((SIZE, 4), 7.0),
            "length": jnp.int32(0),
            "owner": jnp.int32(-1),
        }

    def act_batch(self, params: Any, carry: Any, timestep: Timestep, keys: jax.Array) -> Any:
        carry, memory = self.remembered(carry, timestep)
        chance = jax.nn.softmax(memory @ params["w"])[:, 1]
        action = (jax.vmap(uniform)(keys)[:, 0] < chance).astype(jnp.int32)
        return action, (memory, carry["length"], carry["owner"] == timestep.number), carry

    def greedy_batch(self, params: Any, carry: Any, timestep: Timestep) -> Any:
        carry, memory = self.remembered(carry, timestep)
        return jnp.argmax(memory @ params["w"], -1), carry

    def remembered(self, carry: Any, timestep: Timestep) -> Any:
        """(carry, memory [B, 4]) with the newest observation in."""
        length, owner = carry["length"], carry["owner"]
        rows = jnp.arange(len(length))
        cache = carry["cache"].at[rows, length % SIZE].set(timestep.observation)
        # an episode's first step says whose the slot is; nobody else may come to it afterward
        owner = jnp.where(length == 0, timestep.number, owner)
        length = length + 1
        filled = jnp.arange(SIZE) < length[:, None]
        memory = jnp.where(filled[..., None], cache, 0).sum(1) / filled.sum(1, keepdims=True)
        return {"cache": cache, "length": length, "owner": owner}, memory

    def loss(self, params: Any, batch: Any) -> jax.Array:
        memory = batch.extras[0] + batch.carry["cache"].mean(2)
        return super().loss(params, batch._replace(observation=memory))

    def value(self, params: Any, carry: Any, timestep: Timestep) -> jax.Array:
        return ((timestep.observation + carry["cache"].mean(0)) @ params["w"]).sum()

    def iteration(self, rl: RL, state: ToyState) -> tuple[ToyState, Metrics]:
        params = rl.broadcast(state.params)
        trajectory = rl.unroll(self.chosen, params, self.unroll_length, bootstrap=self.value)
        batch = rl.gather(trajectory)
        _, length, owned = batch.extras
        following = jnp.where(batch.first[1:], 1, length[:-1] + 1)
        wrong = (length[1:] != following).sum() + (~owned).sum()
        wrong += jnp.where(
            batch.first[0], length[0] != 1, length[0] != batch.carry["length"] + 1
        ).sum()
        gradients = jax.grad(self.loss)(state.params, batch)
        metrics = {"wrong": rl.mean(wrong), "begun": rl.mean(batch.first.sum())}
        return self.updated(state, rl.mean(gradients)), metrics

    @property
    def chosen(self) -> Any:
        return self.act_batch


@dataclass(frozen=True)
class Forgetful(Decoder):
    """As `Decoder`, and resets no more than it must."""

    def reset_carry(self, carry: Any, first: jax.Array) -> Any:
        return carry | {"length": jnp.where(first, 0, carry["length"])}


@dataclass(frozen=True)
class Mapped(Decoder):
    """As `Decoder`, written for one environment."""

    def act(self, params: Any, carry: Any, timestep: Timestep, key: jax.Array) -> Any:
        whole = super().act_batch(params, *_alone((carry, timestep, key)))
        return jax.tree.map(lambda x: x[0], whole)

    def greedy(self, params: Any, carry: Any, timestep: Timestep) -> Any:
        whole = super().greedy_batch(params, *_alone((carry, timestep)))
        return jax.tree.map(lambda x: x[0], whole)

    @property
    def chosen(self) -> Any:
        return self.act


def _alone(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)
