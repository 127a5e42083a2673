"""TensorBoard (extra `tensorboard`): writes scalars, histograms and animations to an event file."""

import importlib.util
import math
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.errors import UserError

if TYPE_CHECKING:
    from tensorboardX.record_writer import RecordWriter

TAGS = {
    "episode_return": ("charts/episodic_return", "rollout/ep_rew_mean"),
    "episode_length": ("charts/episodic_length", "rollout/ep_len_mean"),
    "steps_per_s": ("charts/SPS", "time/fps"),
    "eval_return": ("charts/eval_return", "eval/mean_reward"),
    "learning_rate": ("charts/learning_rate",),
    "loss": ("losses/loss",),
    "policy_loss": ("losses/policy_loss",),
    "value_loss": ("losses/value_loss",),
    "entropy": ("losses/entropy",),
    "approx_kl": ("losses/approx_kl",),
    "clip_fraction": ("losses/clipfrac",),
    "explained_variance": ("losses/explained_variance",),
    "time_s": ("time/time_elapsed",),
    "updates": ("time/updates",),
    "episodes": ("time/episodes",),
}
"""TensorBoard names of our scalars: CleanRL's first, then Stable-Baselines3's."""
TENSORBOARD_EXTRA = "pip install 'dovetail[tensorboard]'"
"""The command that installs what writing event files needs."""


def has_tensorboard() -> bool:
    """Whether event files can be written."""
    return importlib.util.find_spec("tensorboardX") is not None


def check_tensorboard(option: str) -> None:
    """Raises if event files cannot be written, for an `option` that needs them."""
    if not has_tensorboard():
        raise UserError(f"{option} writes for TensorBoard, which needs {TENSORBOARD_EXTRA}.")


def tags(name: str) -> tuple[str, ...]:
    """A scalar's names in TensorBoard; `episode_return/seed3` keeps its seed as a suffix."""
    metric, slash, rest = name.partition("/")
    if metric in TAGS:
        return tuple(tag + slash + rest for tag in TAGS[metric])
    if metric.startswith("share_"):
        return (f"time/{name}",)
    if metric.startswith("info_"):
        return (f"info/{name.removeprefix('info_')}",)
    return (f"losses/{name}" if metric.endswith("_loss") else f"train/{name}",)


class TensorBoardSink:
    """Writes an event file for TensorBoard, with the tag names of other libraries."""

    flush_every = 2.0
    """Seconds between two flushes to disk."""

    def __init__(self, folder: str | Path, after: int | None = None) -> None:
        """`after` is the step of a resumed run; TensorBoard then discards later events."""
        self._folder = Path(folder)
        self._after = after
        self._writer: RecordWriter | None = None
        self._flushed = 0.0

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds one event with all scalars."""
        values = [
            {"tag": tag, "simple_value": value}
            for name, value in scalars.items()
            if name != "env_steps" and not math.isnan(value)
            for tag in tags(name)
        ]
        self._add(step, values)

    def write_arrays(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Adds a histogram of each array."""
        self._add(
            step,
            [
                {"tag": f"weights/{name}", "histo": _histogram(array)}
                for name, array in arrays.items()
                if array.size and np.isfinite(array).all()
            ],
        )

    def write_gif(self, step: int, gif: bytes) -> None:
        """Adds an animation; its size is read from the GIF's header."""
        # Bytes 6 to 9 of a GIF: its logical screen size.
        width, height = struct.unpack("<HH", gif[6:10])
        picture = {"height": height, "width": width, "colorspace": 3, "encoded_image_string": gif}
        self._add(step, [{"tag": "video", "image": picture}])

    def _add(self, step: int, values: list[dict[str, Any]]) -> None:
        writer = self._writer or self._open()
        writer.write(_event(step=step, summary={"value": values}))
        if time.monotonic() - self._flushed > self.flush_every:
            self._flushed = time.monotonic()
            writer.flush()

    def close(self) -> None:
        """Flushes and closes the event file."""
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> "RecordWriter":
        """Opens the event file at the first write, so that the writer thread does the import."""
        from tensorboardX.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{time.time_ns()}"
        self._writer = RecordWriter(str(self._folder / name))
        self._writer.write(_event(file_version="brain.Event:2"))
        if self._after is not None:
            # TensorBoard then hides events of later steps from before the restart.
            self._writer.write(_event(step=self._after + 1, session_log={"status": "START"}))
        return self._writer


def _event(**content: object) -> bytes:
    """Serializes TensorBoard's Event message; generated code, unknown to type checkers."""
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    return Event(wall_time=time.time(), **content).SerializeToString()


def _histogram(array: np.ndarray) -> dict[str, Any]:
    """TensorBoard's histogram of an array, with 30 bins."""
    numbers = np.asarray(array, np.float64).ravel()
    counts, edges = np.histogram(numbers, bins=30)
    return {
        "min": numbers.min(),
        "max": numbers.max(),
        "num": numbers.size,
        "sum": numbers.sum(),
        "sum_squares": np.square(numbers).sum(),
        "bucket_limit": edges[1:].tolist(),
        "bucket": counts.astype(float).tolist(),
    }
