"""Sum trees find what a running sum finds, and cost no copy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.replay import Prioritized, Table, Transitions, Uniform
from dovetail.replay.device import table as device
from dovetail.replay.table import Sequences
from dovetail.replay.tree import HostTree, device_tree, find_leaves, set_weights, tree_total


@pytest.mark.parametrize("size", [1, 15, 16, 17, 600, 5000])
def test_a_tree_finds_what_a_running_sum_finds(size: int) -> None:
    random = np.random.default_rng(size)
    weights = random.integers(0, 4, size).astype(np.float64)
    weights[random.integers(size)] = 3.0
    running = np.cumsum(weights)
    targets = np.concatenate([(running - 0.5)[weights > 0][:200], running[:200] - weights[:200]])
    targets = np.clip(targets, 0, running[-1] - 0.25)
    expected = np.searchsorted(running, targets, side="right")
    host = HostTree(size)
    order = random.permutation(size)
    for part in np.array_split(order, 3):  # some after a sum was asked for
        host.set(part, weights[part])
        assert host.total > -1
    assert host.total == running[-1]
    np.testing.assert_array_equal(host.find(targets), expected)
    tree = jax.jit(set_weights)(
        device_tree(size), jnp.asarray(order), jnp.asarray(weights[order]), jnp.arange(0)
    )
    assert tree_total(tree) == running[-1]
    found, weight = jax.jit(find_leaves)(tree, jnp.asarray(targets, jnp.float32))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(weight, weights[expected])


def test_a_tree_on_the_device_has_no_more_nodes_than_it_needs() -> None:
    """1000 leaves are 63 families of 16 whose sums are the top; up to 64 leaves are the top."""
    assert [level.shape for level in device_tree(1000)] == [(63, 16), (1, 63)]
    assert [level.shape for level in device_tree(64)] == [(1, 64)]
    assert [level.shape for level in device_tree(65)] == [(5, 16), (1, 5)]
    levels = [level.shape for level in device_tree(20_000)]
    assert levels == [(1250, 16), (79, 16), (5, 16), (1, 5)]


def test_a_tree_on_the_host_has_no_more_nodes_than_it_needs() -> None:
    """Its top is padded to whole blocks of 32."""
    assert [level.size for level in HostTree(1).levels] == [32]
    assert [level.size for level in HostTree(8192).levels] == [8192]
    assert [level.size for level in HostTree(8193).levels] == [8208, 544]


def test_as_many_targets_as_before_or_more() -> None:
    tree = HostTree(20_000)
    tree.set(np.arange(20_000), 1.0)
    for count in (3, 3, 5, 1):
        wanted = np.linspace(0, 19_999, count).astype(np.int64)
        assert tree.find(wanted.astype(np.float64) + 0.5).tolist() == wanted.tolist()
        assert tree._first.tolist() == [16 * i for i in range(count)]


def test_a_target_at_the_total_is_the_last_weight() -> None:
    tree = HostTree(40)
    tree.set(np.array([3, 17]), np.array([0.1, 0.7]))
    assert tree.find(np.array([0.0, 0.1, 0.8, 5.0])).tolist() == [3, 17, 17, 17]


def test_ten_million_weights_are_told_apart() -> None:
    size = 10_000_000
    tree = HostTree(size)
    tree.set(np.arange(size), 0.1)
    wanted = np.array([0, 1, 2, 4_999_999, 9_999_998, 9_999_999])
    found = tree.find((wanted + 0.5) * 0.1)
    assert found.tolist() == wanted.tolist()
    np.testing.assert_allclose(tree.total, 1e6, rtol=1e-13)


def test_draws_come_out_in_proportion() -> None:
    tree = HostTree(1000)
    weights = np.sqrt(np.arange(1000.0))
    tree.set(np.arange(1000), weights)
    targets = (np.arange(100_000) + 0.5) / 100_000 * tree.total
    counts = np.bincount(tree.find(targets), minlength=1000)
    np.testing.assert_allclose(counts / 100_000, weights / weights.sum(), atol=1.1e-5)


ROW = {"observation": np.zeros(3, np.float32)}


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized()])
def test_a_compiled_loop_copies_no_storage(sampler: Uniform | Prioritized) -> None:
    """Every array of the table's size is changed where it is."""
    table = Table(Transitions(1), 50_000, sampler)
    rows = {"observation": jnp.zeros((1, 4, 3))}

    def step(state: device.State, draws: jax.Array) -> tuple[device.State, jax.Array]:
        state = device.insert(table, state, rows, jnp.zeros((1, 4), bool), final=rows)
        state, sample = device.sample(table, state, draws)
        state = device.update_priorities(table, state, sample.keys, draws)
        return state, sample.rows["observation"].sum()

    loop = jax.jit(lambda state, draws: jax.lax.scan(step, state, draws), donate_argnums=0)
    state = device.init(table, ROW, 4)
    text = loop.lower(state, jnp.zeros((10, 8))).compile().as_text() or ""
    assert re.search(r"u32\[5\d{4},\d+\]", text)  # the rings are there
    sizes = [
        int(np.prod([int(n) for n in found.split(",")]))
        for found in re.findall(r"\w+\[([\d,]+)\]\S* copy\(", text)
    ]
    assert max(sizes, default=0) < 3000
    loop(state, jnp.zeros((10, 8)))


def test_tables_side_by_side() -> None:
    """Under vmap each has its own contents."""
    table = Table(Sequences(2, 1), 16)
    states = jax.vmap(lambda _: device.init(table, ROW, 1))(jnp.arange(3))
    rows = {"observation": jnp.arange(3 * 4 * 3, dtype=jnp.float32).reshape(3, 4, 1, 3)}
    insert = jax.jit(jax.vmap(lambda state, rows: device.insert(table, state, rows)))
    states = insert(states, rows)
    draws = jnp.tile(jnp.array([[0.0, 0.99]]), (3, 1))
    read = jax.jit(jax.vmap(lambda state, draws: device.sample(table, state, draws)))
    _, sample = read(states, draws)
    first = sample.rows["observation"][..., 0]
    assert first.tolist() == [[[0, 3], [6, 9]], [[12, 15], [18, 21]], [[24, 27], [30, 33]]]
