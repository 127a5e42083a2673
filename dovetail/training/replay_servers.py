"""Served replays: the options of a run, and the servers that it starts.

The graph contains host Python that inserts into servers and samples from them; this module fills in
their addresses. A run stops the servers that it started, and never others.
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
from dovetail.replay.service.remote import RemoteReplay, RemoteSampling, Served, ServedForm, Way
from dovetail.replay.service.server import ReplayServer
from dovetail.replay.table import Sequences

WAIT = 60.0
"""Maximum time that a server's rate limiter blocks a request, in seconds."""


@dataclass(frozen=True)
class ServedReplay:
    """Holds the replay of a run in servers instead of in the learner."""

    at: tuple[str, ...] = ()
    """Addresses of running servers, one per shard; by default the run starts its own."""
    shards: int = 1
    """Number of servers; each holds an equal part of the environments' experience."""
    samples_per_insert: float | None = None
    """Average number of times an item is sampled; the side that is ahead waits. Unlimited unless
    given."""
    durable: bool = False
    """Whether servers store their contents in the run's folder, where a resumed run finds them."""

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
        """Parses the `replay` option: "learner", "servers", or addresses separated by commas."""
        if replay is None or replay == "learner":
            return None
        if not isinstance(replay, str):
            return replay
        if replay == "servers":
            return ServedReplay()
        addresses = tuple(part.strip() for part in replay.split(",") if part.strip())
        for address in addresses:
            Address.from_text(address)  # raises early if it is malformed
        return ServedReplay(at=addresses)

    @staticmethod
    def rebuilt(found: dict[str, Any] | None) -> "ServedReplay | None":
        """Rebuilds the options from a run's config, where `dataclasses.asdict` stored them."""
        fields: dict[str, Any] = {} if found is None else {**found, "at": tuple(found["at"])}
        return None if found is None else ServedReplay(**fields)

    def served(self, cluster: bool) -> Served:
        """The servers as the task sees them."""
        if self.at:
            return Served(len(self.at), f"{count(len(self.at), 'server')} of others", self.at)
        where = "on nodes of the cluster" if cluster else "of this machine"
        return Served(self.shards, f"{count(self.shards, 'server')} {where}")

    def refuse_elsewhere(self, cluster: bool) -> None:
        """Raises if durable servers are requested on a cluster."""
        if cluster and self.durable:
            raise UserError(
                "--durable keeps the replay in the run's folder, which a cluster's nodes do not "
                "see: serve one with `dovetail replay --durable FOLDER`, and give its address."
            )


def with_keys(served: Served) -> Served:
    """Puts the keys into the addresses: other nodes cannot read the key files."""
    texts = (Address.from_text(address).text() for address in served.addresses)
    return replace(served, addresses=tuple(texts))


def form_of(graph: Graph) -> ServedForm | None:
    """The table and row format of a graph's served replay; None without one."""
    ways = [node.function for node in graph.reaching if isinstance(node.function, Way)]
    return ways[0].form if ways else None


def refuse_without(graph: Graph) -> None:
    """Raises if the algorithm has no replay to serve."""
    if form_of(graph) is None:
        raise UserError(
            f"--replay says where a replay is kept, but {graph.algorithm} has none: leave it out."
        )


def connected(graph: Graph, addresses: tuple[str, ...]) -> Graph:
    """Returns the graph with the servers' addresses filled in."""

    def at(node: Any) -> Any:
        way = getattr(node, "function", None)
        if not isinstance(way, Way):
            return node
        # After planning: servers are started only for a plan that is sound.
        return replace(node, function=replace(way, served=replace(way.served, addresses=addresses)))

    return replace(graph, nodes=tuple(map(at, graph.nodes)))


def refuse_unreachable(graph: Graph) -> None:
    """Connects to every server of a graph and disconnects.

    Raises for a server that does not answer, rejects the key, or holds another table.
    """
    way = next(node.function for node in graph.reaching if isinstance(node.function, Way))
    clients = RemoteSampling(way.form, way.served)
    try:
        for shard in range(way.served.shards):
            clients.client(shard)
    finally:
        clients.close()


@dataclass(frozen=True)
class ServerOrder:
    """The arguments of one server; picklable, so that a Ray actor can start it."""

    table: Any
    example: Any
    envs: int
    limiter: RateLimiter
    key: str
    durable: str | None = None

    def start(self, listen: str | None = None) -> ReplayServer:
        """Starts the server in a child process that ends with this one."""
        return ReplayServer(
            *(self.table, self.example, self.envs, self.limiter, WAIT, self.durable),
            listen=listen,
            key=self.key,
        )


def orders(form: ServedForm, options: ServedReplay, folder: Path) -> list[ServerOrder]:
    """The arguments of a run's servers; durable ones store their files in `folder`."""
    key = secrets.token_hex(32)  # shared by all servers of the run
    places = [f"shard-{at}-of-{options.shards}" for at in range(options.shards)]
    return [
        ServerOrder(
            *(form.table, form.example, form.streams, limiter_of(options.samples_per_insert), key),
            str(folder / place) if options.durable else None,
        )
        for place in places
    ]


def samples_each(graph: Graph) -> float:
    """Number of items sampled per item inserted, in one iteration."""
    form = form_of(graph)
    assert form is not None
    draws = [n.inputs[-1].shape for n in graph.reaching if n.reach and not n.reach.sends]
    period = form.table.items.period if isinstance(form.table.items, Sequences) else 1
    return sum(map(prod, draws)) * period / graph.steps_per_iteration


def served_form(algorithm: Algorithm, spec: EnvSpec, envs: int, shards: int = 1) -> ServedForm:
    """The table and row format of each server, for an algorithm on `envs` environments."""
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
    num_envs: int = 64,
    *,
    listen: str | None = None,
    durable: str | Path | None = None,
    samples_per_insert: float | None = None,
) -> tuple[ReplayServer, str]:
    """Starts a replay server that several runs of an algorithm can share.

    Returns (server, address as text); close the server. `num_envs` is the total number of
    environments of these runs. With `listen` ("host:port") the server is reachable over TCP. With
    `durable`, a folder, its contents survive the process.
    """
    check_option("num_envs", num_envs, num_envs >= 1, "1 or more")
    rate = samples_per_insert
    check_option("samples_per_insert", rate, rate is None or rate > 0, "more than 0")
    if listen is not None:
        host, _, port = listen.rpartition(":")
        fits = re.fullmatch(r"[^\s:/]+", host) and port.isascii() and port.isdigit()
        if not fits or int(port) > 65535:
            raise UserError(
                f"--listen is {listen}: give host:port, as in 127.0.0.1:7777, with a port up to "
                "65535."
            )
    form, file = served_form(algorithm, resolve(env).spec, num_envs), None
    key = secrets.token_hex(32)
    if durable is not None:  # keep the key, so that the address stays valid after a restart
        file = Path(durable).absolute() / "key"
        key = read_key(file, str(durable)) if file.exists() else key
    folder = None if durable is None else str(Path(durable).absolute() / "table")
    order = ServerOrder(form.table, form.example, num_envs, limiter_of(rate), key, folder)
    server = order.start(listen)
    if file is not None:
        write_key(file, key)
    address = server.address if server.remote is None else server.remote
    return server, address.shown("" if file is None else str(file))


def limiter_of(samples_per_insert: float | None) -> RateLimiter:
    """A rate limiter that tolerates whole unrolls and batches, which may far exceed the rate."""
    rate = samples_per_insert
    return RateLimiter(samples_per_insert=rate, tolerance=max(1e4, 100 * (rate or 0)))


class Servers:
    """The replay servers that a run starts on this machine. Close them."""

    def __init__(
        self, wanted: list[ServerOrder], tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self._servers: list[ReplayServer] = []
        try:
            for order in wanted:
                # Each is in the list as soon as it runs, so that `close` finds it.
                self._servers.append(order.start())
        except BaseException:
            self.close()
            raise
        shown = ",".join(server.address.shown() for server in self._servers)
        tell(f"The replay is served at {shown}")
        for server in self._servers:
            if server.lost is not None:
                tell(f"Part of the replay is lost: {server.lost}.")

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses as text, including the key."""
        return tuple(server.address.text() for server in self._servers)

    def close(self) -> None:
        """Stops the servers; safe to call twice."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
