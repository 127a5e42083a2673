"""dm-reverb at the replay work: a server in a process of its own, one client.

    python -m benchmarks.peers.reverb_service [--image] [--prioritized]

Each step is stored once and shared by the two transitions that it belongs to. Sampling is tried by
its client and by its dataset of trajectories, and the faster counts.
"""

import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import reverb
import tensorflow as tf

from benchmarks import replay_protocol as p

TABLE = "replay"


def signature(work: p.Work) -> dict[str, Any]:
    return {
        "observation": tf.TensorSpec([2, *work.shape], tf.as_dtype(work.dtype)),
        "action": tf.TensorSpec([1], tf.int32),
        "reward": tf.TensorSpec([1], tf.float32),
        "terminated": tf.TensorSpec([1], tf.bool),
    }


def serve(work: p.Work, port: int) -> None:
    sampler = (
        reverb.selectors.Prioritized(p.EXPONENT) if work.prioritized else reverb.selectors.Uniform()
    )
    table = reverb.Table(
        TABLE,
        sampler,
        reverb.selectors.Fifo(),
        work.capacity,
        reverb.rate_limiters.MinSize(1),
        signature=signature(work),
    )
    reverb.Server([table], port=port).wait()


def steps(work: p.Work) -> Iterator[dict[str, Any]]:
    for seen in cycle(p.observations(work)):
        for row in seen[:-1]:
            yield {
                "observation": row,
                "action": np.int32(0),
                "reward": np.float32(0),
                "terminated": np.bool_(False),
            }


def main() -> None:
    work = p.parse_work()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(work, port), daemon=True
    )
    process.start()
    address = f"localhost:{port}"
    client = reverb.Client(address)
    for _ in range(60):
        try:
            client.server_info(1)
            break
        except Exception:
            time.sleep(1)
    source = steps(work)
    with client.trajectory_writer(num_keep_alive_refs=2) as writer:

        def insert() -> None:
            for step in islice(source, p.INSERTED):
                writer.append(step)
                if writer.episode_steps < 2:
                    continue
                history = writer.history
                item = {
                    "observation": history["observation"][-2:],
                    "action": history["action"][-2:-1],
                    "reward": history["reward"][-2:-1],
                    "terminated": history["terminated"][-2:-1],
                }
                writer.create_item(TABLE, 1.0, item)
            writer.flush(block_until_num_items=4 * p.INSERTED)

        priorities = np.random.default_rng(0).random(p.SAMPLED)

        def update(keys: Any) -> None:
            if work.prioritized:
                pairs = zip(keys.tolist(), priorities.tolist(), strict=True)
                client.mutate_priorities(TABLE, dict(pairs))

        dataset = reverb.TrajectoryDataset.from_table_signature(
            address, TABLE, max_in_flight_samples_per_worker=2 * p.SAMPLED
        )
        batches: Any = dataset.batch(p.SAMPLED).prefetch(2).as_numpy_iterator()

        def from_dataset() -> None:
            update(next(batches).info.key)

        def from_client() -> None:
            found = list(client.sample(TABLE, p.SAMPLED, emit_timesteps=False))
            for column in zip(*(sample.data for sample in found), strict=True):
                np.stack(column)
            update(np.array([np.ravel(sample.info.key)[0] for sample in found], np.uint64))

        p.answer(work, insert, [from_dataset, from_client])
    process.kill()


if __name__ == "__main__":
    main()
