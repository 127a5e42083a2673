"""Sinks of other people's services, W&B and MLflow: each behind an extra of its own.

Each has a thread of its own, so that what waits for a network holds up neither the training nor
the run's own files. A resumed run goes on in the same remote run, whose id is kept in its folder.
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
"""What `--log` takes: the extra, and the packages that it brings."""
PATIENCE = 60.0
"""Seconds at the end of a run in which a service may take what is still to be sent."""

Tell = Callable[[str], None]


class ThreadedSink:
    """A sink with a thread of its own."""

    def __init__(self, sink: Sink, tell: Tell) -> None:
        self._recorder = MetricsWriter([sink], tell, patience=PATIENCE)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Hands over, and never waits."""
        self._recorder.record(step, scalars)

    def close(self) -> None:
        """Waits, with a limit, until everything is written."""
        self._recorder.close()


def check_services(names: tuple[str, ...]) -> None:
    """Refuses services that are unknown or whose packages are missing."""
    for name in names:
        if name not in SERVICES:
            raise UserError(f"--log has no {name!r}: {nearest(name, SERVICES)}.")
        for package in SERVICES[name]:
            if importlib.util.find_spec(package) is None:
                raise UserError(
                    f"--log {name} needs the package {package}: install the extra, "
                    f"pip install 'dovetail[{name}]'."
                )


def remote_sinks(
    names: tuple[str, ...], run: Run, config: Mapping[str, Any], project: str, tell: Tell
) -> list[Sink]:
    """The sinks of these services, which send `config` along."""
    from dovetail.telemetry.mlflow import MlflowSink
    from dovetail.telemetry.wandb import WandbSink

    check_services(names)
    made: dict[str, Callable[[], Sink]] = {
        "wandb": lambda: WandbSink(run.path, config, project, tell),
        "mlflow": lambda: MlflowSink(run.path, config, project),
    }
    return [ThreadedSink(made[name](), tell) for name in names]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options as one level, `options.learning_rate`."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def kept_id(file: Path, make: Callable[[], str] = lambda: uuid.uuid4().hex[:12]) -> str:
    """The id of a remote run: that of an earlier start, or a new one."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(make(), encoding="utf-8")
    return file.read_text(encoding="utf-8")
