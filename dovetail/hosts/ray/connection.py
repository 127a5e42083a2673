"""Joins a Ray cluster with its token, or starts one on this machine; every wait has a limit."""

import contextlib
import os
import secrets
import signal
import socket
import threading
import warnings
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypedDict

from dovetail.errors import UserError
from dovetail.plan.ir import Node

REACH_SECONDS = 5.0
"""Connection timeout of an address."""
JOIN_SECONDS = 30.0
"""Time limit for joining a cluster."""
OWN = ("CPU", "GPU", "memory", "object_store_memory")
"""Resources that Ray itself defines; all others are custom."""


class RayConnection:
    """A connection to a cluster. Closing it also stops a cluster that it started."""

    def __init__(
        self,
        cluster: str,
        cpus: float | None = None,
        files: Mapping[str, object] | None = None,
    ) -> None:
        """Joins or starts a cluster.

        `cluster` is "local" to start one on this machine with `cpus` logical CPUs, "auto" to join
        the one running here, or an address host:port. `files` is the Ray runtime environment that
        ships the user's files to the workers.
        """
        self.local = cluster == "local"
        self.lost = False
        """Whether the head node is gone, so that no more calls are possible."""
        ray = import_ray()
        if os.environ["RAY_AUTH_MODE"] != "token":
            raise UserError(
                f"RAY_AUTH_MODE is {os.environ['RAY_AUTH_MODE']!r}: Dovetail uses clusters that "
                f"ask for a token only; unset it."
            )
        # Someone else has joined the cluster, as in a notebook: use it, and leave it open.
        if ray.is_initialized():
            self._joined = False
            return
        self._joined = True
        options: dict[str, object] = {"log_to_driver": False, "logging_level": "ERROR"}
        options |= {"configure_logging": False, "runtime_env": dict(files or {}) or None}
        if self.local:
            _make_token()
            options |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
        else:
            _refuse_unreachable(cluster)
            options |= {"address": cluster}
        try:
            with _patience(), _own_signals(), _loopback(self.local), warnings.catch_warnings():
                # Harmless: the forked children exec other programs at once.
                warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
                ray.init(**options)
        except Exception as error:
            raise UserError(_failure(cluster, error)) from error

    def nodes(self) -> tuple[Node, ...]:
        """The live nodes with their free resources."""
        import ray

        free, known = _available(), ray.nodes()
        names = node_names(known)
        alive = [node["NodeID"] for node in known if node["Alive"]]
        return tuple(_node(node, names[node], free.get(node, {})) for node in alive)

    def refuse_dead_head(self) -> None:
        """Raises if the head node does not answer; Ray itself would kill this process."""
        import ray

        # A plain connection to its port: calls through Ray would block or end this process.
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), REACH_SECONDS).close()
        except OSError as error:
            self.lost = True
            raise UserError(f"The head of the cluster, {host}:{port}, is gone.") from error

    def close(self) -> None:
        """Disconnects; safe to call twice."""
        if self._joined and not self.lost:
            import ray

            self._joined = False
            with contextlib.suppress(Exception):
                ray.shutdown()


def import_ray() -> ModuleType:
    """Imports Ray; raises `UserError` with the install command if it is missing."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray reads it at import
    # Ray must not change CUDA_VISIBLE_DEVICES of actors without GPUs.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "A cluster needs Ray, which is not installed: pip install 'dovetail[ray]'."
        ) from error
    return ray


def _make_token() -> None:
    """Makes the token of a local cluster if there is none; Ray's own would be readable for all."""
    file = Path.home() / ".ray" / "auth_token"
    if "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ or file.exists():
        return
    with contextlib.suppress(OSError):  # Ray says what is wrong
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            opened.write(secrets.token_hex(32))


def _available() -> dict[str, dict[str, float]]:
    from ray._private.state import available_resources_per_node

    return available_resources_per_node()


class NodeEntry(TypedDict):
    """The keys of an entry of `ray.nodes()` that are read here."""

    NodeID: str
    NodeName: str


def node_names(nodes: Sequence[NodeEntry]) -> dict[str, str]:
    """Node id → display name, made unique where several nodes share a name."""
    shared = Counter(node["NodeName"] for node in nodes)
    return {
        node["NodeID"]: node["NodeName"]
        if shared[node["NodeName"]] == 1
        else f"{node['NodeName']}/{node['NodeID'][:6]}"
        for node in nodes
    }


def _node(identity: str, name: str, free: dict[str, float]) -> Node:
    """A node with its free resources; Ray's internal ones are left out."""
    others = {
        name: amount
        for name, amount in free.items()
        if name not in OWN and not name.startswith(("node:", "accelerator_type:", "CPU_", "bundle"))
    }
    return Node(
        name,
        identity,
        free.get("CPU", 0.0),
        free.get("GPU", 0.0),
        tuple(sorted(others.items())),
    )


def _refuse_unreachable(address: str) -> None:
    """Refuses an address that does not answer; Ray itself would retry for minutes."""
    if address == "auto":
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit() or not host:
        raise UserError(
            f"{address!r} is no address of a cluster: write host:port, auto for the one on this "
            f"machine, or local to start one."
        )
    try:
        socket.create_connection((host, int(port)), REACH_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"Nobody answers at {address} ({error.strerror or error}): check the address, and that "
            f"`ray start --head` runs there."
        ) from error


@contextlib.contextmanager
def _own_signals() -> Generator[None]:
    """Restores the SIGTERM handler that Ray replaces: training saves and stops on SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _loopback(local: bool) -> Generator[None]:
    """Makes a cluster that is started here listen on 127.0.0.1 only, and export no metrics.

    Ray does so by itself on macOS and Windows, where this setting has its name from.
    """
    if not local:
        yield
        return
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    alone = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_enable_metrics_collection": "0"}
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with _variables(alone):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _patience() -> Generator[None]:
    """Sets Ray's connection timeouts to ours, unless the user has set them."""
    limits = {
        "RAY_gcs_rpc_server_connect_timeout_s": str(int(REACH_SECONDS)),
        "RAY_gcs_server_request_timeout_seconds": str(int(JOIN_SECONDS)),
    }
    with _variables(limits):
        yield


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Generator[None]:
    """Sets environment variables that the user has not set, while the block runs."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: value for name, value in values.items() if before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)


def _failure(cluster: str, error: Exception) -> str:
    """The sentence for a cluster that could not be joined, with what to do."""
    told, whole = str(error), ""
    cause: BaseException | None = error
    while cause is not None:
        whole, cause = f"{whole}{cause}", cause.__cause__ or cause.__context__
    if "auth" in whole.lower() or "token" in whole.lower():
        return (
            f"The cluster {cluster} asks for a token, and ours is missing or wrong: put the head's "
            f"token (`ray get-auth-token` there) into ~/.ray/auth_token, or set RAY_AUTH_TOKEN."
        )
    if cluster == "auto":
        return (
            "There is no Ray cluster on this machine to join: start one with `ray start --head`, "
            "or use --cluster local."
        )
    return f"The cluster {cluster} cannot be joined: {told.strip().splitlines()[0]}"
