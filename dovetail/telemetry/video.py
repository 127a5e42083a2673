"""Videos of a policy in its environment.

Frames are streamed to ffmpeg (installed with imageio-ffmpeg), or to a GIF without it. A failed
video must not fail a run: the reason is returned as a sentence, not raised.
"""

import contextlib
import ctypes.util
import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dovetail.errors import UserError

if TYPE_CHECKING:
    from imageio.core.format import Format

    from dovetail.envs.render import Watched
    from dovetail.envs.resolve import Env

Policy = Callable[[Any, Any], tuple[Any, Any]]
"""(observation, carry) → (action, carry) for one environment, in the environment's own spaces; the
first carry is None."""


_UNDRAWN = "neither it nor Gymnasium can draw it."


class Video(NamedTuple):
    """The result of `record_video`."""

    path: Path | None
    """The video file; None if it could not be made."""
    reason: str | None
    """Why it could not be made, as a sentence."""
    returns: tuple[float, ...] = ()
    """The return of each episode; of the last one, as far as it was recorded."""


class NoVideo(Exception):
    """The reason why a video cannot be made; the message completes a sentence."""


def record_video(
    env: "Env",
    policy: Policy,
    path: str | Path,
    episodes: int = 1,
    max_steps: int = 1000,
    seed: int = 0,
) -> Video:
    """Records `episodes` episodes, at most `max_steps` steps in total; as a GIF without ffmpeg."""
    returns: list[float] = []
    gif = Path(path).suffix == ".gif" or not _has_ffmpeg()
    target = Path(path).with_suffix(".gif" if gif else ".mp4")
    try:
        with _headless(), _opened(env) as watched:
            film = _film(watched, policy, episodes, max_steps, seed, returns)
            _write(target, film, _frames_per_second(watched))
    except NoVideo as reason:
        sentence = f"There is no video of {env.spec.id}: {reason}"
        return Video(None, sentence, tuple(returns))
    return Video(target, None, tuple(returns))


def show_window(env: "Env", policy: Policy, seed: int = 0) -> float:
    """Shows one episode in a window and returns its return; raises without a screen."""
    returns: list[float] = []
    try:
        if not _has_screen():
            raise NoVideo("there is no screen here.")
        with _opened(env, "human") as watched:
            for _ in _film(watched, policy, 1, sys.maxsize, seed, returns):
                pass
    except NoVideo as reason:
        raise UserError(
            f"{env.spec.id} cannot be shown in a window: {reason} Leave out --window for a video."
        ) from reason
    return returns[0]


@contextlib.contextmanager
def _opened(env: "Env", mode: str = "rgb_array") -> "Generator[Watched]":
    """Opens an environment that can render; raises `NoVideo` if it cannot."""
    from dovetail.envs.render import Watched

    if env.single is None:
        raise NoVideo(_UNDRAWN)
    try:
        single = _ask(env.single, render_mode=mode)
    except NoVideo as reason:
        if env.jax is not None and isinstance(reason.__cause__, UserError):
            raise NoVideo(_UNDRAWN) from reason  # Gymnasium has no environment of this name
        raise
    try:
        watched = _ask(Watched, single, env.spec.id)
        _ask(watched.reset, seed=0)
        # Tried before anything is recorded: many environments only fail when they draw.
        frame = _ask(watched.render)
        if mode == "rgb_array" and (not isinstance(frame, np.ndarray) or frame.ndim != 3):
            raise NoVideo("its render() returns no picture.")
        # A JAX environment is drawn by Gymnasium's version, which must match it.
        shown = (watched.mapped.observation, watched.mapped.action)
        if shown != (env.spec.observation, env.spec.action):
            raise NoVideo("the one that Gymnasium would draw has other observations or actions.")
        yield watched
    finally:
        with contextlib.suppress(Exception):  # an environment that failed may fail to close too
            single.close()


def _ask(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Calls a method of the environment; turns any failure into `NoVideo`."""
    try:
        return call(*arguments, **named)
    except Exception as error:
        raise NoVideo(_sentence(error)) from error


def _acted(policy: Policy, observation: Any, carry: Any) -> tuple[Any, Any]:
    """Calls the policy, which may not take what the environment that is drawn shows."""
    try:
        return policy(observation, carry)
    except UserError as error:
        raise NoVideo(str(error)) from error


def _film(
    watched: "Watched",
    policy: Policy,
    episodes: int,
    max_steps: int,
    seed: int,
    returns: list[float],
) -> Iterator[np.ndarray]:
    """Yields the frames of the episodes; appends each episode's return to `returns`."""
    left = max_steps
    for episode in range(episodes):
        if left <= 0:
            return
        observation, _ = _ask(watched.env.reset, seed=seed + episode)
        carry, ended = None, False
        returns.append(0.0)
        yield _even(_ask(watched.render))
        while left > 0 and not ended:
            action, carry = _acted(policy, observation, carry)
            observation, reward, terminated, truncated, _ = _ask(watched.env.step, action)
            returns[-1] += float(reward)
            ended = bool(terminated or truncated)
            left -= 1
            yield _even(_ask(watched.render))


def _even(frame: np.ndarray | None) -> np.ndarray:
    """Pads a frame to even height and width, as video codecs require; None, from an environment
    that draws to a window, becomes a black frame."""
    if frame is None:
        return np.zeros((2, 2, 3), np.uint8)
    height, width = frame.shape[:2]
    if height % 2 or width % 2:
        frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return np.ascontiguousarray(frame, np.uint8)


def _write(path: Path, frames: Iterator[np.ndarray], frames_per_second: float) -> None:
    """Writes to a temporary file and moves it to `path`, which never holds a partial video."""
    partial = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        with warnings.catch_warnings():
            # ffmpeg starts with fork and an immediate exec, which is safe despite JAX's threads.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            _write_frames(_open_writer(partial, frames_per_second), frames, path)
        os.replace(partial, path)
    except OSError as error:
        raise NoVideo(_unwritten(path, error)) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _write_frames(writer: "Format.Writer", frames: Iterator[np.ndarray], path: Path) -> None:
    with contextlib.closing(writer):
        for frame in frames:
            try:
                writer.append_data(frame)
            except Exception as error:
                raise NoVideo(_unwritten(path, error)) from error


def _open_writer(path: Path, frames_per_second: float) -> "Format.Writer":
    """imageio's writer for an mp4 that browsers can play, or for a looping GIF."""
    import imageio.v2 as imageio

    if path.suffix == ".gif":
        return imageio.get_writer(path, mode="I", duration=1000 / frames_per_second, loop=0)
    return imageio.get_writer(
        path,
        format="FFMPEG",  # pyright: ignore[reportArgumentType]
        mode="I",
        fps=frames_per_second,
        codec="libx264",
        pixelformat="yuv420p",  # the format that browsers play
        macro_block_size=2,
        ffmpeg_log_level="error",
    )


def _has_ffmpeg() -> bool:
    try:
        import imageio_ffmpeg

        return bool(imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError):
        return False


def _frames_per_second(watched: "Watched") -> float:
    """The environment's frame rate, limited to a watchable range."""
    stated = (watched.metadata or {}).get("render_fps") or 30
    return float(min(max(stated, 2), 60))


def _has_screen() -> bool:
    """Whether a window can open; only Linux needs a check."""
    screens = ("DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform != "linux" or any(os.environ.get(name) for name in screens)


@contextlib.contextmanager
def _headless() -> Generator[None]:
    """Lets pygame and MuJoCo render without a screen or audio device while the block runs."""
    wanted = {"SDL_AUDIODRIVER": "dummy"}
    if sys.platform == "linux":
        if not _has_screen():
            wanted["SDL_VIDEODRIVER"] = "dummy"
        libraries = {"egl": "EGL", "osmesa": "OSMesa"}
        found = [name for name in libraries if ctypes.util.find_library(libraries[name])]
        if found:
            wanted["MUJOCO_GL"] = found[0]
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _unwritten(path: Path, error: Exception) -> str:
    return f"{path} could not be written, {_sentence(error)}"


def _sentence(error: Exception) -> str:
    """The first line of an exception's message, with a final period."""
    if isinstance(error, UserError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(" .:") + "."
