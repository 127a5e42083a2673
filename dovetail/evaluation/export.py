"""Exported policies: two files that are enough to act, without the training code.

`policy.safetensors` holds the weights and the initial carry by their tree paths. `policy.json`
holds the observation and action specs and the greedy act as an exported program (`jax.export`) for
any batch size. Loading needs neither the algorithm nor its networks.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.algorithm import Algorithm, Params, Timestep
from dovetail.batching import greedy_for_one
from dovetail.envs.interface import ActionSpace, Continuous, Discrete, MultiDiscrete, Observation
from dovetail.errors import UserError
from dovetail.run.checkpoint import digest_of, version_of
from dovetail.run.folder import write_atomically, write_error

FORMAT = 1
"""The format's version; increased when older versions of Dovetail could not read new files."""

PLATFORMS = ("cpu", "cuda", "tpu")
"""The platforms for which the program is lowered, whatever machine exports it."""

WEIGHTS_FILE = "policy.safetensors"
PROGRAM_FILE = "policy.json"

Leaves = tuple[Any, ...]


class Policy:
    """A loaded exported policy: maps observations to greedy actions."""

    env: str
    """The training environment: "backend:name"."""
    algorithm: str
    """The class name of the algorithm that trained it."""
    observation: Any
    """The observation of one environment: a pytree of `jax.ShapeDtypeStruct`."""
    action: ActionSpace
    """The space of the returned actions; bounded continuous entries are in [-1, 1]."""

    def __init__(self, record: Mapping[str, Any], weights: Leaves, carry: Leaves) -> None:
        self.env = record["env"]
        self.algorithm = record["algorithm"]
        self.observation = _tree_from_json(record["observation"])
        self.action = _action_from_json(record["action"])
        self._weights = jax.device_put(weights)
        self._carry = carry
        self._act = _callable(record)

    def __call__(
        self,
        observation: Observation,
        carry: Leaves | None = None,
        *,
        reward: np.ndarray | float | None = None,
        first: np.ndarray | bool | None = None,
    ) -> tuple[np.ndarray, Leaves]:
        """Returns (action, carry) as numpy arrays, for one observation or a batch [B, …].

        Pass the returned carry at the next step, and None at the start of an episode. In a batch,
        `first` [B] marks the environments that start an episode. `reward` [B] is the reward of the
        previous action, for policies that use it.
        """
        leaves, batch = self._observed(observation)
        size = 1 if batch is None else batch
        begins = np.full(size, carry is None) if first is None else np.reshape(first, size)
        rewards = np.zeros(size) if reward is None else np.reshape(reward, size)
        if carry is None:
            carry = tuple(np.broadcast_to(x, (size, *x.shape)) for x in self._carry)
        elif batch is None:
            carry = tuple(x[None] for x in carry)
        action, carry = self._act(self._weights, carry, leaves, rewards.astype(np.float32), begins)
        # A copy of the action: views of JAX arrays are read-only.
        action, carry = np.array(action), tuple(np.asarray(x) for x in carry)
        return (action, carry) if batch is not None else (action[0], tuple(x[0] for x in carry))

    def _observed(self, observation: Observation) -> tuple[Leaves, int | None]:
        """Returns the observation's leaves [B, …] and B; None instead of B for a single one."""
        plain = _plain(observation)
        if jax.tree.structure(plain) != jax.tree.structure(self.observation):
            raise UserError(
                f"The observation has the structure {jax.tree.structure(plain)}, but the policy "
                f"for {self.env} takes {jax.tree.structure(self.observation)}."
            )
        specs = jax.tree.leaves(self.observation)
        leaves = [
            np.asarray(leaf, spec.dtype)
            for leaf, spec in zip(jax.tree.leaves(plain), specs, strict=True)
        ]
        if all(leaf.shape == spec.shape for leaf, spec in zip(leaves, specs, strict=True)):
            return tuple(leaf[None] for leaf in leaves), None
        size = leaves[0].shape[0] if leaves[0].ndim else 0
        for leaf, spec in zip(leaves, specs, strict=True):
            if leaf.shape != (size, *spec.shape):
                raise UserError(
                    f"The observation has shape {leaf.shape}, but the policy for {self.env} takes "
                    f"{spec.shape}, or a batch of them with one more axis in front."
                )
        return tuple(leaves), size


def export_policy(folder: str | Path, algorithm: Algorithm, params: Params) -> Path:
    """Exports a bound algorithm's greedy policy with these parameters; returns the folder."""
    from safetensors.numpy import save

    folder = Path(folder)
    spec, carry = algorithm.task.env, algorithm.initial_carry()
    program, batched = _program(algorithm, params, carry)
    tensors = _named("params", params) | _named("carry", carry)
    weights = save(tensors)
    record = {
        "format": FORMAT,
        "versions": {name: version_of(name) for name in ("dovetail", "jax")},
        "algorithm": type(algorithm).__name__,
        "env": spec.id,
        "observation": _tree_to_json(_plain(spec.observation)),
        "action": {"kind": type(spec.action).__name__, **asdict(spec.action)},
        "params": [_entry(name, x) for name, x in tensors.items() if name.startswith("params")],
        "carry": [_entry(name, x) for name, x in tensors.items() if name.startswith("carry")],
        "weights_digest": hashlib.sha256(weights).hexdigest(),
        "platforms": list(program.platforms),
        "batched": batched,
        "program": base64.b64encode(program.serialize()).decode(),
    }
    record["digest"] = digest_of(record)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(folder, error) from error
    write_atomically(folder / WEIGHTS_FILE, weights)
    write_atomically(folder / PROGRAM_FILE, json.dumps(record, indent=1))
    return folder


def load_policy(folder: str | Path) -> Policy:
    """Loads a policy written by `export_policy`; verifies its digests."""
    from safetensors import deserialize

    folder = Path(folder)
    record = _read_record(folder)
    weights = _read(folder, WEIGHTS_FILE)
    if hashlib.sha256(weights).hexdigest() != record["weights_digest"]:
        raise UserError(
            f"{folder / WEIGHTS_FILE} is damaged, or of another export than {PROGRAM_FILE} beside "
            "it: export the policy again."
        )
    data = {name: tensor["data"] for name, tensor in deserialize(weights)}

    def tensor(entry: Mapping[str, Any]) -> np.ndarray:
        # safetensors' own numpy loader does not know bfloat16.
        flat = np.frombuffer(data[entry["name"]], jnp.dtype(entry["dtype"]))
        return flat.reshape(entry["shape"])

    return Policy(record, tuple(map(tensor, record["params"])), tuple(map(tensor, record["carry"])))


def _program(algorithm: Algorithm, params: Params, carry: Any) -> tuple[Any, bool]:
    """Exports the greedy act; returns (program, whether it takes a batch).

    It takes any batch size, unless the algorithm's code needs a concrete number where JAX has only
    a symbolic dimension. It runs on every platform, unless a part of it lowers for this machine's
    platform only.
    """
    from jax import export

    def struct(leaf: Any, *lead: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, *jnp.shape(leaf)), jnp.result_type(leaf))

    specs = algorithm.task.env.observation
    trees = (jax.tree.structure(params), jax.tree.structure(carry), jax.tree.structure(specs))
    one = _flat_greedy(algorithm, carry, trees)
    many = jax.vmap(one, in_axes=(None, 0, 0, 0, 0))
    # From the most general export to the most restricted; the first that works is taken.
    failures = []
    for platforms in (PLATFORMS, (_platform(),)):
        for function, lead in ((many, export.symbolic_shape("b")), (one, ())):
            try:
                exported = export.export(jax.jit(function), platforms=platforms)(
                    tuple(struct(x) for x in jax.tree.leaves(params)),
                    tuple(struct(x, *lead) for x in jax.tree.leaves(carry)),
                    tuple(struct(x, *lead) for x in jax.tree.leaves(specs)),
                    jax.ShapeDtypeStruct((*lead,), jnp.float32),
                    jax.ShapeDtypeStruct((*lead,), jnp.bool_),
                )
            except Exception as error:  # tracing runs user code, which may raise anything
                failures.append(error)
            else:
                return exported, function is many
    raise failures[-1]


def _flat_greedy(
    algorithm: Algorithm, initial: Any, trees: tuple[Any, Any, Any]
) -> Callable[..., Any]:
    """The greedy act on tuples of leaves; resets the carry where an episode begins."""
    choose = greedy_for_one(algorithm)

    def greedy(
        weights: Leaves, carry: Leaves, observation: Leaves, reward: jax.Array, first: jax.Array
    ) -> tuple[jax.Array, Leaves]:
        params, old, observed = (
            jax.tree.unflatten(tree, leaves)
            for tree, leaves in zip(trees, (weights, carry, observation), strict=True)
        )
        fresh = jax.tree.map(lambda new, kept: jnp.where(first, new, kept), initial, old)
        action, carry = choose(params, fresh, Timestep(observed, reward, first))
        return action, tuple(jax.tree.leaves(carry))

    return greedy


def _callable(record: Mapping[str, Any]) -> Callable[..., tuple[jax.Array, Leaves]]:
    """The stored program; compiled at the first call for each batch size."""
    from jax import export

    if _platform() not in record["platforms"]:
        raise UserError(
            f"The policy was exported for {', '.join(record['platforms'])}, but JAX runs on "
            f"{_platform()} here: set JAX_PLATFORMS to one of those, or export it on this machine."
        )
    try:
        call = export.deserialize(bytearray(base64.b64decode(record["program"]))).call
    except Exception as error:
        raise UserError(
            f"The policy's program was exported by JAX {record['versions']['jax']} and cannot be "
            f"read by JAX {jax.__version__}: export it again with a nearer version."
        ) from error
    if record["batched"]:
        return jax.jit(call)

    def mapped(weights: Leaves, *batch: Any) -> Any:
        return jax.lax.map(lambda one: call(weights, *one), batch)

    return jax.jit(mapped)


def _platform() -> str:
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend


def _named(prefix: str, tree: Any) -> dict[str, np.ndarray]:
    """The tree's leaves in order, by names derived from their paths."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat]
    if len(set(names)) < len(names):
        names = [f"{i}.{name}" for i, name in enumerate(names)]
    return {
        f"{prefix}.{name}".rstrip("."): np.asarray(leaf, jnp.result_type(leaf))
        for name, (_, leaf) in zip(names, flat, strict=True)
    }


def _entry(name: str, array: np.ndarray) -> dict[str, Any]:
    return {"name": name, "shape": list(array.shape), "dtype": str(array.dtype)}


def _plain(tree: Any) -> Any:
    """Converts a tree to plain dicts and tuples; the classes of named tuples are not exported."""
    if isinstance(tree, Mapping):
        return {name: _plain(branch) for name, branch in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(_plain(branch) for branch in tree)
    return tree


def _tree_to_json(tree: Any) -> dict[str, Any]:
    if isinstance(tree, dict):
        return {"dict": {name: _tree_to_json(branch) for name, branch in tree.items()}}
    if isinstance(tree, tuple):
        return {"tuple": [_tree_to_json(branch) for branch in tree]}
    return {"shape": list(tree.shape), "dtype": str(tree.dtype)}


def _tree_from_json(tree: Mapping[str, Any]) -> Any:
    if "dict" in tree:
        return {name: _tree_from_json(branch) for name, branch in tree["dict"].items()}
    if "tuple" in tree:
        return tuple(_tree_from_json(branch) for branch in tree["tuple"])
    return jax.ShapeDtypeStruct(tuple(tree["shape"]), jnp.dtype(tree["dtype"]))


def _action_from_json(record: Mapping[str, Any]) -> ActionSpace:
    match record:
        case {"kind": "Discrete", "n": n}:
            return Discrete(n)
        case {"kind": "MultiDiscrete", "nvec": nvec}:
            return MultiDiscrete(tuple(nvec))
        case _:
            return Continuous(record["size"], record["bounded"])


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise UserError(
            f"No exported policy in {folder}: {name} cannot be read ({error.strerror}); give the "
            "policy folder of a run, which holds both of its files."
        ) from error


def _read_record(folder: Path) -> dict[str, Any]:
    place = folder / PROGRAM_FILE
    try:
        record = json.loads(_read(folder, PROGRAM_FILE))
        found = record["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{place} is damaged: it is cut short or not a policy's.") from error
    if found != FORMAT:
        raise UserError(
            f"{place} has format {found}, but this Dovetail reads format {FORMAT}: load it with "
            "the Dovetail that wrote it, or export it again."
        )
    if record.pop("digest", None) != digest_of(record):
        raise UserError(f"{place} is damaged: it is not what was written; export it again.")
    return record
