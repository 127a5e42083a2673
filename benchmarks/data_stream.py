"""Learning from a dataset on the disk: how busy the learner is, and how much memory it takes.

    python benchmarks/data_stream.py [--steps 10_000_000] [--updates 5000] [--folder FOLDER]

Makes a dataset with the shapes of HalfCheetah, streams it to a learner that fits action values (two
layers of 256, batches of 256), and prints one line of JSON. Memory is resident memory above that of
the process when it has its model and has learnt once.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gymnasium import spaces

from dovetail import data
from dovetail.networks.mlp import MLP

LENGTH, BATCH = 1000, 256
OBSERVATION, ACTION = 17, 6


class Row(NamedTuple):
    observation: Any
    action: Any
    reward: Any
    terminated: Any


def row(rows: data.Rows) -> Row:
    return Row(rows.observation, rows.action, rows.reward, rows.terminated)


def make(folder: Path, steps: int) -> None:
    """Writes the dataset."""
    box = spaces.Box(-np.inf, np.inf, (OBSERVATION,), np.float32)
    action = spaces.Box(-1, 1, (ACTION,), np.float32)
    source = data.Source("gymnasium:HalfCheetah-v5", "benchmark")
    metadata = data.Metadata(box, action, source.environment, sources=(source,))
    rng = np.random.default_rng(0)
    with data.Writer(folder, metadata) as writer:
        for _ in range(steps // LENGTH):
            writer.write(
                data.Episode(
                    observations=rng.standard_normal((LENGTH + 1, OBSERVATION), np.float32),
                    actions=2 * rng.random((LENGTH, ACTION), np.float32) - 1,
                    rewards=rng.standard_normal(LENGTH, np.float32),
                    terminations=np.zeros(LENGTH, bool),
                    truncations=np.arange(LENGTH) == LENGTH - 1,
                )
            )


def resident(field: str = "VmRSS") -> float:
    """Megabytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{field}:")[2].split()[0]) / 1024


def learner() -> tuple[Any, Any]:
    network, optimiser = MLP((256, 256, 1), "relu"), optax.adam(3e-4)
    params = network.init(jax.random.key(0), OBSERVATION + ACTION)

    def value(params: Any, rows: Row, at: int) -> jax.Array:
        joined = jnp.concatenate([rows.observation[:, at], rows.action[:, at]], axis=-1)
        return network.apply(params, joined)[:, 0]

    def loss(params: Any, rows: Row) -> jax.Array:
        goes_on = 0.99 * (1 - rows.terminated[:, 0])
        goal = rows.reward[:, 0] + goes_on * jax.lax.stop_gradient(value(params, rows, 1))
        return jnp.mean((value(params, rows, 0) - goal) ** 2)

    @jax.jit
    def step(state: Any, rows: Row) -> Any:
        params, moments = state
        updates, moments = optimiser.update(jax.grad(loss)(params, rows), moments)
        return optax.apply_updates(params, updates), moments

    return (params, optimiser.init(params)), step


def nothing() -> Row:
    """A batch of zeros."""
    flags = np.zeros((BATCH, 2), np.float32)
    seen = np.zeros((BATCH, 2, OBSERVATION), np.float32)
    return Row(seen, np.zeros((BATCH, 2, ACTION), np.float32), flags, flags.astype(bool))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--updates", type=int, default=5000)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary) / "data"
        writing = None
        if not folder.exists():  # in a process of its own, whose memory does not count
            began = time.perf_counter()
            maker = multiprocessing.get_context("spawn").Process(
                target=make, args=(folder, given.steps)
            )
            maker.start()
            maker.join()
            writing = time.perf_counter() - began
        state, step = learner()
        state = jax.block_until_ready(step(state, nothing()))
        model = resident()
        with data.Reader(folder) as reader, data.Stream(reader, BATCH, row=row) as stream:
            next(stream)
            stream.waited, began = 0.0, time.perf_counter()
            for _ in range(given.updates):
                state = jax.block_until_ready(step(state, next(stream).rows))
            seconds = time.perf_counter() - began
            told = {
                "steps": reader.num_steps,
                "writing_s": writing,
                "updates_per_s": given.updates / seconds,
                "busy": 1 - stream.waited / seconds,
                "peak_mb_above_model": resident("VmHWM") - model,
            }
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in told.items()}))


if __name__ == "__main__":
    main()
