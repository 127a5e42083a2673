"""The outputs of a run's metrics: CSV, TensorBoard, remote services and Prometheus."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.plan.ir import Plan
from dovetail.run.folder import Run
from dovetail.run.settings import Settings
from dovetail.telemetry.remote import PATIENCE, check_services, remote_sinks
from dovetail.telemetry.sinks import CsvSink, DamagedMetrics, MetricsWriter, Sink
from dovetail.telemetry.tensorboard import (
    TENSORBOARD_EXTRA,
    TensorBoardSink,
    check_tensorboard,
    has_tensorboard,
)
from dovetail.training.loop import Reached

if TYPE_CHECKING:
    from dovetail.telemetry.exporting import ExporterProcess

Tell = Callable[[str], None]


def check_sinks(settings: Settings) -> None:
    """Raises if an option needs a service or a package that is missing."""
    check_services(settings.log)
    for option in ("histograms", "log_video"):
        if getattr(settings, option):
            check_tensorboard(f"--{option.replace('_', '-')}")


def make_recorder(
    run: Run, config: dict[str, Any], settings: Settings, reached: Reached, tell: Tell
) -> MetricsWriter:
    """The metrics writer; a resumed run drops rows beyond `reached` and appends."""
    after = reached.env_steps if reached.updates > 0 else None
    csv = _csv(run.path / "metrics.csv", after, tell)
    sinks: list[Sink] = [csv]
    if has_tensorboard():
        sinks.append(TensorBoardSink(run.path / "events", after=after))
    else:
        tell(f"Nothing is written for TensorBoard: it needs {TENSORBOARD_EXTRA}.")
    remote = remote_sinks(settings.log, run, config, settings.project, tell)
    return MetricsWriter([*sinks, *remote], tell, patience=10.0 + PATIENCE * len(remote))


def _csv(path: Path, after: int | None, tell: Tell) -> CsvSink:
    """The sink of metrics.csv; a damaged file is put aside."""
    try:
        return CsvSink(path, append=after is not None, after=after)
    except DamagedMetrics as damaged:
        aside = path.with_name("metrics-damaged.csv")
        path.replace(aside)
        tell(f"{damaged} It is kept as {aside.name}, and metrics.csv begins anew.")
        return CsvSink(path)


def make_exporter(
    config: dict[str, Any], settings: Settings, plan: Plan, resumed: bool, tell: Tell
) -> "ExporterProcess | None":
    """The Prometheus exporter; None unless a port is set.

    A resumed run falls back to a free port if its port is taken, because the user did not choose
    the port for this start.
    """
    if settings.metrics_port is None:
        return None
    from dovetail.telemetry.exporting import ExporterProcess
    from dovetail.telemetry.prometheus import PortTaken

    host, port = settings.metrics_host, settings.metrics_port
    info = {name: str(config[name]) for name in ("algorithm", "strategy", "seed")}
    info["env"] = str(config["env_id"])
    try:
        exporter = ExporterProcess(host, port, info, plan.staleness, worker_nodes(plan), tell)
    except PortTaken:
        if not resumed:
            raise
        tell(f"Port {port} is taken, so metrics are served on another.")
        exporter = ExporterProcess(host, 0, info, plan.staleness, worker_nodes(plan), tell)
    tell(f"Metrics for Prometheus: {exporter.url}")
    return exporter


def worker_nodes(plan: Plan) -> dict[str, str]:
    """The node of every worker, by its name in reports; empty on one machine."""
    several = sum(process.learns for process in plan.processes) > 1
    return {
        f"{worker} of {process.rank}" if several else worker: process.node
        for process in plan.processes
        for worker in process.workers
    }
