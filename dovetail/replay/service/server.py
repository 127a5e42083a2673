"""Replay tables in separate processes.

    with ReplayServer(table, example, num_envs=64) as server:
        client = server.client()

A server is a process that ends with its parent. Clients anywhere on the machine connect to its
`address`.
"""

import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import UserError
from dovetail.locking import FolderLock, is_abandoned
from dovetail.replay.host.form import RowForm
from dovetail.replay.leaves import leaves_of
from dovetail.replay.limiter import RateLimiter
from dovetail.replay.service.address import Address, write_key
from dovetail.replay.service.client import ReplayClient
from dovetail.replay.service.options import written
from dovetail.replay.service.service import GROWN
from dovetail.replay.table import Table

START = 60.0
"""Time limit in seconds for starting a server, without restoring."""
RESTORE = 3600.0
"""Time limit in seconds for restoring."""
END = 10.0
"""Time limit in seconds for ending."""
PREFIX = "dovetail-replay-"
"""Start of the names of servers' folders, among the temporary files."""


class ReplayServer:
    """A table in a separate process; with a `durable` folder it survives that process."""

    def __init__(
        self,
        table: Table,
        example: Any,
        num_envs: int,
        limiter: RateLimiter | None = None,
        timeout: float = 60.0,
        durable: Path | str | None = None,
        grown: int = GROWN,
        listen: str | None = None,
        key: str | None = None,
    ) -> None:
        """`grown`: log size in bytes after which a durable server makes a snapshot. `listen`: host
        and port for access over TCP, port 0 for any; by default, none. `key`: the access key; by
        default, a new one."""
        self._example = example
        leaves = leaves_of(example)
        RowForm(table, leaves, num_envs)  # raises here, not in the process, if options are invalid
        _sweep()
        self._folder = tempfile.mkdtemp(prefix=PREFIX)
        self._lock = FolderLock(Path(self._folder), "server's folder")
        key = secrets.token_hex(32) if key is None else key
        write_key(Path(self._folder) / "key", key)
        options = {
            "folder": self._folder,
            "key": key,
            "leaves": [[leaf.path, list(leaf.shape), np.dtype(leaf.dtype).str] for leaf in leaves],
            "table": written(table),
            "envs": num_envs,
            "limiter": written(limiter or RateLimiter()),
            "timeout": timeout,
            "durable": None if durable is None else str(Path(durable).absolute()),
            "grown": grown,
            "listen": listen,
        }
        self._process = self._start(options)
        self.address = Address(self._folder, key, self._process.pid)
        try:
            ready = self._wait_until_ready(START if durable is None else RESTORE)
        except BaseException:
            self.close()
            raise
        self.remote: Address | None = None
        """Its TCP address, if it listens."""
        if listen is not None:
            host = listen.rpartition(":")[0]
            self.remote = replace(self.address, host=host, port=ready["port"])
        self.epoch: int = ready["epoch"]
        """Changes when acknowledged data were lost."""
        self.lost: str | None = ready["lost"]
        """Description of data lost from a durable folder; None if nothing was."""
        self.records: int = ready["records"]
        """Number of log records that were replayed."""

    def _start(self, options: dict[str, Any]) -> "subprocess.Popen[bytes]":
        # The server must import this very copy of the package, installed or not.
        root = str(Path(__file__).resolve().parents[3])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        with (Path(self._folder) / "errors.txt").open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "dovetail.replay.service.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # a signal to the group of the parent is for the parent
            )
        assert process.stdin is not None
        process.stdin.write(json.dumps(options).encode() + b"\n")
        process.stdin.flush()
        return process

    def _wait_until_ready(self, limit: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], limit)
        line = stdout.readline() if ready else b""
        if not line:
            end = self._end() if ready else f"was not up after {limit:g} s"
            raise UserError(self.address.end_message(end))
        said = json.loads(line)
        if "refused" in said:
            raise UserError(said["refused"])
        return said

    def client(self, **options: Any) -> ReplayClient:
        """A client in this process, whose errors say how the server ended."""
        return ReplayClient(
            self.address, self._example, why=lambda _: self.how_it_ended(), **options
        )

    @property
    def runs(self) -> bool:
        """Whether its process is running."""
        return self._process.poll() is None

    def how_it_ended(self) -> str:
        """A sentence on what became of a server that does not answer, with its last errors."""
        return self.address.end_message(self._end())

    def _end(self) -> str:
        try:
            code = self._process.wait(END)
        except subprocess.TimeoutExpired:
            return "has closed a connection, but runs on"
        return f"was ended by signal {-code}" if code < 0 else f"has ended with code {code}"

    def close(self) -> None:
        """Ends the server; a durable one keeps its data."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()  # the server ends when its stdin closes
        # Escalates: closed stdin, SIGTERM, SIGKILL.
        for end in (lambda: None, process.terminate, process.kill):
            end()
            try:
                process.wait(END)
                break
            except subprocess.TimeoutExpired:
                continue
        self._lock.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "ReplayServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ReplayShards:
    """One table over several servers: each has a range of the environments, and its share of the
    capacity and of the rate limiter."""

    def __init__(
        self,
        table: Table,
        example: Any,
        num_envs: int,
        shards: int,
        limiter: RateLimiter | None = None,
        timeout: float = 60.0,
        durable: Path | str | None = None,
        grown: int = GROWN,
    ) -> None:
        """The options are those of `ReplayServer`, for all servers together."""
        if not 1 <= shards <= num_envs:
            raise UserError(
                f"A replay table of {num_envs} environments was to be kept by {shards} servers: "
                "give from 1 to as many as there are environments."
            )
        self._example = example
        bounds = [num_envs * at // shards for at in range(shards + 1)]
        self.servers: list[ReplayServer] = []
        try:
            for at, (first, last) in enumerate(pairwise(bounds)):
                share = (last - first) / num_envs
                folder = None if durable is None else Path(durable) / f"shard-{at}-of-{shards}"
                self.servers.append(
                    ReplayServer(
                        shard_table(table, share),
                        example,
                        last - first,
                        shard_limiter(limiter or RateLimiter(), shards),
                        timeout,
                        folder,
                        grown,
                    )
                )
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> Sequence[Address]:
        """The servers' addresses."""
        return [server.address for server in self.servers]

    @property
    def epoch(self) -> int:
        """Changes when acknowledged data were lost."""
        return sum(server.epoch for server in self.servers)

    @property
    def lost(self) -> str | None:
        """Description of data lost from durable folders; None if nothing was."""
        found = [server.lost for server in self.servers if server.lost is not None]
        return "; ".join(found) or None

    def client(self, **options: Any) -> ReplayClient:
        """A client of all servers, whose errors say how one ended."""
        why = lambda at: self.servers[at].how_it_ended()  # noqa: E731
        return ReplayClient(self.addresses, self._example, why=why, **options)

    def close(self) -> None:
        """Ends the servers."""
        for server in self.servers:
            server.close()

    def __enter__(self) -> "ReplayShards":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _sweep() -> None:
    """Removes the folders of servers whose processes were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def shard_table(table: Table, share: float) -> Table:
    """The options of a shard with this share of a table."""
    limit = None if table.max_bytes is None else int(table.max_bytes * share)
    return replace(table, capacity=max(int(table.capacity * share), 1), max_bytes=limit)


def shard_limiter(limiter: RateLimiter, shards: int) -> RateLimiter:
    """A shard's limiter: every number divided, but never below its valid minimum."""
    least = 0.0 if limiter.samples_per_insert is None else max(1.0, limiter.samples_per_insert)
    return RateLimiter(
        ceil(limiter.min_size / shards),
        limiter.samples_per_insert,
        max(limiter.tolerance / shards, least),
    )
