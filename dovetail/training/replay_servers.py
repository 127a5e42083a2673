"""Replays that servers keep: which ones a training asks for, and the servers that it starts.

The graph has plain Python where rows go to servers and samples come from them; here it learns at
which addresses these are. Servers that a training starts end with it; those of others are never
ended.
"""

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import jax

from dovetail.algorithm import Algorithm, Task
from dovetail.envs.interface import EnvSpec
from dovetail.envs.resolve import resolve
from dovetail.errors import UserError, check_option
from dovetail.graph.ir import Graph
from dovetail.graph.show import count
from dovetail.keys import seed_key
from dovetail.replay.limiter import RateLimiter
from dovetail.replay.service.address import Address, read_key, write_key
from dovetail.replay.service.remote import RemoteReplay, Sampling, Served, ServedForm, Way
from dovetail.replay.service.server import ReplayServer
from dovetail.replay.table import Sequences

WAIT = 60.0
"""Seconds that a server lets the rate limiter hold somebody up."""


@dataclass(frozen=True)
class ServedReplay:
    """Keeps a training's replay in servers instead of in the learner."""

    at: tuple[str, ...] = ()
    """Addresses of servers that run already, one for each shard; unless given, a training starts
    its own."""
    shards: int = 1
    """Servers that each keep an equal part of the environments' experience."""
    samples_per_insert: float | None = None
    """How often an item is sampled, on average; whoever is ahead waits. No limit unless given."""
    durable: bool = False
    """Whether servers keep what they hold in the run's folder, where a resumed run finds it."""

    def __post_init__(self) -> None:
        check_option("replay_shards", self.shards, self.shards >= 1, "1 or more")
        rate = self.samples_per_insert
        check_option("samples_per_insert", rate, rate is None or rate > 0, "more than 0")
        own = ("shards", "samples_per_insert", "durable")
        given = next((n for n in own if getattr(self, n) != getattr(ServedReplay, n)), None)
        if self.at and given is not None:
            raise UserError(
                f"{given} is for servers that the training starts, but --replay names some that "
                "run already: leave it out, or use --replay servers."
            )

    @staticmethod
    def of(replay: "ServedReplay | str | None") -> "ServedReplay | None":
        """What an option stands for: learner, servers, or addresses with commas between them."""
        if replay is None or replay == "learner":
            return None
        if not isinstance(replay, str):
            return replay
        if replay == "servers":
            return ServedReplay()
        addresses = tuple(part.strip() for part in replay.split(",") if part.strip())
        for address in addresses:
            Address.from_text(address)  # what is wrong with it is said here
        return ServedReplay(at=addresses)

    @staticmethod
    def rebuilt(found: dict[str, Any] | None) -> "ServedReplay | None":
        """The options that a run's config kept, as `dataclasses.asdict` made them."""
        fields: dict[str, Any] = {} if found is None else {**found, "at": tuple(found["at"])}
        return None if found is None else ServedReplay(**fields)

    def served(self, cluster: bool) -> Served:
        """What a task is told of the servers."""
        if self.at:
            return Served(len(self.at), f"{count(len(self.at), 'server')} of others", self.at)
        where = "on nodes of the cluster" if cluster else "of this machine"
        return Served(self.shards, f"{count(self.shards, 'server')} {where}")

    def refuse_elsewhere(self, cluster: bool) -> None:
        """Refuses what a cluster's nodes could not find again."""
        if cluster and self.durable:
            raise UserError(
                "--durable keeps the replay in the run's folder, which a cluster's nodes do not "
                "see: serve one with `dovetail replay --durable FOLDER`, and give its address."
            )


def with_keys(served: Served) -> Served:
    """With the keys in the addresses: other nodes do not see the files that have them."""
    texts = (Address.from_text(address).text() for address in served.addresses)
    return replace(served, addresses=tuple(texts))


def form_of(graph: Graph) -> ServedForm | None:
    """What the servers of a graph's replay keep; None if it has none that is served."""
    ways = [node.function for node in graph.reaching if isinstance(node.function, Way)]
    return ways[0].form if ways else None


def refuse_without(graph: Graph) -> None:
    """Refuses servers for an algorithm that keeps no replay."""
    if form_of(graph) is None:
        raise UserError(
            f"--replay says where a replay is kept, but {graph.algorithm} has none: leave it out."
        )


def connected(graph: Graph, addresses: tuple[str, ...]) -> Graph:
    """The graph whose plain Python knows where the servers are."""

    def at(node: Any) -> Any:
        way = getattr(node, "function", None)
        if not isinstance(way, Way):
            return node
        return replace(node, function=replace(way, served=replace(way.served, addresses=addresses)))

    return replace(graph, nodes=tuple(map(at, graph.nodes)))


def refuse_unreachable(graph: Graph) -> None:
    """Connects to every server that a graph names, and hangs up: who does not answer, does not
    know our key, or keeps another table is named."""
    way = next(node.function for node in graph.reaching if isinstance(node.function, Way))
    clients = Sampling(way.form, way.served)
    try:
        for shard in range(way.served.shards):
            clients.client(shard)
    finally:
        clients.close()


@dataclass(frozen=True)
class ServerOrder:
    """What one server is made with; it can be sent to another process."""

    table: Any
    example: Any
    envs: int
    limiter: RateLimiter
    key: str
    durable: str | None = None

    def start(self, listen: str | None = None) -> ReplayServer:
        """Starts it, in a process that ends with this one."""
        return ReplayServer(
            *(self.table, self.example, self.envs, self.limiter, WAIT, self.durable),
            listen=listen,
            key=self.key,
        )


def orders(form: ServedForm, options: ServedReplay, folder: Path) -> list[ServerOrder]:
    """What the servers of a training are made with; durable ones keep their files in `folder`."""
    key = secrets.token_hex(32)
    places = [f"shard-{at}-of-{options.shards}" for at in range(options.shards)]
    return [
        ServerOrder(
            *(form.table, form.example, form.streams, limiter_of(options.samples_per_insert), key),
            str(folder / place) if options.durable else None,
        )
        for place in places
    ]


def samples_each(graph: Graph) -> float:
    """How many items an iteration samples for each that it inserts."""
    form = form_of(graph)
    assert form is not None
    draws = [n.inputs[-1].shape for n in graph.reaching if n.reach and not n.reach.sends]
    period = form.table.items.period if isinstance(form.table.items, Sequences) else 1
    return sum(map(prod, draws)) * period / graph.steps_per_iteration


def served_form(algorithm: Algorithm, spec: EnvSpec, envs: int, shards: int = 1) -> ServedForm:
    """What each server keeps for the replay of an algorithm on so many environments."""
    bound = algorithm.bind(Task(spec, envs, 1, served=Served(shards, "servers")))
    state = jax.eval_shape(bound.init, seed_key(0))
    parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, RemoteReplay))
    ways = [part for part in parts if isinstance(part, RemoteReplay)]
    if not ways:
        raise UserError(f"{type(algorithm).__name__} has no replay to serve: name another.")
    return ways[0].form


def serve_replay(
    algorithm: Algorithm,
    env: Any,
    envs: int = 64,
    *,
    listen: str | None = None,
    durable: str | Path | None = None,
    samples_per_insert: float | None = None,
) -> tuple[ReplayServer, str]:
    """(a server of a replay that several trainings of an algorithm share, its address as text).

    They have `envs` environments in all. With `listen`, host:port, it is reached over TCP; in the
    folder `durable` it outlives its process. Close it.
    """
    check_option("envs", envs, envs >= 1, "1 or more")
    rate = samples_per_insert
    check_option("samples_per_insert", rate, rate is None or rate > 0, "more than 0")
    if listen is not None and not re.fullmatch(r"[^\s:/]+:\d{1,5}", listen):
        raise UserError(f"--listen is {listen}: give host:port, as in 127.0.0.1:7777.")
    form, file = served_form(algorithm, resolve(env).spec, envs), None
    key = secrets.token_hex(32)
    if durable is not None:  # who knows its address finds it again
        file = Path(durable).absolute() / "key"
        key = read_key(file, str(durable)) if file.exists() else key
    folder = None if durable is None else str(Path(durable).absolute() / "table")
    order = ServerOrder(form.table, form.example, envs, limiter_of(rate), key, folder)
    server = order.start(listen)
    if file is not None:
        write_key(file, key)
    address = server.address if server.remote is None else server.remote
    return server, address.shown("" if file is None else str(file))


def limiter_of(samples_per_insert: float | None) -> RateLimiter:
    """A limiter with room for whole unrolls and batches, which may be far larger than the rate."""
    rate = samples_per_insert
    return RateLimiter(samples_per_insert=rate, tolerance=max(1e4, 100 * (rate or 0)))


class Servers:
    """The servers that a training starts on this machine. Close them."""

    def __init__(
        self, wanted: list[ServerOrder], tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self._servers: list[ReplayServer] = []
        try:
            for order in wanted:
                self._servers.append(order.start())
        except BaseException:
            self.close()
            raise
        shown = ",".join(server.address.shown() for server in self._servers)
        tell(f"The replay is served at {shown}")
        for server in self._servers:
            if server.lost is not None:
                tell(f"Of the replay is lost {server.lost}.")

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where they are, as text with their key."""
        return tuple(server.address.text() for server in self._servers)

    def close(self) -> None:
        """Ends them; safe to call twice."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
