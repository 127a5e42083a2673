"""cpprb at the replay work.

    python -m benchmarks.peers.cpprb_replay [--image] [--prioritized]

Images are stored as whole stacks, with the next one; its own options to compress them are slower.
"""

from itertools import cycle
from typing import Any

import numpy as np
from cpprb import PrioritizedReplayBuffer, ReplayBuffer

from benchmarks import replay_protocol as p


def main() -> None:
    work = p.parse_work()
    fields: dict[str, Any] = {
        "obs": {"shape": work.shape, "dtype": work.dtype},
        "act": {"dtype": np.int32},
        "rew": {"dtype": np.float32},
        "next_obs": {"shape": work.shape, "dtype": work.dtype},
        "done": {"dtype": bool},
    }
    made: Any
    if work.prioritized:
        made = PrioritizedReplayBuffer(work.capacity, fields, alpha=p.EXPONENT)
    else:
        made = ReplayBuffer(work.capacity, fields)
    zeros = np.zeros(p.INSERTED, np.float32)
    batches = cycle(
        {
            "obs": np.ascontiguousarray(x[:-1]),
            "next_obs": np.ascontiguousarray(x[1:]),
            "act": zeros.astype(np.int32),
            "rew": zeros,
            "done": zeros.astype(bool),
        }
        for x in p.observations(work)
    )
    priorities = np.random.default_rng(0).random(p.SAMPLED)

    def insert() -> None:
        made.add(**next(batches))

    def sample() -> None:
        if work.prioritized:
            found = made.sample(p.SAMPLED, beta=0.4)
            made.update_priorities(found["indexes"], priorities)
        else:
            made.sample(p.SAMPLED)

    p.answer(work, insert, sample)


if __name__ == "__main__":
    main()
