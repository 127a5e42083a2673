"""Logs a run to MLflow (extra `mlflow`), in the experiment `--project`.

MLFLOW_TRACKING_URI names the server. Without it, the data go to a database in the run's folder;
show it with `mlflow ui --backend-store-uri sqlite:///RUN/mlflow/mlflow.db`.
"""

import logging
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.telemetry.remote import flat, kept_id

LONGEST = 500
"""Maximum number of characters in a parameter's value that every version of MLflow accepts."""


class MlflowSink:
    """Logs scalars, with environment steps as MLflow's step."""

    def __init__(self, folder: Path, config: Mapping[str, Any], project: str) -> None:
        self._folder, self._config, self._project = folder, config, project
        self._client: Any = None
        self._run = ""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Logs one row; the first call imports MLflow and opens the run."""
        if not self._run:
            self._open()
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        rows = [
            Metric(_plain(name), value, now, step)
            for name, value in scalars.items()
            if not math.isnan(value)
        ]
        self._client.log_batch(self._run, metrics=rows)

    def close(self) -> None:
        """Marks the run as finished."""
        if self._run:
            self._client.set_terminated(self._run)

    def _open(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        own = self._folder / "mlflow"
        own.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        client = MlflowClient(tracking_uri=uri or f"sqlite:///{own.resolve() / 'mlflow.db'}")
        found = client.get_experiment_by_name(self._project)
        if found is None:
            place = None if uri else str(own.resolve() / "artifacts")
            experiment = client.create_experiment(self._project, artifact_location=place)
        else:
            experiment = found.experiment_id
        self._client = client
        self._run = kept_id(own / "run-id", lambda: self._create(experiment))
        client.update_run(self._run, status="RUNNING")

    def _create(self, experiment: str) -> str:
        from mlflow.entities import Param

        run = self._client.create_run(experiment, run_name=self._folder.name).info.run_id
        told = {_plain(name): str(value)[:LONGEST] for name, value in flat(self._config).items()}
        params = [Param(name, value) for name, value in told.items()]
        for first in range(0, len(params), 100):  # MLflow's limit per request
            self._client.log_batch(run, params=params[first : first + 100])
        return run


def _plain(name: str) -> str:
    """Replaces characters that MLflow does not allow in names."""
    return re.sub(r"[^\w\-. /]", "_", name)[:250]
