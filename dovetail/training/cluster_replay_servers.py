"""Replay servers on a cluster's nodes, each in a child process of a Ray actor."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from dovetail.errors import UserError
from dovetail.replay.service.address import Address, write_key
from dovetail.training.replay_servers import ServerOrder

START = 120.0
"""Time limit for all servers to start, in seconds."""


class ServerOnNode:
    """A Ray actor that runs one server, reachable at the node's IP address."""

    def __init__(self, order: ServerOrder) -> None:
        self._server = order.start(f"{ray.util.get_node_ip_address()}:0")

    def address(self) -> str:
        """The server's address as text, including its key."""
        assert self._server.remote is not None
        return self._server.remote.text()

    def close(self) -> None:
        """Stops the server."""
        self._server.close()


class RayServers:
    """The replay servers of a run, one per shard, spread over nodes by Ray. Close them."""

    def __init__(
        self, wanted: list[ServerOrder], key_file: Path, tell: Callable[[str], None]
    ) -> None:
        """Writes the key to `key_file`, for other runs that share the replay."""
        # A server mostly waits. It is not restarted: a new one would be empty, at another address.
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
        start: Any = ray.remote(ServerOnNode).options(**options, scheduling_strategy="SPREAD")
        self._actors = [start.remote(order) for order in wanted]
        try:
            asked = [actor.address.remote() for actor in self._actors]
            self.addresses: tuple[str, ...] = tuple(ray.get(asked, timeout=START))
        except GetTimeoutError:
            self.close()
            raise UserError(
                f"The replay's servers were not up on the cluster after {START:g} s: see what its "
                "nodes do, or use --replay learner."
            ) from None
        except RayError as error:
            self.close()
            cause = error.cause if isinstance(error, RayTaskError) else None
            raise cause if isinstance(cause, UserError) else UserError(str(error)) from error
        write_key(key_file, wanted[0].key)
        shown = [Address.from_text(text).shown(str(key_file)) for text in self.addresses]
        tell(f"The replay is served at {','.join(shown)}")

    def close(self) -> None:
        """Stops the servers; safe to call twice. Ray stops them itself when the run disconnects."""
        actors, self._actors = self._actors, []
        for actor in actors if ray.is_initialized() else ():
            with contextlib.suppress(Exception):
                ray.get(actor.close.remote(), timeout=10.0)
            with contextlib.suppress(Exception):
                ray.kill(actor)
