"""Videos: the frames that are written, and the sentence when there are none."""

import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import imageio_ffmpeg
import jax
import numpy as np
import pytest
from PIL import Image

from dovetail.envs.interface import Discrete, EnvSpec
from dovetail.envs.resolve import Env, resolve
from dovetail.telemetry import video
from dovetail.telemetry.video import record_video


class Count(gymnasium.Env[Any, Any]):
    """Five steps; the picture gets brighter with each, the reward is the action."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, render_mode: str | None = None, broken: str = "") -> None:
        self.render_mode = render_mode
        self.broken = broken
        self.now = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.now = 0
        return np.zeros(1, np.float32), {"seed": seed}

    def step(self, action: Any) -> Any:
        self.now += 1
        if self.broken == "later" and self.now == 3:
            raise ValueError("lost")
        return np.full(1, self.now, np.float32), float(action), self.now == 5, False, {}

    def render(self) -> Any:
        if self.broken == "raises":
            raise RuntimeError("no OpenGL\nat all")
        if self.broken == "blank":
            return None
        return np.full((31, 33, 3), 40 * self.now, np.uint8)


def make_env(single: Any = Count, actions: int = 3) -> Env:
    spec = EnvSpec("test:Count", jax.ShapeDtypeStruct((1,), np.float32), Discrete(actions))
    return Env(spec, None, None, single)


def policy(observation: Any, carry: Any) -> tuple[Any, Any]:
    """Acts 0, 1, 2, 0, 1 by counting in its carry, and checks the observation against it."""
    step = 0 if carry is None else carry
    assert observation.shape == (1,)
    assert observation[0] == step
    return np.int32(step % 3), step + 1


def read_frames(path: Path) -> np.ndarray:
    """uint8[frames, 32, 34, 3]: the odd size of the pictures, made even."""
    read = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", str(path)]
    raw = [*read, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    data = subprocess.run(raw, check=True, capture_output=True).stdout
    return np.frombuffer(data, np.uint8).reshape(-1, 32, 34, 3)


def test_mp4_has_every_frame(tmp_path):
    made = record_video(make_env(), policy, tmp_path / "video.mp4", episodes=2)
    assert made == (tmp_path / "video.mp4", None, (4.0, 4.0))
    assert os.listdir(tmp_path) == ["video.mp4"]
    frames = read_frames(tmp_path / "video.mp4")
    assert len(frames) == 12
    means = frames.mean(axis=(1, 2, 3))
    np.testing.assert_allclose(means, 2 * [0, 40, 80, 120, 160, 200], atol=8)


def test_length_is_bounded(tmp_path):
    made = record_video(make_env(), policy, tmp_path / "video.mp4", episodes=9, max_steps=7)
    assert made.returns == (4.0, 1.0)
    assert len(read_frames(tmp_path / "video.mp4")) == 9


def test_gif_without_ffmpeg(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "_has_ffmpeg", lambda: False)
    made = record_video(make_env(), policy, tmp_path / "video.mp4")
    assert made.path == tmp_path / "video.gif"
    assert (tmp_path / "video.gif").read_bytes().startswith(b"GIF89a")
    with Image.open(tmp_path / "video.gif") as gif:
        assert (gif.n_frames, gif.info["duration"]) == (6, 100)  # pyright: ignore


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (make_env(None), "There is no video of test:Count: neither it nor Gymnasium can draw it."),
        (
            make_env(partial(Count, broken="raises")),
            "There is no video of test:Count: RuntimeError: no OpenGL.",
        ),
        (
            make_env(partial(Count, broken="blank")),
            "There is no video of test:Count: its render() returns no picture.",
        ),
        (
            make_env(actions=2),
            "There is no video of test:Count: the one that Gymnasium would draw has other "
            "observations or actions.",
        ),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(tmp_path, env, reason):
    assert record_video(env, policy, tmp_path / "video.mp4") == (None, reason, ())
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_written_is_a_sentence(tmp_path):
    made = record_video(make_env(), policy, tmp_path / "none" / "video.mp4")
    assert made.path is None
    assert made.reason is not None
    assert "video.mp4 could not be written, " in made.reason


def test_an_environment_that_fails_later_is_a_sentence(tmp_path):
    made = record_video(make_env(partial(Count, broken="later")), policy, tmp_path / "video.mp4")
    assert made == (None, "There is no video of test:Count: ValueError: lost.", (1.0,))
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_a_sentence(tmp_path, monkeypatch):
    def full(_from: Path, _to: Path) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "replace", full)
    made = record_video(make_env(), policy, tmp_path / "video.mp4")
    assert made.path is None
    assert "No space left on device" in str(made.reason)
    assert os.listdir(tmp_path) == []


def test_a_broken_policy_is_raised(tmp_path):
    def broken(_observation: Any, _carry: Any) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError):
        record_video(make_env(), broken, tmp_path / "video.mp4")
    assert os.listdir(tmp_path) == []


def test_jax_environment_that_nobody_draws(tmp_path):
    made = record_video(resolve("dovetail:MemoryCue-v0"), policy, tmp_path / "video.mp4")
    reason = "There is no video of dovetail:MemoryCue-v0: neither it nor Gymnasium can draw it."
    assert made == (None, reason, ())


def test_jax_cartpole_is_drawn_by_gymnasium(tmp_path, monkeypatch):
    monkeypatch.delenv("SDL_AUDIODRIVER", raising=False)
    env = resolve("dovetail:CartPole-v1", traced=True)
    made = record_video(env, lambda _o, _c: (np.int32(0), None), tmp_path / "video.mp4", seed=3)
    assert made.path == tmp_path / "video.mp4"
    assert 7 <= made.returns[0] <= 12
    assert "SDL_AUDIODRIVER" not in os.environ
