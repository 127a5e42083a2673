"""torchrl at the replay work, with its fastest storage of one process and one thread.

python -m benchmarks.peers.torchrl_replay [--image] [--prioritized]
"""

from itertools import cycle

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from benchmarks import replay_protocol as p


def main() -> None:
    work = p.parse_work()
    torch.set_num_threads(1)
    storage = LazyTensorStorage(work.capacity)
    made = TensorDictReplayBuffer(storage=storage, batch_size=p.SAMPLED)
    batches = cycle([rows(torch.from_numpy(x)) for x in p.observations(work)])

    def insert() -> None:
        made.extend(next(batches))

    def sample() -> None:
        made.sample()

    p.answer(work, insert, sample)


def rows(seen: torch.Tensor) -> TensorDict:
    return TensorDict(
        {
            "observation": seen[:-1].clone(),
            "next_observation": seen[1:].clone(),
            "action": torch.zeros(p.INSERTED, dtype=torch.int32),
            "reward": torch.zeros(p.INSERTED),
            "terminated": torch.zeros(p.INSERTED, dtype=torch.bool),
        },
        batch_size=[p.INSERTED],
    )


if __name__ == "__main__":
    main()
