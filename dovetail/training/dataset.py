"""The recorded data of a run: checks that they fit and feeds them to the learner."""

import hashlib
from pathlib import Path
from typing import Any

from dovetail.algorithm import Algorithm, Task
from dovetail.data.metadata import FILE
from dovetail.data.reader import Reader, check_fits
from dovetail.data.rounds import Feed, Rounds
from dovetail.envs.interface import EnvSpec
from dovetail.envs.resolve import Env, resolve
from dovetail.errors import UserError, check_option
from dovetail.replay.data import DataSpec
from dovetail.training.trust import code_of_env, untrusted

MEMORY = 2_000
"""Default limit of recorded data in memory, in megabytes."""
MEGABYTE = 1_000_000


class RecordedData:
    """The dataset from which a run learns. Close it: it holds open files."""

    def __init__(self, folder: str | Path, memory: int = MEMORY) -> None:
        """`memory` is a limit in megabytes; a larger dataset is read in rounds."""
        check_option("data_memory", memory, memory >= 1, "1 megabyte or more")
        self.reader = Reader(folder)
        self.memory = memory
        self._rounds: Rounds | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """The fingerprint stored in the run's config, by which a resumed run recognizes it."""
        folder = self.reader.folder.resolve()
        record = (folder / "data" / FILE).read_bytes()
        return {
            "folder": str(folder),
            "steps": self.reader.num_steps,
            "episodes": self.reader.num_episodes,
            "digest": hashlib.sha256(record).hexdigest(),
            "memory": self.memory,
        }

    def refuse_other(self, known: dict[str, Any]) -> None:
        """Raises if the dataset differs from the one with which the run began (`known`)."""
        found = self.identity
        for name, what in (("steps", "steps"), ("episodes", "episodes")):
            if found[name] != known[name]:
                raise UserError(
                    f"The dataset {self.reader.folder} has {found[name]:,} {what}, but had "
                    f"{known[name]:,} when the run began: bring it back as it was, or train a new "
                    "run."
                )
        if found["digest"] != known["digest"]:
            raise UserError(
                f"The dataset {self.reader.folder} has changed since the run began (its {FILE} is "
                "another): bring it back as it was, or train a new run."
            )

    def environment(self) -> tuple[Any, str | None]:
        """Returns (environment that the dataset names, None), or (placeholder, reason why none)."""
        name = self.reader.metadata.environment
        if not name:
            return Env(self.reader.spec, None, None), "the dataset names no environment"
        try:
            why = untrusted(code_of_env(name))
            if why is not None:
                return Env(self.reader.spec, None, None), f"{self.reader.folder} {why}"
            resolve(name)
        except UserError as error:
            return Env(self.reader.spec, None, None), str(error).rstrip(".")
        return name, None

    def prepare(self, algorithm: Algorithm, spec: EnvSpec, seed: int) -> DataSpec:
        """Checks the data against `spec`; returns the space that they take on the device."""
        check_fits(self.reader, spec)
        bound = algorithm.bind(Task(spec, 1, 1))
        self._rounds = Rounds(
            self.reader,
            bound.recorded_row,
            window=bound.recorded_window,
            memory=self.memory * MEGABYTE,
            seed=seed,
        )
        return self._rounds.spec

    def check(self) -> None:
        """Reads all prepared data and raises on invalid values.

        A dataset that fits in memory stays there and is not read again.
        """
        assert self._rounds is not None
        self._rounds.check()

    def feed(self, algorithm: Algorithm) -> Feed:
        """The source of recorded steps for a bound algorithm."""
        assert self._rounds is not None
        return Feed(self._rounds, algorithm.recorded_draws_each)

    @property
    def streamed(self) -> bool:
        """Whether it is read in rounds because it exceeds the memory limit."""
        return self._rounds is not None and self._rounds.count > 1

    def close(self) -> None:
        """Releases the files; safe to call twice."""
        self.reader.close()


def check_data(algorithm: Algorithm, given: bool) -> None:
    """Raises if data are given to an algorithm that cannot use them, or missing for one that must.

    `given` says whether the user named a dataset.
    """
    name = type(algorithm).__name__
    if given and not algorithm.takes_data:
        raise UserError(
            f"{name} learns only from what it does itself, not from recorded data: leave --data "
            "out, or choose an algorithm that does, as iql, td3-bc, sac or dqn."
        )
    if not given and algorithm.needs_data:
        raise UserError(
            f"{name} learns from recorded data: give the folder of a dataset with --data (see "
            "`dovetail data --help`)."
        )
