"""Settings of a run's evaluation, checkpoints and logging; none affects the computed results."""

from dataclasses import dataclass
from typing import Literal

from dovetail.errors import UserError, check_option
from dovetail.run.interval import Interval


@dataclass(frozen=True)
class Settings:
    """Options of `train` that are independent of the algorithm and the strategy."""

    folder: str | None = None
    """Folder of the run; a new one under runs/ unless given."""
    seeds: int = 1
    """Number of seeds to train at once, as one batch (Fused only): seed, seed + 1, …"""
    until: float | None = None
    """Stop once the mean greedy return of an evaluation reaches this value."""
    episodes: int = 100
    """Number of episodes per evaluation."""
    evaluate_every: float | str = 10.0
    """Seconds between evaluations, which run in the background, or environment steps, as
    10000steps, for which training waits; 0 for a final evaluation only."""
    checkpoint_every: float | str = 30.0
    """Seconds between checkpoints, or environment steps, as 10000steps; a final one is always
    written."""
    record: str | None = None
    """Folder for a new dataset of all steps of the run; nothing is recorded unless given."""
    patience: float = 30.0
    """Seconds without progress after which a worker is reported as hung."""
    keep: int = 3
    """Number of checkpoints to keep."""
    video: bool = True
    """Whether to record a video of the trained agent at the end."""
    display: Literal["live", "plain", "none"] = "live"
    """Progress on standard error: a live panel, plain lines, or none."""
    metrics_port: int | None = None
    """Port for Prometheus' /metrics; 0 for any free port; not served unless given."""
    metrics_host: str = "127.0.0.1"
    """Address on which /metrics is served; the default is reachable from this machine only."""
    log: tuple[str, ...] = ()
    """Services that also receive the metrics: wandb, mlflow, or both, comma-separated."""
    project: str = "dovetail"
    """W&B project or MLflow experiment of the run."""
    histograms: bool = False
    """Whether to log weight histograms to TensorBoard, at each evaluation and at the end."""
    log_info: tuple[str, ...] = ()
    """Keys of the environment's info to log as metrics, comma-separated: info_KEY is the mean over
    steps, info_KEY_final that over the last steps of episodes."""
    log_video: bool = False
    """Whether to log an animation of the trained agent to TensorBoard, at the end."""

    @property
    def evaluation_interval(self) -> Interval:
        """The interval between evaluations."""
        return Interval.of(self.evaluate_every, "evaluate_every")

    @property
    def checkpoint_interval(self) -> Interval:
        """The interval between checkpoints."""
        return Interval.of(self.checkpoint_every, "checkpoint_every")

    def __post_init__(self) -> None:
        for name in ("seeds", "episodes", "keep"):
            check_option(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")
        for name in ("evaluate_every", "checkpoint_every"):
            Interval.of(getattr(self, name), name)
        check_option("patience", self.patience, self.patience > 0, "more than 0 seconds")
        known = ("live", "plain", "none")
        check_option("display", self.display, self.display in known, "live, plain or none")
        port = self.metrics_port
        is_port = port is None or 0 <= port <= 65535
        check_option("metrics_port", port, is_port, "a port from 1 to 65535, or 0 for a free one")
        check_option("project", self.project, bool(self.project.strip()), "a name")
        if self.record is not None and self.seeds > 1:
            raise UserError(
                f"--record takes what one training lives through, but --seeds asks for "
                f"{self.seeds}: leave one out."
            )
        if self.log_video and not self.video:
            raise UserError("--log-video shows the video of the end: leave out --no-video.")
        if self.until is not None and self.evaluation_interval.is_zero:
            raise UserError(
                f"--until {self.until:g} is looked for by evaluations, but --evaluate-every is 0: "
                f"give more, or leave one out."
            )
        if self.until is not None and self.seeds > 1:
            raise UserError(
                f"--until stops one training, but --seeds asks for {self.seeds}: leave one out."
            )
