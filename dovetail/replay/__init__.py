"""Replay tables: stored experience that a learner samples many times.

**Streams.** Each environment is a stream of rows; a row is any pytree. `insert` appends rows
[T, B, …] to the streams of B environments. Where `ends` marks an episode's last step, the final
observation (or any other part of a row, given as `final`) is stored as one extra row after it, and
the next row starts the next episode. Steps that are not `valid` (an environment that only resets)
are skipped. So the row after a step always holds its successor, and nothing is stored twice.

**Items** are windows of a stream; they are the unit of sampling. `Transitions(n)`: up to n steps
and the row after them, cut at the end of the episode. `Sequences(length, period)`: consecutive
rows, starting at every period-th step and crossing episode boundaries; a recurrent state stored
with the rows is available at the start. `Episodes(longest)`: whole episodes. An item can be sampled
as soon as its window is complete. Its priority is the one given with its first row, or by default
the highest so far (initially 1).

**Selection.** A sampler chooses items and a remover makes room: `Uniform`, `Prioritized`, `Fifo`,
`Lifo`, `Highest`, `Lowest`. An ordered batch (`Fifo`, …) holds the first n items in that order,
wrapping around if there are fewer. Items that have been sampled `max_times_sampled` times leave
after the batch. The caller supplies uniform draws and the sampler maps them to items, the
prioritized one in n strata; a table has no random generator. So the same inserts and draws give the
same items on the host and on the device, in whatever order the actors' inserts arrive.

**Storage.** With the `Fifo` remover, each stream has a ring of rows shared by overlapping items,
and an equal share of the capacity: an item leaves when its stream has that many newer ones, or when
its rows are overwritten. With other removers each item owns its rows. For a leaf with a `History`
(a frame stack) only the newest frame of each row is stored.

`HostTable` keeps a table in numpy, `dovetail.replay.device.table` in JAX arrays inside a compiled
program. `ReplayService` lets threads share a host table, paced by a `RateLimiter`. `ReplayServer`
keeps a table in a separate process, `ReplayShards` in several, and `ReplayClient` inserts and
samples from anywhere on the machine, or over TCP. With a folder (`durable`) nothing acknowledged is
lost. Server processes do not import JAX.
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
