"""Shows a run's policy in its environment."""

from pathlib import Path
from typing import Any

from dovetail.errors import UserError
from dovetail.evaluation.kept import Which
from dovetail.evaluation.load import load
from dovetail.evaluation.trained import find_environment
from dovetail.run.folder import Run
from dovetail.telemetry.video import record_video, show_window
from dovetail.training.config import rebuild_strategy
from dovetail.training.trust import code_of, refuse_untrusted

WATCH_SEED = 1_000_003
"""The default seed for watching; differs from those of training and evaluation."""


def watch(
    run: Run | str | Path,
    out: str | Path | None = None,
    window: bool = False,
    seed: int = WATCH_SEED,
    env: Any = None,
    *,
    which: Which | None = None,
    algorithm: type | str | None = None,
    trust: bool = False,
) -> Path | None:
    """Records a video of a run's policy and returns its path; with `window`, shows it in a window
    and returns None.

    It is the best policy, or the last if none was evaluated; `which` is "best", "last" or the
    number of a checkpoint. `env` and `algorithm` are needed if the run's own are no longer found.
    `trust` allows the code that the run's config names, if it was made elsewhere.
    """
    opened = run if isinstance(run, Run) else Run.open(run)
    refuse_untrusted(code_of(opened.config, env is None, algorithm is None), trust)
    found = find_environment(opened, rebuild_strategy(opened.config), env)
    policy = load(opened, which, algorithm=algorithm, trust=trust)
    if window:
        show_window(found, policy.predict, seed)
        return None
    target = Path(out) if out is not None else opened.path / "video.mp4"
    video = record_video(found, policy.predict, target, seed=seed)
    if video.path is None:
        raise UserError(video.reason or f"There is no video of {found.spec.id}.")
    return video.path
