"""Exported policies: two files that are enough to act, without the training code.

`policy.json` describes the policy: where it comes from, the environment's spaces and their maps,
the greedy act as NumPy calls where it is a plain network, and its programs (`jax.export`). It names
a safetensors file beside it, with the weights and the initial carry by their tree paths. The name
of that file contains its digest, so that replacing `policy.json` replaces the policy as a whole.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.algorithm import Algorithm, Params
from dovetail.data.spaces import raw_spaces
from dovetail.envs.interface import EnvSpec
from dovetail.errors import UserError
from dovetail.evaluation.operations import NoOperations, Operation, numpy_operations
from dovetail.evaluation.policy import Policy
from dovetail.evaluation.programs import Program, arguments, export_programs, flat_greedy
from dovetail.evaluation.space_record import decoding, encoding, space_to_json
from dovetail.keys import plain
from dovetail.run.checkpoint import digest_of, version_of
from dovetail.run.folder import write_atomically, write_error

FORMAT = 2
"""The format's version; increased when older versions of Dovetail could not read new files."""

RECORD_FILE = "policy.json"
WEIGHTS = "weights-*.safetensors"
TRIES = 3
"""Attempts to read a policy that a training may be replacing."""


@dataclass(frozen=True)
class Origin:
    """Where a policy comes from."""

    env_steps: int = 0
    """Number of environment steps it was trained for."""
    updates: int = 0
    mean_return: float | None = None
    """The mean greedy return of its evaluation; None if it was not evaluated."""
    episodes: int | None = None
    """Number of episodes of that evaluation."""


UNKNOWN = Origin()


class Exported(NamedTuple):
    """The contents of the two files."""

    record: dict[str, Any]
    """`policy.json` without its digest."""
    weights: bytes
    """The safetensors file."""

    @property
    def origin(self) -> Origin:
        """Where the policy comes from."""
        record = self.record
        return Origin(record["env_steps"], record["updates"], record["return"], record["episodes"])

    def policy(self) -> Policy:
        """The policy, ready to act."""
        try:
            tensors = self.tensors()
            weights, carry = (
                tuple(tensors[entry["name"]] for entry in self.record[part])
                for part in ("params", "carry")
            )
            return Policy(self.record, weights, carry)
        except UserError:
            raise
        except Exception as error:  # the digests are right, so it was made so on purpose
            raise UserError(
                f"The policy cannot be used: its files do not fit together "
                f"({type(error).__name__}: {error}); export it again."
            ) from error

    def tensors(self) -> dict[str, np.ndarray]:
        """The arrays of the safetensors file by name."""
        from safetensors import deserialize

        data = {name: tensor["data"] for name, tensor in deserialize(self.weights)}
        entries = [*self.record["params"], *self.record["carry"]]
        # safetensors' own numpy loader does not know bfloat16.
        return {
            entry["name"]: np.frombuffer(data[entry["name"]], jnp.dtype(entry["dtype"])).reshape(
                entry["shape"]
            )
            for entry in entries
        }

    def write(self, folder: str | Path) -> Path:
        """Writes both files, replacing a policy that is there as a whole; returns the folder."""
        folder = Path(folder)
        record = {**self.record, "digest": digest_of(self.record)}
        name = self.record["weights"]["file"]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(folder, error) from error
        write_atomically(folder / name, self.weights)
        write_atomically(folder / RECORD_FILE, json.dumps(record, indent=1))
        for before in folder.glob(WEIGHTS):
            if before.name != name:
                with contextlib.suppress(OSError):
                    before.unlink()
        return folder


class PolicyExporter:
    """Exports the policies of one bound algorithm; its programs are made once."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._programs: dict[str, Program] | None = None
        self._operations: list[Operation] | None = None

    def export(self, params: Params, origin: Origin = UNKNOWN) -> Exported:
        """The policy with these parameters."""
        from safetensors.numpy import save

        algorithm, spec = self._algorithm, self._algorithm.task.env
        tensors = _named("params", params)
        if self._programs is None:
            self._programs = export_programs(algorithm, params)
            self._operations = _operations(algorithm, params, list(tensors))
        tensors |= _named("carry", algorithm.initial_carry())
        weights = save(tensors)
        digest = hashlib.sha256(weights).hexdigest()
        record = {
            "format": FORMAT,
            "versions": {name: version_of(name) for name in ("dovetail", "jax")},
            "algorithm": type(algorithm).__name__,
            "env": spec.id,
            "env_steps": origin.env_steps,
            "updates": origin.updates,
            "return": origin.mean_return,
            "episodes": origin.episodes,
            **_spaces(spec),
            "weights": {"file": f"weights-{digest[:16]}.safetensors", "sha256": digest},
            "params": [_entry(name, x) for name, x in tensors.items() if name.startswith("params")],
            "carry": [_entry(name, x) for name, x in tensors.items() if name.startswith("carry")],
            "operations": self._operations,
            "programs": self._programs,
        }
        return Exported(record, weights)


def read_exported(folder: str | Path) -> Exported:
    """Reads a policy's files and verifies their digests."""
    folder = Path(folder)
    for attempt in range(TRIES):
        record = _read_record(folder)
        try:
            weights = _read(folder, record["weights"]["file"])
        except UserError:
            if attempt + 1 < TRIES:  # a training may just have replaced it
                continue
            raise
        if hashlib.sha256(weights).hexdigest() != record["weights"]["sha256"]:
            raise UserError(
                f"{folder / record['weights']['file']} is damaged: it is not what was written; "
                "export the policy again."
            )
        return Exported(record, weights)
    raise AssertionError


def _spaces(spec: EnvSpec) -> dict[str, Any]:
    """The spaces with their maps, and the arrays that the policy takes."""
    observation, action = raw_spaces(spec)
    flat = jax.tree_util.tree_flatten_with_path(spec.observation)[0]
    inputs = [
        {
            "name": ".".join(["observation", *_parts(path)]),
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype),
        }
        for path, leaf in flat
    ]
    mapped = spec.spaces is not None
    return {
        "spaces": {
            "observation": space_to_json(observation),
            "action": space_to_json(action),
            "mapped": mapped,
        },
        "encoding": encoding(observation) if mapped else None,
        "inputs": inputs,
        "output": {"kind": type(spec.action).__name__, **asdict(spec.action)},
        "decoding": decoding(action),
    }


def _operations(algorithm: Algorithm, params: Params, names: list[str]) -> list[Operation] | None:
    """The greedy act as NumPy calls; None if it uses a memory or is more than a plain network."""
    weights, carry, leaves, *rest = arguments(algorithm, params)
    seen = jax.tree_util.tree_flatten_with_path(algorithm.task.env.observation)[0]
    shown = [".".join(["observation", *_parts(path)]) for path, _ in seen]
    memory = [NoOperations("memory")] * len(carry)
    act, sizes = flat_greedy(algorithm, params), (len(weights), len(carry), len(leaves))

    def action(*flat: Any) -> Any:
        values = iter(flat)
        trees = [tuple(next(values) for _ in range(size)) for size in sizes]
        return act(*trees, *values)[0]

    inputs = [*names, *memory, *shown, "reward", "first"]
    return numpy_operations(action, inputs, [*weights, *carry, *leaves, *rest])


def _parts(path: tuple[Any, ...]) -> list[str]:
    text = jax.tree_util.keystr(path, simple=True, separator="\n")
    return text.split("\n") if text else []


def _named(prefix: str, tree: Any) -> dict[str, np.ndarray]:
    """The tree's leaves in order, by names derived from their paths."""
    flat = [(path, plain(leaf)) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat]
    if len(set(names)) < len(names):
        names = [f"{i}.{name}" for i, name in enumerate(names)]
    return {
        f"{prefix}.{name}".rstrip("."): np.asarray(leaf, jnp.result_type(leaf))
        for name, (_, leaf) in zip(names, flat, strict=True)
    }


def _entry(name: str, array: np.ndarray) -> dict[str, Any]:
    return {"name": name, "shape": list(array.shape), "dtype": str(array.dtype)}


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise UserError(
            f"No exported policy in {folder}: {name} cannot be read ({error.strerror}); give the "
            "folder of a run, or of a policy with both of its files."
        ) from error


def _read_record(folder: Path) -> dict[str, Any]:
    place = folder / RECORD_FILE
    try:
        record: Any = json.loads(_read(folder, RECORD_FILE))
        found = record["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{place} is damaged: it is cut short or not a policy's.") from error
    if found != FORMAT:
        raise UserError(
            f"{place} has format {found}, but this Dovetail reads format {FORMAT}: load it with "
            "the Dovetail that wrote it, or export it again."
        )
    if record.pop("digest", None) != digest_of(record):
        raise UserError(f"{place} is damaged: it is not what was written; export it again.")
    name = _weights_name(record)
    if name is None:
        raise UserError(f"{place} is damaged: it names no file of weights beside it.")
    return record


def _weights_name(record: Mapping[str, Any]) -> str | None:
    """The name of the weights' file, if it is one in the same folder."""
    try:
        name = record["weights"]["file"]
        return name if Path(name).match(WEIGHTS) and Path(name).name == name else None
    except (KeyError, TypeError):
        return None
