"""Checkpoints of the training state: written in the background, restored bit for bit.

A checkpoint is a folder named by its step. It holds `arrays/` (orbax) and `meta.json`, with an
entry for every leaf, the caller's metadata, and a sha256 of every file. It is written under a
hidden name and renamed when complete, so that a killed process never leaves a partial checkpoint.
Restoring verifies the digests and raises on any difference.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Generator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.errors import UserError
from dovetail.run.legacy import present_path

FORMAT = 1
"""The format's version; increased when older versions of Dovetail could not read new files."""

PyTree = Any


class DamagedCheckpoint(UserError):
    """A checkpoint is not what was written; an earlier one may be intact."""


class UnwrittenCheckpoint(UserError):
    """A checkpoint could not be written; earlier ones are unharmed."""


class _Request(NamedTuple):
    """One save; a copy that training no longer modifies."""

    step: int
    leaves: list[dict[str, Any]]
    arrays: list[Any]
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints of one folder and the thread that writes them.

    One thread calls its methods; `_changed` guards the fields shared with the writer thread.
    """

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        if keep < 1:
            raise UserError(
                f"keep is {keep}, but at least 1 checkpoint must be kept: give 1 or more."
            )
        self.folder = Path(folder).absolute()
        self.keep = keep
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waiting: _Request | None = None
        self._writing = False
        self._closed = False
        self._error: UserError | None = None
        self._base = -1
        self._known: set[int] = set()

    def save(self, step: int, tree: PyTree, meta: Mapping[str, Any]) -> None:
        """Starts writing `tree` as checkpoint `step`; returns at once.

        At most one save is in flight; a newer request replaces a waiting one. `meta` is any JSON
        object; `restore` compares it with its `expect`. Raises the error of an earlier save. The
        step written or restored last is not written again. Saving an earlier step drops the
        checkpoints after it.
        """
        step = int(step)
        self._raise_error()
        if self._closed:
            raise UserError(f"The checkpoints in {self.folder} are closed: save before close().")
        if self._known and step == max(self._known):
            return
        if not self._known:
            self._refuse_other_run(step)
        leaves, arrays = _snapshot(tree)
        # Through JSON: a deep copy that compares equal with restored metadata.
        request = _Request(step, leaves, arrays, json.loads(json.dumps(dict(meta))))
        with self._changed:
            self._known = {known for known in self._known if known < step} | {step}
            if self._waiting is not None:
                self._known.discard(self._waiting.step)
            self._waiting = request
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="dovetail-checkpoints", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Returns True once everything is written, False after `timeout` seconds; raises the error
        of a failed save."""
        with self._changed:
            idle = self._changed.wait_for(
                lambda: self._waiting is None and not self._writing, timeout
            )
        self._raise_error()
        return idle

    def close(self) -> None:
        """Writes a waiting request, stops the thread, and raises the error of a failed save; safe
        to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._raise_error()

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, ascending."""
        found = self.folder.glob("[0-9]*/meta.json")
        return sorted(int(path.parent.name) for path in found if path.parent.name.isdigit())

    def latest(self) -> int | None:
        """The last step with a checkpoint; None without any."""
        return max(self.steps(), default=None)

    def meta(self, step: int | None = None) -> dict[str, Any]:
        """The metadata of checkpoint `step`, or of the latest."""
        step = self._choose(step)
        return _read_record(self.folder / str(step), f"Checkpoint {step} in {self.folder}")["meta"]

    def arrays(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The arrays of the latest checkpoint, by path in the saved tree, and its metadata."""
        step = self._choose(None)
        place = f"Checkpoint {step} in {self.folder}"
        record = _read_record(self.folder / str(step), place)
        found = _read_arrays(self.folder / str(step), record["leaves"], place)
        names = [present_path(entry["path"]) for entry in record["leaves"]]
        return dict(zip(names, found, strict=True)), record["meta"]

    def restore(
        self, like: PyTree, step: int | None = None, expect: Mapping[str, Any] | None = None
    ) -> tuple[PyTree, dict[str, Any]]:
        """Returns (tree, meta) of checkpoint `step`, or of the latest, bit for bit as saved.

        `like` provides the structure and each leaf's sharding. Every entry of `expect` must equal
        the saved one, except "options", which may differ as long as every leaf keeps its shape.
        """
        step = self._choose(step)
        place = f"Checkpoint {step} in {self.folder}"
        try:
            record = _read_record(self.folder / str(step), place)
        except UserError as error:
            others = [str(other) for other in self.steps() if other != step]
            hint = f"restore another: {', '.join(others)}" if others else "there is no other"
            raise type(error)(f"{error}; {hint}.") from error
        meta = record["meta"]
        _check_meta(meta, expect or {}, place)
        leaves = [leaf for _, leaf in jax.tree_util.tree_flatten_with_path(like)[0]]
        _check_leaves(record["leaves"], like, meta, expect or {}, place)
        arrays = _read_arrays(self.folder / str(step), record["leaves"], place)
        restored = [
            _as_leaf(array, entry, leaf)
            for array, entry, leaf in zip(arrays, record["leaves"], leaves, strict=True)
        ]
        self._base = step
        self._known = {step}
        return jax.tree.unflatten(jax.tree.structure(like), restored), meta

    def _choose(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            if not self.folder.is_dir():
                there = "there is no such folder"
            else:
                names = sorted(entry.name for entry in self.folder.iterdir())[:5]
                there = f"it holds {', '.join(names)}" if names else "it is empty"
            raise UserError(
                f"No checkpoint was found in {self.folder} ({there}): "
                "give the checkpoints folder of a run that has saved."
            )
        if step is not None and step not in steps:
            have = ", ".join(map(str, steps))
            raise UserError(f"No checkpoint {step} in {self.folder}: choose one of: {have}.")
        return steps[-1] if step is None else step

    def _refuse_other_run(self, step: int) -> None:
        """Raises if the folder holds checkpoints of another run, which would be mixed with ours."""
        latest = self.latest()
        if latest is not None:
            raise UserError(
                f"Checkpoint {step} was not written, since {self.folder} already holds checkpoint "
                f"{latest} of another run: resume that run, or choose another folder."
            )

    def _raise_error(self) -> None:
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        """The writer thread: writes waiting requests until closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closed)
                request, self._waiting = self._waiting, None
                self._writing = request is not None
            if request is None:
                return
            failure = None
            try:
                self._write_surely(request)
            except Exception as error:
                failure = error
            with self._changed:
                self._writing = False
                if failure is not None:
                    self._known.discard(request.step)
                    self._error = self._sentence(request.step, failure)
                self._changed.notify_all()
            del request, failure  # frees the copied arrays while waiting for the next request

    def _sentence(self, step: int, error: Exception) -> UserError:
        text = " ".join(str(error).split()) or type(error).__name__
        reason = text if len(text) <= 160 else f"… {text[-160:]}"
        return UnwrittenCheckpoint(
            f"Checkpoint {step} could not be written to {self.folder} ({reason}): "
            "make room or make the folder writable; earlier checkpoints are unharmed."
        )

    def _write_surely(self, request: _Request) -> None:
        """Writes, and retries once after a SystemError.

        CPython's parser can miscount its recursion depth when two threads import modules that
        parse Python code, as the first checkpoint and a plot may do.
        """
        try:
            self._write(request)
        except SystemError:
            self._write(request)

    def _write(self, request: _Request) -> None:
        """Writes under a hidden name, renames, then removes surplus checkpoints."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        hidden = self.folder / f".tmp-{request.step}"
        try:
            _write_arrays(hidden / "arrays", request)
            _write_record(hidden, request)
            # Checkpoints after the restored one, or from this step on, belong to an older history.
            for step in self.steps():
                abandoned = step > self._base >= 0 and step not in self._known
                if abandoned or step >= request.step:
                    self._hide(step)
            os.rename(hidden, self.folder / str(request.step))
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        for surplus in self.steps()[: -self.keep]:
            self._hide(surplus)
        self._sweep()

    def _hide(self, step: int) -> None:
        """Removes a checkpoint atomically by renaming it; `_sweep` deletes the files later."""
        os.rename(self.folder / str(step), self.folder / f".tmp-removed-{step}")

    def _sweep(self) -> None:
        for leftover in self.folder.glob(".tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def snapshot(tree: PyTree) -> PyTree:
    """Copies `tree`, so that neither donation nor writes to numpy arrays can change it.

    Device arrays are copied on their device, asynchronously; the caller does not wait.
    """

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return jax.device_put(leaf, leaf.sharding, may_alias=False)
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(copy, tree)


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _snapshot(tree: PyTree) -> tuple[list[dict[str, Any]], list[Any]]:
    """Returns each leaf's entry for `meta.json`, and copies of the leaves' data."""
    leaves, arrays = [], []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        entry = _describe(path, leaf)
        if _is_key(leaf):
            entry["impl"] = str(jax.random.key_impl(leaf))
            leaf = jax.random.key_data(leaf)
        leaves.append(entry)
        arrays.append(leaf)
    return leaves, snapshot(arrays)


def _describe(path: tuple[Any, ...], leaf: Any) -> dict[str, Any]:
    """A leaf's path, shape and dtype; for a random key, the shape of its data."""
    name = jax.tree_util.keystr(path)
    if _is_key(leaf):
        shape = jax.eval_shape(jax.random.key_data, leaf).shape
        return {"path": name, "shape": list(shape), "dtype": str(leaf.dtype)}
    shape, dtype = np.shape(leaf), getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
    if dtype.kind not in "biufcV" or dtype.names:
        raise UserError(
            f"The state's leaf {name} is of type {type(leaf).__name__}, which a checkpoint cannot "
            "hold: keep numbers and arrays of numbers in the state."
        )
    return {"path": name, "shape": list(shape), "dtype": str(dtype)}


def _as_leaf(array: np.ndarray, entry: Mapping[str, Any], like: Any) -> Any:
    """Converts a stored array to the type of `like`, with the sharding of `like`."""
    if isinstance(like, np.ndarray):
        return np.array(array)
    if isinstance(like, np.generic):
        return array[()]
    if isinstance(like, bool | int | float | complex):
        return type(like)(array.item())
    leaf = jnp.array(array)
    if "impl" in entry:
        example = jnp.empty((), like.dtype)
        leaf = jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(example))
    sharding = getattr(like, "sharding", None)
    pinned = sharding is not None and getattr(like, "committed", True)
    return jax.device_put(leaf, sharding) if pinned else leaf


@contextlib.contextmanager
def _quiet_orbax() -> Generator[None]:
    """Silences Orbax, which logs several tracebacks for an error that it also raises."""

    def drop(record: logging.LogRecord) -> bool:
        return False

    logger = logging.getLogger("absl")
    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


def _write_arrays(folder: Path, request: _Request) -> None:
    import orbax.checkpoint as ocp

    # Orbax takes twice as long for device arrays as for numpy arrays, and rejects empty arrays and
    # empty trees.
    arrays = {str(i): np.asarray(array) for i, array in enumerate(request.arrays)}
    tree = {name: array for name, array in arrays.items() if array.size}
    tree["end"] = np.zeros(1, np.uint8)
    with _quiet_orbax(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
        writer.save(folder, args=ocp.args.PyTreeSave(tree))


def _read_arrays(folder: Path, leaves: list[dict[str, Any]], place: str) -> list[np.ndarray]:
    import orbax.checkpoint as ocp

    stored = [str(i) for i, entry in enumerate(leaves) if 0 not in entry["shape"]]
    plain = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in [*stored, "end"]}
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            tree = reader.restore(
                folder / "arrays", args=ocp.args.PyTreeRestore(restore_args=plain)
            )
    except Exception as error:
        raise UserError(
            f"{place} cannot be read by the installed orbax ({str(error)[:200]}): "
            "install the versions that its meta.json names."
        ) from error
    empty = {
        str(i): np.zeros(entry["shape"], "uint32" if "impl" in entry else jnp.dtype(entry["dtype"]))
        for i, entry in enumerate(leaves)
        if 0 in entry["shape"]
    }
    return [(tree | empty)[str(i)] for i in range(len(leaves))]


def _write_record(folder: Path, request: _Request) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    record: dict[str, Any] = {
        "format": FORMAT,
        "versions": {name: version_of(name) for name in ("dovetail", "jax", "orbax-checkpoint")},
        "step": request.step,
        "meta": request.meta,
        "leaves": request.leaves,
        "files": {
            path.relative_to(folder).as_posix(): _digest_of_file(path, sync=True) for path in files
        },
    }
    record["digest"] = digest_of(record)
    with open(folder / "meta.json", "w") as file:
        json.dump(record, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _read_record(folder: Path, place: str) -> dict[str, Any]:
    """Reads `meta.json`; verifies its format and the digest of every file."""
    try:
        record = json.loads((folder / "meta.json").read_text())
        found = record["format"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{place} is damaged: its meta.json cannot be read") from error
    if found != FORMAT:
        raise UserError(
            f"{place} has format {found}, but this Dovetail reads format {FORMAT}: "
            "use the Dovetail that wrote it"
        )
    digest = record.pop("digest", None)
    if digest != digest_of(record) or not _well_formed(record):
        raise DamagedCheckpoint(f"{place} is damaged: its meta.json is not what was written")
    for name, expected in record["files"].items():
        file = folder / name
        if not _inside(file, folder) or not file.is_file() or _digest_of_file(file) != expected:
            raise DamagedCheckpoint(f"{place} is damaged: its file {name} is not what was written")
    return record


def _well_formed(record: Mapping[str, Any]) -> bool:
    """Whether a record has the entries that `_write_record` writes, of their types."""
    meta, leaves, files = (record.get(name) for name in ("meta", "leaves", "files"))
    if not (isinstance(meta, dict) and isinstance(leaves, list) and isinstance(files, dict)):
        return False

    def is_leaf(entry: Any) -> bool:
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            return False
        shape, dtype = entry.get("shape"), entry.get("dtype")
        sizes = isinstance(shape, list) and all(type(x) is int and x >= 0 for x in shape)
        return sizes and isinstance(dtype, str)

    return all(map(is_leaf, leaves)) and all(isinstance(x, str) for x in files.values())


def _inside(file: Path, folder: Path) -> bool:
    """Whether a file lies in the folder itself, not behind a link out of it."""
    return file.resolve().is_relative_to(folder.resolve())


def _check_meta(meta: Mapping[str, Any], expect: Mapping[str, Any], place: str) -> None:
    # Through JSON, like the saved metadata, where tuples have become lists.
    for name, value in json.loads(json.dumps(dict(expect))).items():
        if name != "options" and _class_name(meta.get(name)) != _class_name(value):
            raise UserError(
                f"{place} was saved with {name} {meta.get(name)!r}, but {value!r} is asked for: "
                f"restore it with its own {name}."
            )


def _class_name(value: Any) -> Any:
    """The class of "file.py:Class", whose file may have moved; anything else as it is."""
    return value.rpartition(".py:")[2] if isinstance(value, str) else value


def _check_leaves(
    saved: list[dict[str, Any]],
    like: PyTree,
    meta: Mapping[str, Any],
    expect: Mapping[str, Any],
    place: str,
) -> None:
    """Raises if a leaf differs, naming the first one and the changed options that may be why."""
    flat = jax.tree_util.tree_flatten_with_path(like)[0]
    here = {entry["path"]: entry for entry in (_describe(*pair) for pair in flat)}
    there = {present_path(entry["path"]): entry for entry in saved}
    for path in [*here, *there]:
        was, now = (_leaf_text(side.get(path)) for side in (there, here))
        if was != now:
            options = json.loads(json.dumps(dict(expect.get("options") or {})))
            before = meta.get("options") or {}
            changed = [
                f"{name} was {before.get(name)!r}, is {options.get(name)!r}"
                for name in sorted(before.keys() | options.keys())
                if before.get(name) != options.get(name)
            ]
            why = f" ({'; '.join(changed)})" if options and changed else ""
            raise UserError(
                f"{place} does not fit: its leaf {path} is {was}, but here it is {now}: "
                f"restore it with the options it was saved with{why}."
            )


def _leaf_text(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "absent"
    return f"{entry['dtype']}[{', '.join(map(str, entry['shape']))}]"


def _digest_of_file(path: Path, sync: bool = False) -> str:
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(record: Mapping[str, Any]) -> str:
    """The sha256 of a JSON object, independent of the order of its entries."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def version_of(package: str) -> str:
    """A package's installed version, for the metadata of written files."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
