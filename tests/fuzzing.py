"""Mutations of real files; every reader answers each with a sentence, or with a correct read.

`tests/test_fuzz.py` runs some hundreds of them, `benchmarks/fuzz.py` ten thousand of each kind.
"""

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from small import QUIET, a2c

import dovetail
from dovetail.data import Reader
from dovetail.errors import UserError
from dovetail.plan.serial import from_json
from dovetail.replay import HostTable, Prioritized, RateLimiter, ReplayService, Table, Transitions
from dovetail.run.checkpoint import Checkpoints, digest_of
from dovetail.run.folder import Run
from dovetail.strategies.fused import Fused
from dovetail.training.config import rebuild_all

VALUES: list[Any] = [None, True, -1, 0, 2**31, 2**63, 1e308, "", "x" * 300, "../../x", [], {}, [[]]]
"""What may stand anywhere in a JSON file that somebody else wrote."""
ROW = {"observation": np.zeros(2, np.float32), "reward": np.zeros((), np.float32)}


class Target(NamedTuple):
    """A kind of files, and what reads it."""

    make: Callable[[Path], None]
    """Writes real files to a folder that does not exist yet."""
    read: Callable[[Path], Any]


def mutate(folder: Path, chance: random.Random) -> str:
    """Changes one file of a folder; returns what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file = chance.choice(files)
    kinds = ["flip", "cut", "extend", "zero", "remove", "link", "swap"]
    kind = chance.choice([*kinds, *["json"] * 12] if file.suffix == ".json" else kinds)
    data = bytearray(file.read_bytes())
    at = chance.randrange(len(data)) if data else 0
    if kind == "flip" and data:
        data[at] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "extend":
        data[at:at] = chance.randbytes(chance.choice([1, 8, 1000]))
    elif kind == "zero":
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    elif kind == "swap":
        data[:] = chance.choice(files).read_bytes()
    elif kind == "json":
        data[:] = _changed_json(bytes(data), chance)
    file.unlink()
    if kind == "link":
        outside = folder.parent / "outside"
        outside.write_bytes(data)
        file.symlink_to(outside)
    elif kind != "remove":
        file.write_bytes(data)
    return f"{kind} {file.relative_to(folder)} at {at}"


def _changed_json(data: bytes, chance: random.Random) -> bytes:
    """Replaces, removes or nests one value; the digest, if there is one, is made to fit."""
    if chance.random() < 0.05:
        return b"[" * 100_000
    record = json.loads(data)
    nodes = [(parent, key) for parent, key in _nodes(record) if key != "digest"]
    parent, key = chance.choice(nodes)
    value = chance.choice([*VALUES, "remove", chance.choice(nodes)[0]])
    if value == "remove":
        del parent[key]
    else:
        parent[key] = json.loads(json.dumps(value))
    if isinstance(record, dict) and "digest" in record:
        record.pop("digest")
        record["digest"] = digest_of(record)
    return json.dumps(record).encode()


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(min(len(value), 20)))
    found = [(value, key) for key in keys]
    return found + [node for key in keys for node in _nodes(value[key])]


def attempt(target: Target, pristine: Path, work: Path, seed: int) -> str:
    """Reads one mutation; returns "read", or the sentence. Any other error passes."""
    if work.exists():
        shutil.rmtree(work)
    work.mkdir()
    folder = work / "files"
    shutil.copytree(pristine, folder, symlinks=True)
    done = mutate(folder, random.Random(seed))
    outside = work / "outside"
    before = outside.read_bytes() if outside.exists() else b""
    try:
        target.read(folder)
        told = "read"
    except UserError as error:
        told = str(error)
    except BaseException as error:
        error.add_note(f"seed {seed}: {done}")
        raise
    after = outside.read_bytes() if outside.exists() else b""
    assert before == after, f"seed {seed}: {done}: wrote outside of the folder"
    assert set(os.listdir(work)) <= {"files", "outside"}, f"seed {seed}: {done}"
    assert told, f"seed {seed}: {done}: no sentence"
    return told


def _tree() -> dict[str, Any]:
    return {"weights": np.arange(6.0).reshape(2, 3), "key": jax.random.key(3), "step": 4}


def _make_checkpoint(folder: Path) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, _tree(), {"updates": 1})
    checkpoints.close()


def _make_run(folder: Path) -> None:
    settings = dataclasses.replace(QUIET, folder=str(folder))
    dovetail.train(a2c(num_envs=2), "dovetail:Chain-v0", Fused(), total_steps=16, settings=settings)


def _make_policy(folder: Path) -> None:
    _make_run(folder.parent / "run")
    shutil.move(folder.parent / "run" / "policy" / "last", folder)


def _read_policy(folder: Path) -> None:
    dovetail.load(folder).predict(np.zeros(5, np.float32))


def _make_files(*names: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        _make_run(folder.parent / "run")
        folder.mkdir()
        for name in names:
            shutil.copy(folder.parent / "run" / name, folder)

    return make


def _read_plan(folder: Path) -> None:
    run = Run(folder)
    assert isinstance(run.copies, dict)
    from_json(run._read_json("plan.json"))  # pyright: ignore[reportPrivateUsage]


def _make_dataset(folder: Path) -> None:
    _make_run(folder.parent / "run")
    dovetail.evaluate_run(folder.parent / "run", episodes=3, record=folder)


def _read_dataset(folder: Path) -> None:
    with Reader(folder) as reader:
        for episode in reader:
            assert len(episode.rewards) >= 0


def _service(folder: Path) -> ReplayService:
    table = HostTable(Table(Transitions(2), 40, Prioritized()), ROW, 2)
    return ReplayService(table, RateLimiter(2), durable=folder, grown=4000)


def _make_log(folder: Path) -> None:
    service = _service(folder)
    for seed in range(20):
        chance = np.random.default_rng(seed)
        observation = chance.random((3, 2, 2), np.float32)
        service.insert({"observation": observation, "reward": observation[..., 0]})
        service.sample(chance.random(4))
    service.close()


def _read_log(folder: Path) -> None:
    service = _service(folder)
    assert service.table.size <= 40
    service.close()


TARGETS: dict[str, Target] = {
    "checkpoint": Target(_make_checkpoint, lambda folder: Checkpoints(folder).restore(_tree())),
    "policy": Target(_make_policy, _read_policy),
    "plan": Target(_make_files("plan.json", "config.json"), _read_plan),
    "config": Target(_make_files("config.json"), lambda f: rebuild_all(Run.open(f).config)),
    "dataset": Target(_make_dataset, _read_dataset),
    "replay log": Target(_make_log, _read_log),
}
