"""Dovetail's host table at the replay work.

    python -m benchmarks.replay_ours [--image] [--prioritized]

An insert is one step of 64 environments, as acting makes them.
"""

from itertools import cycle
from typing import Any

import numpy as np

from benchmarks import replay_protocol as p
from dovetail.replay import History, HostTable, Prioritized, Table, Transitions, Uniform


def main() -> None:
    work = p.parse_work()
    history = (History("observation", 4, -1),) if work.image else ()
    sampler = Prioritized(p.EXPONENT) if work.prioritized else Uniform()
    options = Table(Transitions(1), work.capacity, sampler, history=history)
    table = HostTable(options, p.row(work), num_envs=p.INSERTED)
    batches = cycle(p.steps(work))
    ends, valid = np.zeros((1, p.INSERTED), bool), np.ones((1, p.INSERTED), bool)
    random = np.random.default_rng(0)
    priorities = random.random(p.SAMPLED, np.float32)

    def insert() -> None:
        table.insert(next(batches), ends, valid)

    def sample() -> Any:
        found = table.sample(random.random(p.SAMPLED, np.float32))
        if work.prioritized:
            table.update_priorities(found.keys, priorities)

    p.answer(work, insert, sample, table.nbytes / work.capacity)


if __name__ == "__main__":
    main()
