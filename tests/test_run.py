"""The run folder: created once, read back, written whole, refused in sentences."""

import errno
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dovetail.errors import UserError
from dovetail.run.folder import Run, read_metrics


@dataclass(frozen=True)
class Options:
    rate: float = 0.5
    sizes: tuple[int, ...] = (64, 64)


def test_default_folder_is_under_runs_with_name_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = Run.create(None, "ppo-gymnasium:CartPole-v1?x=1-0", {"seed": 3})
    second = Run.create(None, "ppo-gymnasium:CartPole-v1?x=1-0", {"seed": 4})
    assert first.path.parent == Path("runs")
    assert first.path.name.startswith("ppo-gymnasium-CartPole-v1-x-1-0-2")
    assert second.path != first.path
    assert (first.config, second.config) == ({"seed": 3}, {"seed": 4})


def test_config_is_strict_json(tmp_path):
    config = {"options": Options(), "best": math.nan, "n": np.int64(2), "at": Path("a"), "ok": True}
    run = Run.create(str(tmp_path / "a"), "x", config)
    text = (run.path / "config.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "options": {"rate": 0.5, "sizes": [64, 64]},
        "best": None,
        "n": 2,
        "at": "a",
        "ok": True,
    }


def test_a_folder_with_anything_in_it_is_never_overwritten(tmp_path):
    Run.create(str(tmp_path), "x", {"seed": 1})
    with pytest.raises(UserError, match="is not empty, and a run never overwrites"):
        Run.create(str(tmp_path), "x", {"seed": 2})
    assert Run.open(tmp_path).config == {"seed": 1}


def test_a_file_is_no_folder_for_a_run(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/inside"):
        with pytest.raises(UserError, match="file"):
            Run.create(str(tmp_path / folder), "x", {})


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_folder_that_cannot_be_made_is_named_with_the_reason(tmp_path, monkeypatch, code):
    def refuse(self, *_, **__):
        raise OSError(code, os.strerror(code), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.chdir(tmp_path)
    for folder in (None, str(tmp_path / "new")):
        with pytest.raises(UserError, match=os.strerror(code)) as error:
            Run.create(folder, "name", {})
        assert ("runs/name" if folder is None else folder) in str(error.value)


def test_a_read_only_disk(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path)]
    able = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("mount")
    if not able or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        for folder in (tmp_path, tmp_path / "new"):
            with pytest.raises(UserError, match=rf"{folder}.* \(Read-only file system\)"):
                Run.create(str(folder), "name", {})
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    run = Run.create(str(tmp_path / "a"), "x", {})
    run.write_text("plan.txt", "old")

    def full(_descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"Cannot write .*plan\.txt \(No space left on device\)"):
        run.write_text("plan.txt", "new")
    assert (run.path / "plan.txt").read_text() == "old"
    assert sorted(path.name for path in run.path.iterdir()) == ["config.json", "plan.txt"]


def test_written_files_obey_the_umask(tmp_path):
    run = Run.create(str(tmp_path / "a"), "x", {})
    mask = os.umask(0o027)
    try:
        path = run.write_text("plan.txt", "é\n")
    finally:
        os.umask(mask)
    assert path.read_bytes() == "é\n".encode()
    assert path.stat().st_mode & 0o777 == 0o640


def test_open_explains_what_is_no_run(tmp_path):
    Run.create(str(tmp_path / "ppo-cartpole-1"), "x", {})
    Run.create(str(tmp_path / "zzz"), "x", {})
    with pytest.raises(UserError, match="did you mean 'ppo-cartpole-1'"):
        Run.open(tmp_path / "ppo-cartpol")
    with pytest.raises(UserError, match=r"There is no run at .*newest runs are"):
        Run.open(tmp_path / "1234567")
    with pytest.raises(UserError, match="is a file, but a run is a folder"):
        Run.open(tmp_path / "zzz" / "config.json")
    with pytest.raises(UserError, match=r"is not a run, it has no config\.json: .*newest runs"):
        Run.open(tmp_path)


def test_open_without_any_run_nearby(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="There is no run at nothing/here"):
        Run.open("nothing/here")


def test_damaged_json_is_named(tmp_path):
    run = Run.create(str(tmp_path / "a"), "x", {})
    (run.path / "summary.json").write_text('{"final_')
    with pytest.raises(UserError, match=r"summary\.json is not valid JSON"):
        _ = run.summary
    (run.path / "summary.json").write_text("[1]")
    with pytest.raises(UserError, match="holds no JSON object"):
        _ = run.summary


def test_metrics_leave_out_a_half_written_line(tmp_path):
    run = Run.create(str(tmp_path / "a"), "x", {})
    assert run.metrics == {}
    path = run.path / "metrics.csv"
    path.write_text("time_s,env_steps,updates,loss\n0.5,100,1,\n1.5,200,2,0.25\n2.5,300,3,0.1")
    metrics = run.metrics
    assert list(metrics) == ["time_s", "env_steps", "updates", "loss"]
    np.testing.assert_array_equal(metrics["env_steps"], [100.0, 200.0])
    np.testing.assert_array_equal(metrics["loss"], [math.nan, 0.25])
    path.write_text("time_s,env")
    assert run.metrics == {}


def test_metrics_name_a_line_that_is_no_row(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("time_s,env_steps\n1,2\n1,two\n")
    with pytest.raises(UserError, match=r"metrics\.csv, line 3, holds no row of numbers"):
        read_metrics(path)


def test_text_forms(tmp_path):
    config = {"algorithm": "ppo", "env": "dovetail:CartPole-v1", "strategy": "fused"}
    run = Run.create(str(tmp_path / "a"), "x", config)
    assert repr(run) == f"Run({str(tmp_path / 'a')!r})"
    assert str(run) == f"run {run.path}: ppo · dovetail:CartPole-v1 · fused, not finished"
    run.write_json("summary.json", {"final_return": 487.25, "wall_s": 12.34, "env_steps": 200_000})
    assert run.summary["final_return"] == 487.25
    assert str(run).endswith("fused, 200,000 steps, 12.3 s, final return 487.2")
