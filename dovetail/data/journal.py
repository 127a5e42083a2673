"""The journal of a recording: records of named arrays with a JSON header."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from dovetail.replay.storage.records import Array, Reading, RecordFile


class Entry(NamedTuple):
    """One entry."""

    header: dict[str, Any]
    arrays: dict[str, Array]


def append(file: RecordFile, header: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Appends one entry."""
    layout = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
    head = json.dumps({**header, "arrays": layout}).encode()
    file.append(head, [np.ascontiguousarray(array) for array in arrays.values()])


def entries(reading: Reading) -> Iterator[Entry]:
    """The entries of a file, up to its end or the first incomplete one."""
    for record in reading:
        header, parts = json.loads(record.head), iter(record.parts)
        arrays: dict[str, Array] = {}
        for name, dtype, shape in header.pop("arrays"):
            # Empty arrays have no part in the record.
            data = next(parts) if np.prod(shape, dtype=np.int64) else b""
            arrays[name] = np.frombuffer(data, np.dtype(dtype)).reshape(shape)
        yield Entry(header, arrays)
