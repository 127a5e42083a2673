"""The process of a replay server, started by `ReplayServer`: `python -m
dovetail.replay.service.process`.

It reads its options as one line of JSON and serves each connection in a thread. It ends on SIGTERM,
when its standard input is closed, or when its parent process has died.
"""

import contextlib
import json
import math
import mmap
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import AuthenticationError
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dovetail.errors import UserError
from dovetail.replay.host.form import RowForm, place, size_of
from dovetail.replay.host.output import Output, output_specs
from dovetail.replay.host.table import HostTable
from dovetail.replay.leaves import RowLeaf
from dovetail.replay.sample import ItemKeys
from dovetail.replay.service import channel as wire
from dovetail.replay.service.address import Address, at_once, welcome
from dovetail.replay.service.claims import Claims
from dovetail.replay.service.framing import LONG, SHORT, MessageStream
from dovetail.replay.service.messages import PLAIN, InsertHead, insert_specs, plain_of, steps_of
from dovetail.replay.service.options import read, written
from dovetail.replay.service.service import ReplayService

Array = np.ndarray[Any, np.dtype[Any]]

INSERT_START = 1 + wire.INSERT_HEAD.size
"""Bytes of an insert's request before the head that describes its arrays."""
ARRIVED = 1024
"""Number of places of inserts that a connection keeps the arrays of."""
AGAIN = 0.2
"""Seconds before another try to accept a client."""
TOGETHER = 4
"""Maximum number of inserts acknowledged in one message."""
WATCH = 0.5
"""Seconds between checks that the parent is still alive."""


def main() -> None:
    """Serves until told to end."""
    options = json.loads(sys.stdin.buffer.readline())
    stopped, stop = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(stop, b"!"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
    leaves = [
        RowLeaf(path, tuple(shape), np.dtype(dtype)) for path, shape, dtype in options["leaves"]
    ]
    address = Address(options["folder"], options["key"], os.getpid())
    try:
        durable = None if options["durable"] is None else Path(options["durable"])
        table = HostTable(read(options["table"]), None, options["envs"], leaves=leaves)
        service = ReplayService(
            table, read(options["limiter"]), options["timeout"], durable, options["grown"], True
        )
    except UserError as error:
        answer = {"refused": str(error)}
        print(json.dumps(answer), flush=True)
        return
    try:
        listeners = _listening(address, options["listen"])
    except OSError as error:
        refused = f"The replay cannot be served at {options['listen']} ({error.strerror or error})"
        print(json.dumps({"refused": f"{refused}: choose another --listen."}), flush=True)
        return
    lost = None if service.restored is None else service.restored.lost
    records = 0 if service.restored is None else service.restored.records
    port = listeners[-1].getsockname()[1] if options["listen"] else 0
    ready = {"pid": os.getpid(), "epoch": service.epoch, "lost": lost, "records": records}
    serving = Serving(service, bytes.fromhex(address.key))
    for listener in listeners:
        threading.Thread(target=serving.accept, args=(listener,), daemon=True).start()
    ready["port"] = port
    print(json.dumps(ready), flush=True)
    _wait_for_the_end(stopped, os.getppid())
    service.close()
    shutil.rmtree(address.folder, ignore_errors=True)
    os._exit(0)  # do not wait for threads blocked on clients


def _listening(address: Address, listen: str | None) -> list[socket.socket]:
    """A Unix socket, and a TCP socket if requested."""
    own = socket.socket(socket.AF_UNIX)
    own.bind(address.socket)
    found = [own]
    if listen:
        host, _, port = listen.rpartition(":")
        found.append(socket.create_server((host, int(port))))
    for one in found:
        one.listen(64)
    return found


def _wait_for_the_end(stopped: int, parent: int) -> None:
    """Waits for a write to `stopped`, the end of standard input, or the parent's death."""
    while os.getppid() == parent:
        if select.select([stopped, sys.stdin], [], [], WATCH)[0]:
            return


class Serving:
    """Accepts clients, and serves each of their connections in a thread."""

    def __init__(self, service: ReplayService, key: bytes) -> None:
        self._service, self._key = service, key
        self._claims = Claims(service.table.layout.envs)

    def accept(self, listener: socket.socket) -> None:
        """Accepts connections forever. Runs in one thread per listener."""
        while True:
            try:
                opened, _ = listener.accept()
            except OSError as error:  # out of file descriptors or memory: others may free some
                print(f"A client cannot be accepted: {error}.", file=sys.stderr, flush=True)
                time.sleep(AGAIN)
                continue
            shares = listener.family == socket.AF_UNIX
            connection = Connection(opened.detach())
            try:
                threading.Thread(target=self._serve, args=(connection, shares), daemon=True).start()
            except RuntimeError:  # out of threads
                connection.close()
                time.sleep(AGAIN)

    def _serve(self, connection: Connection, shares: bool) -> None:
        served = None
        try:
            if not shares:
                with socket.socket(fileno=os.dup(connection.fileno())) as opened:
                    at_once(opened)
            welcome(connection, self._key)
            served = ClientConnection(self._service, connection, shares, self._claims)
            served.answer()
        except (AuthenticationError, EOFError, OSError):
            return  # a client without the key, or one that disconnected
        except Malformed as error:
            print(f"A client sent what is no request: {error}.", file=sys.stderr, flush=True)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # the table may be inconsistent; a log has everything before this request
        finally:
            self._claims.release(served)
            connection.close()


class Malformed(Exception):
    """A client's message cannot be decoded; the table is untouched."""


class _Decoding:
    """Turns every error of a block, which changes nothing, into `Malformed`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, UserError | EOFError | OSError):
            raise Malformed(f"{type(error).__name__}: {error}") from error


DECODING = _Decoding()
"""One for all: to make one takes longer than most messages take to decode."""


class ClientConnection:
    """The server's end of a connection."""

    def __init__(
        self, service: ReplayService, connection: Connection, shares: bool, claims: Claims
    ) -> None:
        """`shares`: arrays lie in memory shared with the client, not in messages."""
        self._service, self._connection, self._shares = service, connection, shares
        self._claims = claims
        self._table = service.table
        self._form: RowForm = service.table.form
        self._messages = MessageStream(connection, SHORT if shares else LONG)
        self._unanswered = 0
        """Number of inserts done but not yet acknowledged."""
        self._memory: mmap.mmap | None = None
        self._rooms: dict[tuple[int, ...], bytearray] = {}
        """Buffers for samples sent in messages, where memory is not shared."""
        self._outputs: dict[tuple[int, ...], Output] = {}
        self._arrived: dict[tuple[int, bytes], tuple[InsertHead, list[Array]]] = {}
        """Cache: by offset and head, the arrays of inserts in shared memory."""
        self._failures = 0
        packed = not (self._form.packing.alone or self._form.stacks)
        self._summed = packed and service.restored is not None
        """Whether clients compute the check sums of plain inserts for the log."""
        self._answers: dict[int, Callable[[bytes], bytes | None]] = {
            wire.SAMPLE[0]: self._sample,
            wire.UPDATE[0]: self._update,
            wire.COUNTS[0]: self._counts,
            wire.MEMORY[0]: self._attach,
            wire.LOAD[0]: self._load,
            wire.STATE[0]: self._send_state,
        }

    def answer(self) -> None:
        """Serves until the client disconnects."""
        service, form = self._service, self._form
        hello = self._hello()
        welcome: dict[str, Any] = {
            "table": written(form.table),
            "envs": form.layout.envs,
            "leaves": [[leaf.path, list(leaf.shape), leaf.dtype.str] for leaf in form.leaves],
            "epoch": service.epoch,
            "timeout": service.timeout,
            "summed": self._summed,
        }
        try:
            if hello.claim is not None:
                welcome["first"] = self._claims.claim(self, *hello.claim)
        except UserError as error:
            self._messages.send(wire.REFUSED + str(error).encode())
            return
        self._messages.send(wire.DONE + json.dumps(welcome).encode())
        if not hello.inserts:
            self._go_on()
            return
        with service.inserting():
            self._go_on()

    def _hello(self) -> "Hello":
        with DECODING:
            said = json.loads(self._messages.receive())
            claim = said.get("claim")
            if claim is not None:
                count, wanted = (int(number) for number in claim)
                claim = count, wanted
                if count < 1:
                    raise ValueError(f"a claim of {count} streams")
            return Hello(said["channel"] == "insert", claim)

    def _go_on(self) -> None:
        messages, insert = self._messages, wire.INSERT[0]
        while True:
            # Acknowledge before blocking in `receive`, or the client might wait forever.
            if self._unanswered == TOGETHER or not messages.waiting:
                self._acknowledge()
            request = messages.receive()
            if not request or (request[0] not in self._answers and request[0] != insert):
                raise Malformed(f"a request of kind {request[:1]!r}")
            try:
                if request[0] == insert:
                    self._insert(request)
                    self._unanswered += 1
                    continue
                reply = self._answers[request[0]](request[1:])
                if reply is not None:
                    self._reply(wire.DONE + reply)
            except UserError as error:
                self._acknowledge()
                self._reply(wire.REFUSED + str(error).encode())

    def _acknowledge(self) -> None:
        """Acknowledges the inserts done so far."""
        if self._unanswered:
            self._reply(wire.DONE + wire.COUNT.pack(self._unanswered))
            self._unanswered = 0

    def _reply(self, reply: bytes, arrays: memoryview | None = None) -> None:
        self._service.when_kept(partial(self._send, reply, arrays))

    def _send(self, reply: bytes, arrays: memoryview | None, failure: UserError | None) -> None:
        """Sends an answer once its changes are durable; a refusal if they could not be written."""
        if failure is not None:
            reply, arrays = wire.REFUSED + str(failure).encode(), None
        with contextlib.suppress(OSError):  # the client has disconnected
            self._messages.send(reply, arrays)

    def _attach(self, request: bytes) -> bytes:
        with DECODING:
            (size,) = wire.SIZE.unpack(request)
            # They are views of the old memory.
            self._outputs.clear()
            self._arrived.clear()
            # The client sends the descriptor only now: nothing else may be on the socket.
            self._messages.send(wire.DONE)
            self._memory = wire.attach(recv_handle(self._connection), size)
        return b""

    def _insert(self, request: bytes) -> None:
        with DECODING:
            offset, failures, limit, check = wire.INSERT_HEAD.unpack_from(request, 1)
            # Sent before the client knew of a failure: refused, so that inserts stay in order.
            if failures != self._failures:
                raise UserError("An insert before this one has failed.")
            found = self._arrived.get((offset, request[INSERT_START:])) if self._shares else None
            head, arrays = found or self._arrays(request, offset)
            steps: Any = (
                plain_of(self._form, head, arrays, check if self._summed else None)
                if head.given & PLAIN
                else steps_of(self._form, head, arrays)
            )
        try:
            self._claims.check(self, head.first, head.last)
            if head.given & PLAIN:
                self._service.insert_plain(steps, head.first, head.last, _limit(limit))
            else:
                self._service.insert_steps(steps, head.first, head.last, _limit(limit))
        except UserError:
            self._failures += 1
            raise

    def _arrays(self, request: bytes, offset: int) -> tuple[InsertHead, list[Array]]:
        """The arrays of an insert: in shared memory from `offset`, or behind the request's head."""
        said = request[INSERT_START:]
        head = InsertHead.unpacked(said)
        if not 0 <= head.first < head.last <= self._form.layout.envs:
            raise ValueError(f"environments {head.first} to {head.last}")
        specs, memory = insert_specs(self._form, head), self._memory
        if not self._shares:
            memory, offset = bytearray(said[len(head.packed()) :]), 0  # a copy, for alignment
        if memory is None or offset + size_of(specs) > len(memory):
            raise UserError("An insert is longer than what came with it: use one version.")
        found = head, place(specs, memory, offset)
        if self._shares:
            # A client writes to the same few places in turn: to find their arrays again takes a
            # tenth of an insert's time.
            if len(self._arrived) >= ARRIVED:
                self._arrived.clear()
            self._arrived[offset, said] = found
        return found

    def _sample(self, request: bytes) -> None:
        with DECODING:
            offset, count, first, last, limit, kind, now = wire.SAMPLE_HEAD.unpack_from(request)
            if not 0 <= first < last <= count:
                raise ValueError(f"items {first} to {last} of {count}")
            draws = np.frombuffer(request, kind.decode(), last - first, wire.SAMPLE_HEAD.size)
            if draws.dtype.kind != "f" or not 0 <= draws.min() <= draws.max() < 1:
                raise ValueError("draws outside of [0, 1)")
            asked = (offset, count, first, last)
            output = self._outputs.get(asked)
            if output is None:
                output = self._outputs[asked] = self._output(asked)
        sample = self._service.sample_if_any(draws, _limit(limit), output, not now)
        if sample is None:
            self._reply(wire.DONE + wire.SIZE.pack(0))
            return
        output.note(sample)
        reply = wire.DONE + wire.SIZE.pack(int(sample.size))
        self._reply(reply, None if self._shares else memoryview(self._rooms[asked]))

    def _output(self, asked: tuple[int, int, int, int]) -> Output:
        """The destination of a sample's items: the client's memory, or a buffer to send."""
        offset, count, first, last = asked
        memory = self._memory
        if not self._shares:
            offset, count, first, last = 0, last - first, 0, last - first
            size = size_of(output_specs(self._form, count))
            if size > LONG:
                raise ValueError(f"a sample of {size} bytes")
            memory = bytearray(size)
            self._rooms[asked] = memory
        assert memory is not None
        into = memoryview(memory)[offset:]
        return Output(self._form, self._table.structure, count, into, (first, last))

    def _update(self, request: bytes) -> bytes:
        with DECODING:
            (count,) = wire.UPDATE_HEAD.unpack_from(request)
            at = wire.UPDATE_HEAD.size
            slot, number = np.frombuffer(request, np.int64, 2 * count, at).reshape(2, count)
            priorities = np.frombuffer(request, np.float32, count, at + 16 * count)
            index = self._table.index
            if count and index is not None and not 0 <= slot.min() <= slot.max() < index.live.size:
                raise ValueError("items that cannot be there")
        self._service.update_priorities(ItemKeys(slot, number), priorities)
        return b""

    def _counts(self, _: bytes) -> bytes:
        size, inserted, sampled = self._service.counts()
        return json.dumps({"size": size, "inserted": inserted, "sampled": sampled}).encode()

    def _send_state(self, _: bytes) -> None:
        """Sends the table's contents, in new memory."""
        state = self._service.state()
        specs = [(array.shape, array.dtype) for array in state.values()]
        size = max(size_of(specs), 1)
        descriptor = wire.create(size)
        memory = wire.attach(os.dup(descriptor), size)
        for to, array in zip(place(specs, memory), state.values(), strict=True):
            to[...] = array
        names = [[name, list(x.shape), x.dtype.str] for name, x in state.items()]
        answer = json.dumps({"size": size, "arrays": names}).encode()
        try:
            self._messages.send(wire.DONE + answer)
            if self._messages.receive() == wire.READY and self._shares:
                send_handle(self._connection, descriptor, 0)
            for piece in [] if self._shares else wire.pieces(memory, size):
                self._messages.send(wire.DONE, piece)
        finally:
            os.close(descriptor)

    def _load(self, request: bytes) -> bytes:
        with DECODING:
            said = json.loads(request)
            specs = [(tuple(shape), np.dtype(dtype)) for _, shape, dtype in said]
            names = [str(name) for name, _, _ in said]
            memory: Any = self._memory
            if not self._shares:
                memory, size = bytearray(), max(size_of(specs), 1)
                while len(memory) < size:
                    memory += self._messages.receive()
            found = dict(zip(names, place(specs, memory), strict=True))
            if found["limiter"].shape != (2,):
                raise ValueError("counts that are not two numbers")
        self._service.load(found)
        return b""


class Hello(NamedTuple):
    """The first message of a client."""

    inserts: bool
    """Whether the connection is for inserts."""
    claim: tuple[int, int] | None
    """Number of streams that it wants, and the first of them."""


def _limit(seconds: float) -> float | None:
    return None if math.isnan(seconds) else seconds


if __name__ == "__main__":
    main()
