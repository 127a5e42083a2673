"""Sinks for external services, W&B and MLflow, each an optional extra.

Each has its own thread, so that a slow network delays neither training nor the run's files. A
resumed run continues the same remote run, whose id is stored in the run's folder.
"""

import importlib.util
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dovetail.errors import UserError, nearest
from dovetail.run.folder import Run
from dovetail.telemetry.sinks import MetricsWriter, Sink

SERVICES = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""The services of `--log`, which are names of extras, and the packages that each needs."""
PATIENCE = 60.0
"""Time limit for a service to send its remaining data at the end of a run, in seconds."""

Tell = Callable[[str], None]


class ThreadedSink:
    """Wraps a sink with its own writer thread."""

    def __init__(self, sink: Sink, tell: Tell) -> None:
        self._recorder = MetricsWriter([sink], tell, patience=PATIENCE)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Queues the scalars; never blocks."""
        self._recorder.record(step, scalars)

    def close(self) -> None:
        """Waits until everything is written, at most `PATIENCE` seconds."""
        self._recorder.close()


def check_services(names: tuple[str, ...]) -> None:
    """Raises if a service is unknown or its packages are missing."""
    for name in names:
        if name not in SERVICES:
            raise UserError(f"--log has no {name!r}: {nearest(name, SERVICES)}")
        for package in SERVICES[name]:
            if importlib.util.find_spec(package) is None:
                raise UserError(
                    f"--log {name} needs the package {package}: install the extra, "
                    f"pip install 'dovetail[{name}]'."
                )


def remote_sinks(
    names: tuple[str, ...], run: Run, config: Mapping[str, Any], project: str, tell: Tell
) -> list[Sink]:
    """Creates the sinks of these services; they also log `config`."""
    # The packages themselves are imported at the first write, in the sink's thread.
    from dovetail.telemetry.mlflow import MlflowSink
    from dovetail.telemetry.wandb import WandbSink

    check_services(names)
    made: dict[str, Callable[[], Sink]] = {
        "wandb": lambda: WandbSink(run.path, config, project, tell),
        "mlflow": lambda: MlflowSink(run.path, config, project),
    }
    return [ThreadedSink(made[name](), tell) for name in names]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested options to keys like `options.learning_rate`."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def kept_id(file: Path, make: Callable[[], str] = lambda: uuid.uuid4().hex[:12]) -> str:
    """The id of the remote run: read from `file`, or made and stored there at the first start."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(make(), encoding="utf-8")
    return file.read_text(encoding="utf-8")
