"""Episodes on their way to a dataset: records of named arrays, with a head in JSON."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from dovetail.replay.storage.records import Array, Reading, RecordFile


class Entry(NamedTuple):
    """What was read of one."""

    header: dict[str, Any]
    arrays: dict[str, Array]


def append(file: RecordFile, header: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Writes one entry."""
    layout = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
    head = json.dumps({**header, "arrays": layout}).encode()
    file.append(head, [np.ascontiguousarray(array) for array in arrays.values()])


def entries(reading: Reading) -> Iterator[Entry]:
    """The entries of a file, until its end or until one is not whole."""
    for record in reading:
        header, parts = json.loads(record.head), iter(record.parts)
        arrays: dict[str, Array] = {}
        for name, dtype, shape in header.pop("arrays"):
            data = next(parts) if np.prod(shape, dtype=np.int64) else b""
            arrays[name] = np.frombuffer(data, np.dtype(dtype)).reshape(shape)
        yield Entry(header, arrays)
