"""Measurement and output of runs: spans, metrics, progress display, plots and videos."""

from dovetail.telemetry.progress import Progress, make_progress
from dovetail.telemetry.sinks import CsvSink, MetricsWriter, Sink
from dovetail.telemetry.tensorboard import TensorBoardSink

__all__ = ["CsvSink", "MetricsWriter", "Progress", "Sink", "TensorBoardSink", "make_progress"]
