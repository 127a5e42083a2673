"""A host of one's own: `dovetail.hosts.interface` asks little enough for a test to write one."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax
import pytest
from agreement import ALGORITHMS, HOST, SEED, advance_and_compare
from small import STEPS, Started

from dovetail.algorithm import Task
from dovetail.envs.resolve import resolve
from dovetail.hosts.interface import Processes, Pulse, in_parts, whole
from dovetail.hosts.serving import ProcessWorkers
from dovetail.runtime import supervision
from dovetail.runtime.local import LocalRuntime
from dovetail.runtime.remote import WorkerLost
from dovetail.strategies import ActorLearner, Local
from dovetail.strategies.interface import Strategy
from dovetail.training.planning import Planned, plan_for
from dovetail.training.start import first_state


class Shelf:
    """What the processes of a host share: values, each by a number that stands for it."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.lock = threading.Lock()

    def put(self, values: Any) -> "Reference":
        """A reference that stands for values."""
        with self.lock:
            number = len(self.values)
            self.values[number] = values
        return Reference(number)


class Reference:
    """Stands for values on the shelf."""

    def __init__(self, number: int) -> None:
        self.number = number


class ShelfHost:
    """Processes that are threads, and meet at a shelf."""

    def __init__(self, planned: Planned, groups: dict[str, tuple[str, ...]]) -> None:
        self.planned, self.groups, self.shelf = planned, groups, Shelf()
        self.started: list[ShelfProcess] = []

    def start(self, name: str, again: bool) -> "ShelfProcess":
        """Starts a process."""
        self.started.append(ShelfProcess(self, self.groups[name]))
        return self.started[-1]

    def share(self, values: Any) -> Reference:
        """Puts values on the shelf."""
        return self.shelf.put(values)

    def fetch(self, payload: Any) -> Any:
        """Takes them from there."""
        return self.shelf.values[payload.number] if isinstance(payload, Reference) else payload


class ShelfCall:
    """A call on its way."""

    def __init__(self, answer: "Future[Any]") -> None:
        self._answer = answer

    def get(self, limit: float | None = None) -> Any:
        """What it returned or raised."""
        return self._answer.result(limit)


class ShelfProcess:
    """Some workers, each call of which has a thread of its own."""

    def __init__(self, host: ShelfHost, workers: tuple[str, ...]) -> None:
        self._host, self._names = host, workers
        self._workers: Any = None
        self._there, self.gone = threading.Event(), False

    def set_up(self) -> ShelfCall:
        """Builds the workers."""

        def build() -> str:
            made = self._host.planned
            self._workers = ProcessWorkers(made.graph, made.plan, made.env, 30.0, self._names)
            self._there.set()
            return "the shelf"

        return self._begun(build)

    def call(self, method: str, *args: Any) -> ShelfCall:
        """A method of the workers, once they are there."""

        def called() -> Any:
            assert self._there.wait(30)
            if self.gone:
                raise WorkerLost("it fell off the shelf")
            return getattr(self._workers, method)(*args)

        return self._begun(called)

    def run(
        self, worker: str, chain: int, payloads: Sequence[Any], shared: Sequence[bool]
    ) -> ShelfCall:
        """What is shared goes on the shelf."""

        def run() -> Any:
            if self.gone:
                raise WorkerLost("it fell off the shelf")
            taken = [self._host.fetch(payload) for payload in payloads]
            reply, parts = in_parts(self._workers.run(worker, chain, taken), shared)
            return whole(reply, shared, [self._host.share(part) for part in parts])

        return self._begun(run)

    def pulse(self, worker: str) -> Pulse | None:
        """Threads are never late."""
        return None

    def awaited(self) -> str:
        """What it needs to start."""
        return "a place on the shelf"

    def kill(self) -> None:
        """It answers no more."""
        self.gone = True

    def _begun(self, function: Any) -> ShelfCall:
        answer: Future[Any] = Future()

        def work() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return ShelfCall(answer)


class OnShelf(Started):
    """As `Started`, with every worker but the learner's on the host above."""

    def __init__(self, algorithm: Any, env: str, strategy: Strategy) -> None:
        found = resolve(env, traced=strategy.traced_envs)
        planned = plan_for(algorithm, found, strategy, STEPS)
        self.plan, self.graph = planned.plan, planned.graph
        home = planned.plan.workers[0].name
        groups = {w.name: (w.name,) for w in planned.plan.workers if w.name != home}
        self.told: list[str] = []
        self.host = ShelfHost(planned, groups)
        processes = Processes(self.host, groups, 30.0, self.told.append)
        self.runtime = LocalRuntime(
            *(planned.graph, planned.plan, found, 1, 30.0, self.told.append),
            processes,
            [home],
        )
        plan = planned.plan
        bound = algorithm.bind(
            Task(found.spec, plan.update_envs, STEPS, plan.num_envs, plan.shards)
        )
        start = first_state(bound, found.jax, plan.num_envs, SEED)
        self.state: Any = start[0]
        self.actor: Any = self.runtime.load(*start)


CASES: dict[str, tuple[str, Strategy]] = {
    "actors": ("ppo", ActorLearner(actors=2, staleness=0, processes=False)),
    "shards": (
        "dqn-prioritized",
        ActorLearner(actors=4, staleness=0, shards=2, processes=False),
    ),
    "a replay": ("dqn", Local(sides=("replay",))),
}


@pytest.mark.parametrize("case", CASES)
def test_a_third_host_equals_the_interpreter(case: str) -> None:
    algorithm, strategy = CASES[case]
    with OnShelf(ALGORITHMS[algorithm], HOST, strategy) as running:
        advance_and_compare(running, algorithm, HOST)
    assert running.host.shelf.values or case == "a replay"


def test_supervision_is_the_same_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE", 0.01)
    strategy = ActorLearner(actors=2, staleness=0, processes=False)
    with OnShelf(ALGORITHMS["ppo"], HOST, strategy) as running:
        running.advance(1)
        running.host.started[-1].gone = True
        report = running.advance(2)
    assert report.measures["restarts"] == 1
    assert any("actor-1 failed; it is set up again" in line for line in running.told)
    assert jax.tree.leaves(running.state)
