"""Many plans of one algorithm cost few traces."""

import dataclasses
from typing import Any

import pytest
from placed import MACHINE
from toys import Drift, Toy, drift_task

from dovetail.graph import shares
from dovetail.graph.shares import Graphs
from dovetail.plan import make_plan
from dovetail.strategies import ActorLearner, CentralInference, Environments, Local
from dovetail.strategies.interface import Strategy


@dataclasses.dataclass(frozen=True)
class Patient(Toy):
    """A toy that tolerates any staleness."""

    correction = dataclasses.replace(Toy.correction, staleness=None)


def test_fifty_plans_trace_each_division_once(monkeypatch: pytest.MonkeyPatch) -> None:
    divisions: list[Any] = []
    traced = shares.trace

    def counted(algorithm: Any, task: Any, env: Any, copies: Any, batch: Any) -> Any:
        divisions.append((dict(copies), task.num_envs, batch))
        return traced(algorithm, task, env, copies, batch)

    monkeypatch.setattr(shares, "trace", counted)
    graphs = Graphs(Patient(), drift_task(8), Drift())
    strategies: list[Strategy] = [
        ActorLearner(actors=actors, staleness=staleness)
        for actors in (1, 2, 4, 8)
        for staleness in range(10)
    ]
    strategies += [Environments(workers=n) for n in (1, 2, 4, 8)]
    strategies += [CentralInference(workers=4, batch=n) for n in (2, 4, 6, 8)]
    strategies += [Local(), Local()]
    assert len(strategies) == 50
    for strategy in strategies:
        plan, graph = make_plan(strategy, graphs, MACHINE)
        assert graph.actor_envs * plan.actors == 8
    # the whole; 2, 4 and 8 actors; four batches of acting
    assert len(divisions) == 8
    assert all(divisions.count(division) == 1 for division in divisions)
