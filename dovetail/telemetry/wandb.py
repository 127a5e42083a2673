"""Logs a run to Weights & Biases (extra `wandb`).

WANDB_MODE selects online or offline. Without it and without an API key, the run is stored offline
and can be uploaded later. All files are written to the run's folder.
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
        """Logs one row; the first call imports W&B and opens the run."""
        if self._run is None:
            self._run = self._open()
        known = {name: value for name, value in scalars.items() if not math.isnan(value)}
        self._run.log({**known, "env_steps": step})

    def close(self) -> None:
        """Sends the remaining data."""
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
    """Makes W&B's process cache in `folder` and disables its error reporting."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {"WANDB_CACHE_DIR": str(folder / "cache"), "WANDB_ERROR_REPORTING": "false"}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
