"""Replay tables: what was experienced, kept to be learned from again and again.

**Streams.** Each environment is a stream of rows; a row is any pytree. `insert` appends rows
[T, B, …] to the streams of B environments. Where `ends` says that an episode ends with a step, what
was seen after it (`final`, say the observation) is stored as one more row behind it; the next row
begins the next episode. Steps that are not `valid` (those of an environment that only resets) are
skipped. So the row behind a step always shows what was seen after it, and nothing is stored twice.

**Items** are windows of a stream, and what is sampled. `Transitions(n)`: up to n steps and the row
after them, cut where the episode ends. `Sequences(length, period)`: rows in a line, beginning at
every period-th step, across the ends of episodes; a recurrent state stored with the rows is there
at their beginning. `Episodes(longest)`: whole episodes. An item can be sampled as soon as its
window is complete. Its priority is the one given with its first row, by default the highest so far
(1 at first).

**Which.** A sampler chooses items, a remover makes room: `Uniform`, `Prioritized`, `Fifo`, `Lifo`,
`Highest`, `Lowest`. A batch in order (`Fifo`, …) is the first n items in that order, again from the
start if there are fewer; items that have been sampled `max_times_sampled` times leave after the
batch. Samplers get uniform draws from the caller and map them to items, the prioritized one in n
strata; a table has no generator. So the same inserts and draws give the same items, on the host and
on the device, and in whatever order the actors' inserts came.

**Where rows are.** With the `Fifo` remover, each stream has a ring of rows, shared by the items
that overlap, and keeps its equal share of the capacity: an item leaves when its stream has newer
ones to that number, or when its rows are overwritten. With other removers each item owns its rows.
Of a leaf with a `History` (a stack of frames) only the newest frame of each row is stored.

`HostTable` keeps a table in numpy, `dovetail.replay.device.table` in JAX arrays inside a compiled
program; `ReplayService` lets threads share a host table, held in step by a `RateLimiter`.
`ReplayServer` keeps one in a process of its own, `ReplayShards` in several, and `ReplayClient`
inserts and samples from anywhere on the machine, or over TCP. With a folder (`durable`) nothing
acknowledged is lost. The processes of servers import no JAX.
"""

from dovetail.replay.host.table import HostTable
from dovetail.replay.limiter import RateLimiter
from dovetail.replay.sample import ItemKeys, Sample, importance_weights
from dovetail.replay.service.address import Address
from dovetail.replay.service.client import ReplayClient
from dovetail.replay.service.server import ReplayServer, ReplayShards
from dovetail.replay.service.service import ReplayService
from dovetail.replay.table import (
    Episodes,
    Fifo,
    Highest,
    History,
    Lifo,
    Lowest,
    Prioritized,
    Selector,
    Sequences,
    Table,
    Transitions,
    Uniform,
)

__all__ = [
    "Address",
    "Episodes",
    "Fifo",
    "Highest",
    "History",
    "HostTable",
    "ItemKeys",
    "Lifo",
    "Lowest",
    "Prioritized",
    "RateLimiter",
    "ReplayClient",
    "ReplayServer",
    "ReplayService",
    "ReplayShards",
    "Sample",
    "Selector",
    "Sequences",
    "Table",
    "Transitions",
    "Uniform",
    "importance_weights",
]
