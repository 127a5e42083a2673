"""Weights & Biases, the extra `wandb`: a run there for every run here.

WANDB_MODE says whether it goes to the network; without it, and without a key, the run is kept
offline and can be sent later. Everything that is written lies in the run's own folder.
"""

import contextlib
import math
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from dovetail.telemetry.remote import Tell, kept_id


class WandbSink:
    """Logs scalars against environment steps."""

    def __init__(self, folder: Path, config: Mapping[str, Any], project: str, tell: Tell) -> None:
        self._folder, self._config, self._project = folder, config, project
        self._tell = tell
        self._run: Any = None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Logs one row; the first one opens the run, import included."""
        if self._run is None:
            self._run = self._open()
        known = {name: value for name, value in scalars.items() if not math.isnan(value)}
        self._run.log({**known, "env_steps": step})

    def close(self) -> None:
        """Sends what is left."""
        if self._run is not None:
            self._run.finish()

    def _open(self) -> Any:
        with _within(self._folder / "wandb"):
            import wandb

            mode = os.environ.get("WANDB_MODE")
            if mode is None and not wandb.login(prompt=False):
                mode = "offline"
                self._tell(
                    f"W&B knows no key, so the run is kept offline: send it later with wandb sync "
                    f"{self._folder / 'wandb'}/offline-run-*"
                )
            run = wandb.init(
                project=self._project,
                name=self._folder.name,
                id=kept_id(self._folder / "wandb" / "run-id"),
                resume="allow",
                dir=str(self._folder),
                config=dict(self._config),
                mode=mode,  # pyright: ignore[reportArgumentType]
                settings=wandb.Settings(silent=True, console="off", disable_git=True),
            )
        run.define_metric("*", step_metric="env_steps")
        return run


@contextlib.contextmanager
def _within(folder: Path) -> Generator[None]:
    """Has W&B's process keep its logs in `folder`, and report its own errors to nobody."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {"WANDB_CACHE_DIR": str(folder / "cache"), "WANDB_ERROR_REPORTING": "false"}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
