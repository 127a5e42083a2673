"""`explain`: an algorithm's logical graph and its physical plan, like SQL's EXPLAIN."""

from collections.abc import Sequence
from typing import Any

from dovetail.algorithm import Algorithm
from dovetail.envs.resolve import resolve
from dovetail.envs.wrapping import with_wraps
from dovetail.hosts.deployment import Deployment
from dovetail.plan.explanation import Explanation
from dovetail.strategies.interface import Strategy
from dovetail.strategies.local import Local
from dovetail.training.cluster import join
from dovetail.training.planning import (
    plan_for,
    prepare_backend,
    resolve_algorithm,
    resolve_strategy,
)
from dovetail.training.replay_servers import ServedReplay, refuse_without

STEPS = 200_000
"""The run length to explain; it affects schedules, but not the shape of the graph."""


def explain(
    algorithm: Algorithm | str,
    env: Any,
    strategy: Strategy | str | None = None,
    cluster: Deployment | str | None = None,
    replay: ServedReplay | str | None = None,
    wrap: str | Sequence[Any] = (),
) -> Explanation:
    """Returns the graph and plan that `train` would run with the same arguments."""
    env = with_wraps(env, wrap)
    kept = ServedReplay.of(replay)
    chosen = Local() if strategy is None and kept is not None else resolve_strategy(strategy, env)
    where = Deployment(cluster) if isinstance(cluster, str) else cluster
    prepare_backend(chosen, None if where is None else 1)
    resources = None
    if where is not None:
        connection, resources = join(where)
        if connection is not None:
            connection.close()
    found = resolve(env, traced=chosen.traced_envs)
    served = None if kept is None else kept.served(where is not None)
    planned = plan_for(resolve_algorithm(algorithm), found, chosen, STEPS, resources, served=served)
    if kept is not None:
        refuse_without(planned.graph)
    return Explanation(planned.graph, planned.plan)
