"""Dovetail's host table at the replay work.

    python -m benchmarks.replay_ours [--image] [--prioritised]

An insert is one step of 64 environments, as acting makes them.
"""

from itertools import cycle
from typing import Any

import numpy as np

from benchmarks import replay_protocol as p
from dovetail.replay import History, HostTable, Prioritised, Table, Transitions, Uniform


def main() -> None:
    work = p.parse_work()
    history = (History("observation", 4, -1),) if work.image else ()
    sampler = Prioritised(p.EXPONENT) if work.prioritised else Uniform()
    example = {
        "observation": np.zeros(work.shape, work.dtype),
        "action": np.zeros((), np.int32),
        "reward": np.zeros((), np.float32),
        "terminated": np.zeros((), bool),
    }
    options = Table(Transitions(1), work.capacity, sampler, history=history)
    table = HostTable(options, example, num_envs=p.INSERTED)
    small = {
        name: np.zeros((1, p.INSERTED, *x.shape), x.dtype)
        for name, x in example.items()
        if name != "observation"
    }
    batches = cycle({"observation": x[None, : p.INSERTED], **small} for x in p.observations(work))
    ends, valid = np.zeros((1, p.INSERTED), bool), np.ones((1, p.INSERTED), bool)
    random = np.random.default_rng(0)
    priorities = random.random(p.SAMPLED, np.float32)

    def insert() -> None:
        table.insert(next(batches), ends, valid)

    def sample() -> Any:
        found = table.sample(random.random(p.SAMPLED, np.float32))
        if work.prioritised:
            table.update_priorities(found.keys, priorities)

    p.answer(work, insert, sample, table.nbytes / work.capacity)


if __name__ == "__main__":
    main()
