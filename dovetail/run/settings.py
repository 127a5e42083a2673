"""How a run is watched and kept: nothing here changes what is computed."""

from dataclasses import dataclass
from typing import Literal

from dovetail.errors import UserError, check_option


@dataclass(frozen=True)
class Settings:
    """Options of `train` that no algorithm and no strategy knows."""

    folder: str | None = None
    """The run's folder; by default a new one under runs/."""
    seeds: int = 1
    """How many seeds to train at once, as one batch (Fused only): seed, seed + 1, …"""
    until: float | None = None
    """Stop once the mean greedy return over the evaluation's episodes reaches this."""
    episodes: int = 100
    """Episodes per evaluation."""
    evaluate_every: float = 10.0
    """Seconds between evaluations; they run beside training. 0 for only one, at the end."""
    checkpoint_every: float = 30.0
    """Seconds between checkpoints; there is always one at the end."""
    record: str | None = None
    """Folder of a new dataset of all that is lived through; none unless given."""
    patience: float = 30.0
    """Seconds after which a worker that does not get on counts as hung, and is named."""
    keep: int = 3
    """How many checkpoints are kept."""
    video: bool = True
    """Whether the run ends with a video of the trained agent."""
    display: Literal["live", "plain", "none"] = "live"
    """A live panel, plain lines, or nothing, on standard error."""
    metrics_port: int | None = None
    """Port on this machine for Prometheus' /metrics; 0 for any free one; none unless given."""
    metrics_host: str = "127.0.0.1"
    """Address that /metrics is served on; only this machine can reach the default."""
    log: tuple[str, ...] = ()
    """Services that get the metrics too: wandb, mlflow, or both, comma-separated."""
    project: str = "dovetail"
    """W&B's project, or MLflow's experiment, that the run belongs to."""
    histograms: bool = False
    """Whether TensorBoard gets histograms of the weights, at every evaluation and at the end."""
    log_video: bool = False
    """Whether TensorBoard gets a moving picture of the trained agent, at the end."""

    def __post_init__(self) -> None:
        for name in ("seeds", "episodes", "keep"):
            check_option(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")
        for name in ("evaluate_every", "checkpoint_every"):
            check_option(name, getattr(self, name), getattr(self, name) >= 0, "0 or more seconds")
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
        if self.until is not None and self.evaluate_every == 0:
            raise UserError(
                f"--until {self.until:g} is looked for by evaluations, but --evaluate-every is 0: "
                f"give more seconds, or leave one out."
            )
        if self.until is not None and self.seeds > 1:
            raise UserError(
                f"--until stops one training, but --seeds asks for {self.seeds}: leave one out."
            )
