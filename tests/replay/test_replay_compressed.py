"""Compressed tables give what others give, and keep to their budget of bytes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dovetail.errors import UserError
from dovetail.replay import (
    Fifo,
    History,
    HostTable,
    Lowest,
    Prioritized,
    ReplayServer,
    Selector,
    Sequences,
    Table,
    Transitions,
)
from dovetail.replay.device import table as device
from dovetail.replay.storage.save import load, save

ROW = {
    "pixels": np.zeros((12, 12, 4), np.uint8),
    "map": np.zeros((20, 20), np.float32),
    "reward": np.zeros((), np.float32),
}
STACK = (History("pixels", 4),)


def step(random: np.random.Generator, spread: int = 4) -> dict[str, Any]:
    """Steps of three environments, the more easily compressed the smaller the spread."""
    return {
        "pixels": random.integers(0, spread, (2, 3, 12, 12, 4), np.uint8),
        "map": random.integers(0, spread, (2, 3, 20, 20)).astype(np.float32),
        "reward": random.random((2, 3), np.float32),
    }


@pytest.mark.parametrize("remover", [Fifo(), Lowest()])
@pytest.mark.parametrize("history", [(), STACK])
def test_sampled_values_are_identical(remover: Selector, history: Any) -> None:
    options = Table(Transitions(2), 60, Prioritized(), remover, history=history)
    plain, packed = HostTable(options, ROW, 3), HostTable(replace(options, compress=True), ROW, 3)
    random = np.random.default_rng(0)
    pixels = np.zeros((2, 3, 12, 12, 7), np.uint8)
    for number in range(40):
        given = step(random)
        if history:  # each stack goes on from the last
            pixels = np.concatenate([pixels[..., 1:], given["pixels"][..., :1]], axis=-1)
            given["pixels"] = np.stack([pixels[1, ..., :4], pixels[1, ..., 1:5]])
        ends = random.random((2, 3)) < 0.2
        final = {"pixels": given["pixels"]}
        priorities = random.random((2, 3), np.float32)
        draws = random.random(8)
        samples: list[Any] = []
        for table in (plain, packed):
            table.insert(given, ends, None, final, priorities)
            sample = table.sample(draws)
            table.update_priorities(sample.keys, draws.astype(np.float32))
            samples.append(sample)
        for name in ROW:
            for at, mask in enumerate(samples[0].mask):  # rows behind the window have no meaning
                until = int(np.flatnonzero(mask)[-1]) + 2
                wanted = samples[0].rows[name][at, :until]
                np.testing.assert_array_equal(
                    samples[1].rows[name][at, :until], wanted, str(number)
                )
    assert packed.nbytes < plain.nbytes / (2 if isinstance(remover, Fifo) else 1.2)
    other = HostTable(replace(options, compress=True), ROW, 3)
    load(other, save(packed))
    assert other.nbytes == packed.nbytes
    wanted, found = packed.sample(np.linspace(0, 0.9, 5)), other.sample(np.linspace(0, 0.9, 5))
    np.testing.assert_array_equal(found.rows["map"], wanted.rows["map"])


@pytest.mark.parametrize("items", [Transitions(2), Sequences(4, 2)])
@pytest.mark.parametrize("remover", [Fifo(), Lowest()])
@pytest.mark.parametrize("history", [(), STACK])
def test_a_budget_of_bytes_holds_what_fits(items: Any, remover: Selector, history: Any) -> None:
    budget = 150_000 if isinstance(remover, Fifo) else 700_000  # the rings alone take 360,000
    options = Table(items, 600, Prioritized(), remover, None, budget, history, compress=True)
    table = HostTable(options, ROW, 3)
    sizes: dict[int, int] = {}
    for spread in (2, 256):
        random = np.random.default_rng(spread)
        for _ in range(150):
            table.insert(step(random, spread), random.random((2, 3)) < 0.1)
            assert table.nbytes <= budget
        sizes[spread] = table.size
        sample = table.sample(random.random(8))
        assert sample.rows["map"][:, 0].max() < spread
        assert (sample.rows["map"][:, 0] > 0).any(axis=(1, 2)).all()  # nothing was forgotten
    assert sizes[2] > 1.5 * sizes[256] > 0


def test_a_budget_is_saved_with_the_table() -> None:
    options = Table(Transitions(), 90, max_bytes=60_000, history=STACK, compress=True)
    one, other = HostTable(options, ROW, 3), HostTable(options, ROW, 3)
    random = np.random.default_rng(0)
    for _ in range(20):
        one.insert(step(random))
    load(other, save(one))
    for seed in range(20):
        for table in (one, other):
            table.insert(step(np.random.default_rng(seed)))
        assert one.size == other.size and one.nbytes == other.nbytes


def test_a_compressed_table_is_no_part_of_a_compiled_program() -> None:
    with pytest.raises(UserError, match="compressed replay table was asked for inside a compiled"):
        device.init(Table(compress=True), ROW, 1)


def test_a_server_compresses() -> None:
    options = Table(Transitions(), 90, history=STACK, compress=True)
    with ReplayServer(options, ROW, 3) as server, server.client() as client:
        given = step(np.random.default_rng(0))
        client.insert(given)
        sample = client.sample(np.array([0.1, 0.9]))
        np.testing.assert_array_equal(sample.rows["map"][0, 0], given["map"][0, 0])
        np.testing.assert_array_equal(sample.rows["pixels"][1, 0], given["pixels"][0, 2])
