"""A replay server of Dovetail's at the replay work: a process of its own, one client.

    python -m benchmarks.replay_service_ours [--image] [--prioritized]

An insert is one step of 64 environments; samples come ahead of their time.
"""

from itertools import cycle

import numpy as np

from benchmarks import replay_protocol as p
from dovetail.replay import History, Prioritized, ReplayServer, Table, Transitions, Uniform


def main() -> None:
    work = p.parse_work()
    example = p.row(work)
    batches = cycle(p.steps(work))
    ends, valid = np.zeros((1, p.INSERTED), bool), np.ones((1, p.INSERTED), bool)
    priorities = np.random.default_rng(0).random(p.SAMPLED, np.float32)
    history = (History("observation", 4, -1),) if work.image else ()
    sampler = Prioritized(p.EXPONENT) if work.prioritized else Uniform()
    table = Table(Transitions(1), work.capacity, sampler, history=history)
    with ReplayServer(table, example, p.INSERTED) as server, server.client() as client:

        def insert() -> None:
            client.insert(next(batches), ends, valid)

        for _ in range(work.capacity // p.INSERTED + 2):
            insert()
        client.flush()
        with client.samples(p.SAMPLED) as samples:

            def sample() -> None:
                found = next(samples)
                if work.prioritized:
                    client.update_priorities(found.keys, priorities)

            p.answer(work, insert, sample)


if __name__ == "__main__":
    main()
