"""Makes batches of a Gymnasium environment, in this process or in separate ones."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Semaphore
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode

from dovetail.envs.interface import SplitHostEnv
from dovetail.envs.names import missing_extra
from dovetail.envs.processes import PATIENCE, Build, ProcessVectorEnv, Seeding, sendable
from dovetail.envs.vector import VectorHost, autoreset_mode
from dovetail.errors import UserError, one_sentence

_EXTRAS = {"mujoco": "mujoco", "box2d": "box2d", "ale_py": "atari"}

HostFactory = Callable[[int], SplitHostEnv]
ProcessFactory = Callable[..., SplitHostEnv]
"""Called as (num_envs, bell=None, first=0, patience=30): see `Env.process`."""


@dataclass(frozen=True)
class Batches:
    """Makes batches of any size."""

    build: Build
    env_id: str
    threshold: float | None = None
    seeding: Seeding | None = None
    threads: bool = False
    autoreset: AutoresetMode | None = None
    """The requested autoreset mode, which the environment may not support."""
    patience: float | None = None
    """Seconds that a step in a process may take, if the id sets it."""

    def here(self, num_envs: int, info: tuple[str, ...] = ()) -> VectorHost:
        """A batch in this process; `info` are keys to report."""
        venv = created(partial(self.build, num_envs), self.env_id)
        found = autoreset_mode(venv, self.env_id)
        if self.autoreset is not None and found != self.autoreset:
            venv.close()
            raise UserError(
                f"{self.env_id} resets by {found.name.lower()} when its vector entry point steps "
                f"it: use vectorization=sync with autoreset={self.autoreset.name.lower()}."
            )
        return VectorHost(
            venv, self.env_id, self.threshold, self.seeding, threads=self.threads, info=info
        )

    def apart(
        self,
        num_envs: int,
        bell: Semaphore | None = None,
        first: int = 0,
        patience: float = PATIENCE,
        *,
        processes: int = 1,
        info: tuple[str, ...] = (),
    ) -> VectorHost:
        """A batch in a separate process, or split among several; `info` are keys to report."""
        venv = ProcessVectorEnv(
            self.build,
            num_envs,
            self.env_id,
            processes=processes,
            seeding=self.seeding,
            bell=bell,
            first=first,
            patience=self.patience or patience,
            info=info,
        )
        try:
            return VectorHost(
                venv, self.env_id, self.threshold, threads=self.threads, first=first, info=info
            )
        except BaseException:
            venv.close()
            raise

    def process(self) -> ProcessFactory | None:
        """`apart`, or None if native threads make it unnecessary or pickling fails."""
        return self.apart if not self.threads and sendable(self.build) else None


def created(build: Callable[[], Any], env_id: str) -> Any:
    """The result of `build`; any exception becomes a `UserError`."""
    try:
        return build()
    except UserError:
        raise
    except gymnasium.error.DependencyNotInstalled as error:
        text = str(error)
        extra = next((extra for part, extra in _EXTRAS.items() if part in text.lower()), None)
        if extra is None:
            raise UserError(f"{env_id} needs a package that is not installed: {text}") from error
        raise missing_extra(env_id, extra, extra) from error
    except Exception as error:
        raise UserError(f"{env_id} could not be made: {one_sentence(error)}") from error
