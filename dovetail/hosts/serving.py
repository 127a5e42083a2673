"""The workers of a process without the home side: they run chains of programs on request.

Both processes derive the chains from the same plan, so they agree without communication.
"""

import time
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp

from dovetail.envs.resolve import Env
from dovetail.graph.ir import Graph
from dovetail.hosts.interface import Pulse
from dovetail.plan.ir import Plan
from dovetail.runtime.arrays import Values, leaves_of, numbered
from dovetail.runtime.channel import REPORT, Turn
from dovetail.runtime.environments import begin_episodes
from dovetail.runtime.remote import Reply
from dovetail.runtime.schedule import Workers, chains_of
from dovetail.runtime.wire import Sendable, SentValues, pack_values, unpack, unpack_values
from dovetail.runtime.worker import Put, RunningWorker, RunProgram, Take, size
from dovetail.telemetry.spans import LINK


class ProcessWorkers:
    """The workers `here` of a plan."""

    def __init__(
        self, graph: Graph, plan: Plan, env: Env, patience: float, here: Collection[str]
    ) -> None:
        self._workers = Workers(graph, plan, env, patience, None, here)
        self._served = {
            worker.name: _Served(graph, env, self._workers, worker) for worker in self._workers.all
        }

    def begin(self, worker: str, held: SentValues, keys: Sendable | None) -> SentValues:
        """Sets the state of a worker; with `keys`, begins episodes. Returns its actor state."""
        return self._served[worker].begin(held, keys)

    def held(self, worker: str) -> SentValues:
        """The current state of a worker."""
        return self._served[worker].held()

    def run(self, worker: str, chain: int, payloads: Sequence[SentValues]) -> Reply:
        """Runs a chain of a worker's programs."""
        return self._served[worker].run(chain, payloads)

    def pulse(self, worker: str) -> Pulse:
        """The progress of a worker; answered while its programs run."""
        watch = self._served[worker].worker.watch
        # Between calls it waits for the other process, which is not a hang.
        quiet = 0.0 if watch.waits else watch.quiet()
        return Pulse(quiet, watch.warm, watch.complaint())

    def close(self) -> None:
        """Closes the environments."""
        self._workers.close()


class _Served:
    """Runs one worker, chain by chain."""

    def __init__(self, graph: Graph, env: Env, workers: Workers, worker: RunningWorker) -> None:
        self.worker = worker
        self._graph, self._env, self._workers = graph, env, workers
        operations = [o for o in worker.schedule if isinstance(o, Take | RunProgram | Put)]
        self._chains = chains_of(operations)
        self._state = [v for v in graph.state.inputs if v.side in worker.copies]
        self._values: Values = {}
        self._turn = Turn(0, 0)
        self._programs = [p for p, owner in workers.programs.acting if owner is worker]

    def begin(self, held: SentValues, keys: Sendable | None) -> SentValues:
        """Sets the state at the start of the next turn."""
        worker, graph = self.worker, self._graph
        worker.watch.begin()
        worker.watch.doing("taking what it holds")
        found = unpack_values(held)
        worker.held = {}
        worker.hold(numbered(self._state, map(jnp.array, leaves_of(found, self._state))))
        begun: Values = {}
        if keys is not None:
            worker.watch.doing("setting up its environments")
            actor = graph.actor.tree.unflatten(leaves_of(found, graph.actor.inputs))
            actor_envs = self._workers.programs.envs_of.get(worker.name)
            episode_keys = jnp.asarray(unpack(keys))
            actor = begin_episodes(self._env, actor_envs, actor, episode_keys)
            begun = numbered(graph.actor.inputs, jax.tree.leaves(actor))
            worker.held |= begun
        worker.watch.idle()
        return pack_values(begun)

    def held(self) -> SentValues:
        """The state at the start of the next turn."""
        held = leaves_of(self.worker.all_held(), self._state)
        return pack_values(numbered(self._state, held))

    def run(self, number: int, payloads: Sequence[SentValues]) -> Reply:
        """Runs a chain; the first begins a turn, and the last ends it."""
        worker, chain = self.worker, self._chains[number]
        worker.watch.begin()
        if number == 0:
            for release in self._turn.releases:  # the arrays of the last turn have been sent
                release()
            # The turn has no number here: channels, versions and staleness belong to the other
            # process.
            self._values, self._turn = dict(worker.held), Turn(0, 0)
        self._take(chain.takes, payloads)
        before, began = self._seconds(), time.perf_counter()
        for operation in chain.runs:
            worker.run(operation, self._values, self._turn)
        whole = time.perf_counter() - began
        if number == len(self._chains) - 1:
            worker.held = worker.kept(self._values)
            worker.watch.warm = True
        worker.watch.idle()
        spent = {name: now - before.get(name, 0.0) for name, now in self._seconds().items()}
        # The rest of the time, so that the fragments add up to the whole.
        spent["process"] = whole - sum(spent.values())
        made = [self._packed(put) for put in chain.puts]
        clock = began, time.perf_counter()
        return Reply(made, spent, worker.track.drain(), clock)

    def _take(self, takes: Sequence[Take], payloads: Sequence[SentValues]) -> None:
        """Adds the payloads from channels to the values of the turn."""
        left = list(payloads)
        for take in takes:
            count = len(take.channel.edge.senders_of(take.taker))
            sent = [unpack_values(left.pop(0)) for _ in range(count)]
            self._values.update(take.channel.edge.combined(sent, take.taker))

    def _packed(self, put: Put) -> SentValues:
        """The packed values for a channel."""
        edge, began = put.channel.edge, time.perf_counter()
        packed = pack_values({number: self._values[number] for number in edge.numbers})
        if edge.boundary == REPORT:
            return packed
        spent = time.perf_counter() - began
        self.worker.track.add(LINK, edge.boundary, began, spent, 1, size(packed), 1)
        return packed

    def _seconds(self) -> dict[str, float]:
        """Seconds by fragment; the halves of an unroll are separate entries."""
        halves = {program.name for program in self._programs}
        spent = {n: s for n, s in self.worker.seconds.items() if n not in halves}
        for program in self._programs:
            spent |= program.seconds
        return spent
