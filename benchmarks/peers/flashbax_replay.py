"""flashbax at the replay work, compiled, its state donated.

python -m benchmarks.peers.flashbax_replay [--image] [--prioritized]
"""

from itertools import cycle
from typing import Any

import flashbax
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import replay_protocol as p


def main() -> None:
    work = p.parse_work()
    options: dict[str, Any] = {
        "max_length": work.capacity,
        "min_length": 1,
        "sample_batch_size": p.SAMPLED,
        "add_sequences": True,
        "add_batch_size": None,
    }
    if work.prioritized:
        made = flashbax.make_prioritized_flat_buffer(
            **options, priority_exponent=p.EXPONENT, device="cpu"
        )
    else:
        made = flashbax.make_flat_buffer(**options)
    example = {
        "observation": jnp.zeros(work.shape, work.dtype),
        "action": jnp.zeros((), jnp.int32),
        "reward": jnp.zeros((), jnp.float32),
        "terminated": jnp.zeros((), bool),
    }
    small = {
        name: np.zeros((p.INSERTED, *x.shape), x.dtype)
        for name, x in example.items()
        if name != "observation"
    }
    batches = cycle({"observation": x[:-1], **small} for x in p.observations(work))
    state: list[Any] = [made.init(example)]
    add = jax.jit(made.add, donate_argnums=0)
    draw = jax.jit(made.sample)
    priorities = np.random.default_rng(0).random(p.SAMPLED).astype(np.float32)
    keys = cycle(list(jax.random.split(jax.random.key(0), 64)))
    update: Any = jax.jit(made.set_priorities, donate_argnums=0) if work.prioritized else None

    def insert() -> None:
        state[0] = jax.block_until_ready(add(state[0], next(batches)))

    def sample() -> None:
        found = jax.block_until_ready(draw(state[0], next(keys)))
        if work.prioritized:
            state[0] = jax.block_until_ready(update(state[0], found.indices, priorities))

    p.answer(work, insert, sample)


if __name__ == "__main__":
    main()
