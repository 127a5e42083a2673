"""Every table, on the host, on the device and in a service, equals a table of plain lists."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay_model import Item, Model, ShardedModel
from replay_tables import AnyTable, Sharded, close_servers, make

from dovetail.replay.table import (
    Episodes,
    Fifo,
    Highest,
    History,
    Lifo,
    Lowest,
    Prioritized,
    Sequences,
    Table,
    Transitions,
    Uniform,
)

ENVS, BATCH = 3, 4
STACK = (History("observation", 3, 0),)

TABLES = {
    "uniform": Table(Transitions(), 12),
    "n-step": Table(Transitions(3), 12),
    "roomy": Table(Transitions(2), 18, spare=1.5),
    "prioritized": Table(Transitions(2), 12, Prioritized(1.0)),
    "rooted": Table(Transitions(), 15, Prioritized(0.5)),
    "sequences": Table(Sequences(4, 2), 12),
    "prioritized sequences": Table(Sequences(3, 1), 12, Prioritized(1.0)),
    "episodes": Table(Episodes(3), 9, Prioritized(1.0)),
    "frames": Table(Transitions(2), 12, history=STACK),
    "prioritized frames": Table(Transitions(), 12, Prioritized(1.0), history=STACK),
    "sequences of frames": Table(Sequences(3, 2), 12, history=STACK),
    "queue": Table(Transitions(), 12, Fifo(), max_times_sampled=1),
    "newest": Table(Transitions(), 12, Lifo()),
    "highest": Table(Transitions(), 12, Highest()),
    "used up": Table(Transitions(2), 12, Uniform(), max_times_sampled=2),
    "lowest leave": Table(Transitions(2), 7, Prioritized(1.0), Lowest()),
    "highest leave": Table(Episodes(3), 6, Uniform(), Highest(), max_times_sampled=2),
    "newest leave": Table(Sequences(3, 2), 6, Lowest(), Lifo()),
    "chance leaves": Table(Transitions(), 6, Uniform(), Uniform()),
    "compressed": Table(Transitions(2), 12, history=STACK, compress=True),
    "compressed items": Table(Sequences(3, 2), 6, Uniform(), Lifo(), history=STACK, compress=True),
    "weighed leave": Table(Transitions(), 6, Prioritized(1.0), Prioritized(2.0), history=STACK),
}


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    yield
    close_servers()


class Run:
    """A table and its model, given the same; rows carry the number of their step."""

    def __init__(self, kind: str, table: Table) -> None:
        shape = (3, 2) if table.history else (2,)
        self.stack = bool(table.history)
        self.example = {
            "observation": np.zeros(shape, np.int32),
            "reward": np.zeros((), np.float32),
        }
        self.real: AnyTable = make(kind, table, self.example, ENVS)
        self.model: Any = Model(table, self.real.layout)
        if isinstance(self.real, Sharded):
            self.model = ShardedModel(table, self.real.layouts)
        self.kept: list[tuple[Any, list[Item]]] = []
        self.now = [0] * ENVS
        self.seen: dict[Any, np.ndarray] = {}
        self.stacks = [np.zeros((3, 2), np.int32) for _ in range(ENVS)]

    def observe(self, env: int, new_episode: bool, final: bool) -> np.ndarray:
        """A new observation; with a history, the last three of the episode."""
        self.now[env] += 1
        value = np.array([env, self.now[env]], np.int32)
        if not self.stack:
            return value
        if new_episode:  # padded with frames that no other row has
            self.stacks[env] = np.stack([-value * 2, -value, value])
        else:
            self.stacks[env] = np.concatenate([self.stacks[env][1:], value[None]])
        return self.stacks[env].copy()

    def insert(self, steps: list[list[tuple[bool, bool, int]]], ranked: bool, first: int) -> None:
        length, envs = len(steps), len(steps[0])
        names = [[(first + b, t, len(self.seen)) for b in range(envs)] for t in range(length)]
        ends = np.array([[step[0] for step in row] for row in steps])
        valid = np.array([[step[1] for step in row] for row in steps])
        shape = self.example["observation"].shape
        rows = {
            "observation": np.zeros((length, envs, *shape), np.int32),
            "reward": np.zeros((length, envs), np.float32),
        }
        final = np.zeros((length, envs, *shape), np.int32)
        fresh = [self.model.streams[first + b].fresh for b in range(envs)]
        for t in range(length):
            for b in range(envs):
                if not valid[t, b]:
                    rows["observation"][t, b] = -7
                    continue
                rows["observation"][t, b] = self.observe(first + b, fresh[b], False)
                rows["reward"][t, b] = t + 0.5
                self.seen["step", names[t][b]] = rows["observation"][t, b]
                fresh[b] = bool(ends[t, b])
                if ends[t, b]:
                    final[t, b] = self.observe(first + b, False, True)
                    self.seen["final", names[t][b]] = final[t, b]
        priorities = np.array([[2.0 ** step[2] for step in row] for row in steps], np.float32)
        given = priorities if ranked else None
        last = first + envs
        self.real.insert(rows, ends, valid, {"observation": final}, given, (first, last))
        self.model.note(given)
        self.model.insert(names, ends, valid, given, first)
        assert self.real.size == len(self.model.items)

    def sample(self, draws: np.ndarray) -> None:
        if not self.model.ready:
            return
        size = len(self.model.items)
        sample = self.real.sample(draws)
        expected = self.model.sample(draws)
        assert int(sample.size) == size
        np.testing.assert_allclose(sample.probabilities, [w for _, w, _ in expected], rtol=1e-5)
        assert sample.times.tolist() == [times for _, _, times in expected]
        for at, (item, _, _) in enumerate(expected):
            rows, mask = self.model.window(item)
            assert sample.mask[at].tolist() == mask
            for step, name in enumerate(rows):
                found = sample.rows["observation"][at, step]
                np.testing.assert_array_equal(found, self.seen[name])
                reward = name[1][1] + 0.5 if name[0] == "step" else 0.0
                assert sample.rows["reward"][at, step] == reward
        copied = type(sample.keys)(*(np.array(x) for x in sample.keys))
        self.kept.append((copied, [item for item, _, _ in expected]))
        assert self.real.size == len(self.model.items)

    def update(self, which: int, powers: list[int]) -> None:
        if self.kept:
            keys, items = self.kept[which % len(self.kept)]
            by_item = {id(item): 2.0**power for item, power in zip(items, powers, strict=True)}
            priorities = np.array([by_item[id(item)] for item in items], np.float32)
            self.real.update_priorities(keys, priorities)
            self.model.update(items, priorities)


step = st.tuples(
    st.sampled_from([False, False, False, True]),
    st.sampled_from([True, True, True, False]),
    st.integers(-2, 3),
)


@st.composite
def inserts(draw: st.DrawFn, few: bool) -> Any:
    """An insert; of `few` shapes where each is compiled."""
    first, last = draw(
        st.sampled_from([(0, 3), (1, 3)] if few else [(0, 3), (0, 3), (0, 1), (1, 3)])
    )
    length = 2 if few else draw(st.sampled_from([1, 1, 3, 6]))
    row = st.lists(step, min_size=last - first, max_size=last - first)
    steps = draw(st.lists(row, min_size=length, max_size=length))
    return "insert", steps, few or draw(st.booleans()), first


draws = st.lists(st.integers(0, 1023), min_size=BATCH, max_size=BATCH)
samples = st.tuples(st.just("sample"), draws)
updates = st.tuples(
    st.just("update"), st.integers(0, 9), st.lists(st.integers(-2, 3), min_size=4, max_size=4)
)


def programs(few: bool = False) -> Any:
    return st.lists(
        st.one_of(inserts(few), inserts(few), samples, updates), min_size=8, max_size=30
    )


def follow(kind: str, name: str, program: list[Any]) -> None:
    run = Run(kind, TABLES[name])
    for action, *arguments in program:
        if action == "sample":
            run.sample((np.array(arguments[0]) + 0.37) / 1024)
        else:
            getattr(run, action)(*arguments)


quick = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=False,
    database=None,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
@settings(quick, max_examples=40)
@given(program=programs())
def test_the_host_table_is_the_model(name: str, program: list[Any]) -> None:
    follow("host", name, program)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TABLES if "compressed" not in name])
@settings(quick, max_examples=8)
@given(program=programs(few=True))
def test_the_device_table_is_the_model(name: str, program: list[Any]) -> None:
    follow("device", name, program)


@pytest.mark.parametrize("name", ["uniform", "prioritized"])
@settings(quick, max_examples=10)
@given(program=programs())
def test_the_service_is_the_model(name: str, program: list[Any]) -> None:
    follow("service", name, program)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["server", "shards", "tcp"])
@pytest.mark.parametrize(
    "name", ["n-step", "prioritized", "prioritized frames", "sequences", "weighed leave"]
)
@settings(quick, max_examples=8)
@given(program=programs())
def test_servers_are_the_model(kind: str, name: str, program: list[Any]) -> None:
    follow(kind, name, program)
