"""A dataset's metadata: Minari's `data/metadata.json`, with a section for Dovetail.

It is written last: a folder that has data but no metadata is half-written.
"""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.data.episode import LOG_PROBABILITY, SAMPLED_ACTION, VERSION, Source
from dovetail.data.spaces import Column, Space, columns, from_json, is_image, leaves, to_json
from dovetail.errors import UserError
from dovetail.run.folder import write_atomically

FORMAT = 1
"""Incremented whenever an older Dovetail could no longer read the data."""
MINARI = "0.5.4"
"""The Minari version whose layout is written."""
HDF5, TABLE = "hdf5", "dovetail-parquet"
"""Values of `data_format`: Minari's layout, or tables in Parquet."""
FILE = "metadata.json"
JOURNAL = "recording.part"
"""The file a recording writes to until it is closed."""
INFOS = (LOG_PROBABILITY, VERSION, SAMPLED_ACTION)
"""Optional values of every step."""


@dataclass(frozen=True)
class Metadata:
    """The contents of a dataset."""

    observation: Space
    action: Space
    environment: str = ""
    """The environment's id; empty if unknown."""
    env_spec: str | None = None
    """Gymnasium's description of the environment, as JSON."""
    sources: tuple[Source, ...] = ()
    infos: tuple[str, ...] = (VERSION,)
    """Which of `log_probability`, `version`, `sampled_action` every episode has."""
    data_format: str = HDF5
    episodes: int = 0
    steps: int = 0
    jpeg: bool = False
    """Whether images are stored as JPEG, as Minari does."""
    size: int | None = None
    """Bytes of the data file; None if Dovetail did not write it."""
    files: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes of each file of a Parquet dataset."""

    @property
    def observation_columns(self) -> list[Column]:
        """The columns with one more row than an episode has steps."""
        return list(columns(self.observation, "observations"))

    @property
    def step_columns(self) -> list[Column]:
        """The columns with a row per step."""
        actions = list(columns(self.action, "actions"))
        plain = {"rewards": np.float32, "terminations": np.bool_, "truncations": np.bool_}
        found = [*actions, *(Column(name, np.dtype(kind), ()) for name, kind in plain.items())]
        known: dict[str, tuple[Any, tuple[int, ...]]] = {
            LOG_PROBABILITY: (np.float32, ()),
            VERSION: (np.int32, ()),
            SAMPLED_ACTION: (np.float32, (sum(_size(column) for column in actions),)),
        }
        for name in self.infos:
            kind, shape = known[name]
            found.append(Column(f"infos/{name}", np.dtype(kind), shape))
        return found

    @property
    def columns(self) -> list[Column]:
        """All columns, in the order they are written."""
        return self.observation_columns + self.step_columns

    @property
    def row_bytes(self) -> int:
        """Bytes of one step."""
        return sum(column.row_bytes for column in self.columns)

    def described(self, dataset_id: str) -> dict[str, Any]:
        """The contents of `metadata.json`."""
        known = {"env_spec": self.env_spec} if self.env_spec is not None else {}
        return known | {
            "dataset_id": dataset_id,
            "minari_version": MINARI,
            "data_format": self.data_format,
            "jpeg_encoding": self.jpeg,
            "observation_space": json.dumps(to_json(self.observation)),
            "action_space": json.dumps(to_json(self.action)),
            "total_episodes": self.episodes,
            "total_steps": self.steps,
            "dataset_size": round((self.size or sum(self.files.values())) / 1e6, 1),
            "algorithm_name": ", ".join(
                sorted({source.algorithm for source in self.sources if source.algorithm})
            ),
            "dovetail": {
                "format": FORMAT,
                "environment": self.environment,
                "sources": [asdict(source) for source in self.sources],
                "infos": list(self.infos),
                "size": self.size,
                "files": self.files,
                "episodes": self.episodes,
            },
        }

    def write(self, folder: Path) -> None:
        """Writes `data/metadata.json` of the dataset `folder`."""
        text = json.dumps(self.described(dataset_id(folder)), indent=1)
        write_atomically(folder / "data" / FILE, text)


def read_metadata(folder: Path) -> Metadata:
    """The metadata of the dataset `folder`; raises if anything is wrong with it."""
    place = folder / "data" / FILE
    _refuse_missing(folder, place)
    try:
        record = json.loads(place.read_text(encoding="utf-8"))
        return _parsed(record, place)
    except UserError:
        raise
    except Exception as error:  # also Gymnasium's, for an invalid space
        raise UserError(
            f"{place} is damaged ({type(error).__name__}: {' '.join(str(error).split())}): take it "
            "from a copy of the dataset."
        ) from error


def _refuse_missing(folder: Path, place: Path) -> None:
    if (folder / JOURNAL).exists():
        raise UserError(
            f"{folder} is half-written: its recording was not closed ({folder / JOURNAL} is still "
            f"there). Finish it with: dovetail data repair {folder}"
        )
    if not folder.is_dir():
        raise UserError(f"There is no dataset {folder}: give the folder of a dataset.")
    if not place.exists() and any((folder / "data").glob("*.part")):
        raise UserError(
            f"{folder} is half-written: what made it was interrupted. Remove it and make it again."
        )
    if not place.exists():
        inner = folder / FILE
        hint = f"give {folder.parent} instead" if inner.exists() else "give a dataset's folder"
        raise UserError(f"{folder} is no dataset, it has no data/{FILE}: {hint}.")


def _parsed(record: dict[str, Any], place: Path) -> Metadata:
    own: dict[str, Any] = record.get("dovetail", {})
    if own.get("format", FORMAT) != FORMAT:
        raise UserError(
            f"{place} has format {own['format']}, but this Dovetail reads format {FORMAT}: use the "
            "Dovetail that wrote it."
        )
    if record["data_format"] not in (HDF5, TABLE):
        raise UserError(
            f"{place.parent.parent} is in Minari's format {record['data_format']!r}, which is not "
            "read here: write it as hdf5 with Minari first."
        )
    infos = tuple(own.get("infos", ()))
    if strange := [name for name in infos if name not in INFOS]:
        raise UserError(
            f"{place} says that every step has {strange[0]!r}, which this Dovetail does not know: "
            "use the Dovetail that wrote it, or take it from a copy of the dataset."
        )
    observation, action = _spaces(record, place)
    size = own.get("size")
    fresh = own.get("episodes") == record["total_episodes"]  # else Minari has appended to it
    spec = record.get("env_spec")
    environment = own.get("environment") or _environment(spec)
    sources = tuple(Source(**source) for source in own.get("sources", []))
    return Metadata(
        observation=observation,
        action=action,
        environment=environment,
        env_spec=spec,
        sources=sources or (Source(environment, algorithm=record.get("algorithm_name")),),
        infos=infos,
        data_format=record["data_format"],
        episodes=int(record["total_episodes"]),
        steps=int(record["total_steps"]),
        jpeg=bool(record.get("jpeg_encoding", True)),
        size=int(size) if fresh and size is not None else None,
        files={name: int(count) for name, count in own.get("files", {}).items()},
    )


def _spaces(record: dict[str, Any], place: Path) -> tuple[Space, Space]:
    if "observation_space" in record and "action_space" in record:
        try:
            observation, action = (
                from_json(json.loads(record[name]))
                for name in ("observation_space", "action_space")
            )
        except UserError as error:
            raise UserError(f"{place}: {error}") from error
        return observation, action
    try:  # Minari may omit them in favor of the environment's
        import gymnasium

        # Of the stored spec only the id and the options: its entry point may be anyone's code.
        spec = json.loads(record["env_spec"])
        if spec["id"] not in gymnasium.registry:
            raise ValueError(f"{spec['id']} is not registered")
        env = gymnasium.make(spec["id"], **spec.get("kwargs", {}))
    except Exception as error:
        raise UserError(
            f"{place} names no spaces, and its environment cannot be made ({error}): install what "
            "the environment needs."
        ) from error
    with env:
        return env.observation_space, env.action_space


def _environment(spec: str | None) -> str:
    return f"gymnasium:{json.loads(spec)['id']}" if spec else ""


def _size(column: Column) -> int:
    return column.row_bytes // column.dtype.itemsize


def dataset_id(folder: Path) -> str:
    """The folder's name as a Minari id, with a version: "mixed" becomes "mixed-v0"."""
    name = re.sub(r"[^-_\w]+", "-", folder.resolve().name).strip("-") or "dataset"
    return name if re.search(r"-v\d+$", name) else f"{name}-v0"


def images(metadata: Metadata) -> set[str]:
    """The columns that are stored as JPEG."""
    if not metadata.jpeg:
        return set()
    both = [*leaves(metadata.observation, "observations"), *leaves(metadata.action, "actions")]
    return {path for path, space in both if is_image(space)}
