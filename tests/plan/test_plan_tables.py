"""Plans of algorithms that keep a replay, or that have sides of their own."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from placed import HOST, planned
from toys import Toy, ToyState, with_iteration

from dovetail.algorithm import RL
from dovetail.algorithms import DQN
from dovetail.envs.resolve import resolve
from dovetail.errors import UserError
from dovetail.plan.check import check
from dovetail.plan.ir import Cluster, LinkKind, Needs, Node, Plan, Resources
from dovetail.plan.passes import table_workers
from dovetail.strategies import ActorLearner, Local
from dovetail.training.planning import plan_for
from dovetail.training.replay_servers import ServedReplay

CARTPOLE = "dovetail:CartPole-v1"
REPLAYED = DQN(4, 2, 4, num_envs=8, buffer_size=64, learning_starts=1, hidden_sizes=(4,))
TWO_SHARDS = ActorLearner(actors=4, staleness=0, shards=2)
ROOMY = Resources(8, 64, None)


def test_two_shards_have_workers_of_their_own() -> None:
    plan, graph = planned(TWO_SHARDS, REPLAYED, CARTPOLE, ROOMY)
    check(plan, graph)
    assert table_workers(plan, graph) == ["replay-0", "replay-1"]
    assert plan.notes == ("2 workers of their own keep the replay, and answer the learner",)
    plan, graph = planned(Local(), REPLAYED, CARTPOLE, ROOMY)
    assert table_workers(plan, graph) == [] and "replay" not in "".join(plan.notes)


def test_a_replay_beside_the_learner_cannot_be_sampled_ahead() -> None:
    plan, graph = planned(Local(), REPLAYED, CARTPOLE)
    with pytest.raises(UserError) as refused:
        check(replace(plan, prefetch=1), graph)
    assert str(refused.value) == (
        "The plan of strategy 'local' keeps the replay with the learner, but in 1 shard and "
        "1 update ahead; give each shard a worker."
    )


def test_each_shard_has_a_process_on_a_cluster() -> None:
    nodes = tuple(Node(name, name * 8, 4) for name in "ab")
    plan, _ = planned(TWO_SHARDS, REPLAYED, CARTPOLE, Resources(8, 8, Cluster(nodes)))
    shards = [process for process in plan.processes if process.keeps]
    assert [process.workers for process in shards] == [("replay-0",), ("replay-1",)]
    assert all(process.cpus == 1 and not process.learns for process in shards)
    assert len(plan.processes) == 1 + 2 + 4


def test_gpus_that_are_missing_are_told() -> None:
    node = Node("a", "a" * 8, 4, 1)
    machine = Resources(4, 4, Cluster((node,), learners=Needs(gpus=2)))
    with pytest.raises(UserError, match=r"needs 1 CPUs, 2 GPUs: .*: 4 CPUs, 1 GPUs on a\."):
        planned(Local(), env=HOST, machine=machine)


def asked(self: Toy, rl: RL, state: ToyState) -> tuple[ToyState, Any]:
    """Asks a side of its own before its only unroll, and again after it."""
    scale = rl.call("judge", lambda updates: 1.0 + updates, state.updates)
    params = rl.broadcast(jax.tree.map(lambda p: p * scale, state.params))
    batch = rl.gather(rl.unroll(self.act, params, 3, bootstrap=self.value))
    level = rl.call("judge", jnp.mean, batch.reward)
    gradients = rl.mean(jax.grad(self.loss)(state.params, batch))
    return self.updated(state, gradients), {"level": level}


def test_what_passes_between_other_sides_does_not_keep_actors_from_running_ahead() -> None:
    plan, graph = planned(ActorLearner(staleness=0), with_iteration(asked))
    check(replace(plan, staleness=1), replace(graph, staleness=None))


@pytest.mark.parametrize("kind", [LinkKind.PIPE, LinkKind.OBJECT_STORE, LinkKind.SOCKET])
def test_links_that_leave_a_process_do_not_join_threads(kind: LinkKind) -> None:
    plan, graph = planned(ActorLearner(staleness=0))
    with pytest.raises(UserError, match=f"by a {kind} link; "):
        check(carried(plan, kind), graph)


def carried(plan: Plan, kind: LinkKind) -> Plan:
    """With the trajectories on another kind of link."""
    links = [replace(x, kind=kind) if x.boundary == "gather" else x for x in plan.links]
    return replace(plan, links=tuple(links))


def test_a_served_replay_is_reached_by_sockets() -> None:
    served = ServedReplay().served(cluster=False)
    planned = plan_for(REPLAYED, resolve(CARTPOLE), Local(), 1000, ROOMY, served=served)
    plan, graph = planned.plan, planned.graph
    sockets = [link for link in plan.links if link.kind is LinkKind.SOCKET]
    assert {link.boundary for link in sockets} == {node.name for node in graph.reaching} != set()
    for lost in sockets:
        fewer = tuple(link for link in plan.links if link is not lost)
        with pytest.raises(UserError, match=f"carries {lost.boundary} .* by 0 links; the graph"):
            check(replace(plan, links=fewer), graph)
