"""A folder has one writer; a dead one is succeeded, an unknown one is asked about."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from survival import GOES_ON, survives

from dovetail.errors import UserError
from dovetail.locking import FILE, FolderLock, is_abandoned

HOLDS = (
    "import sys, time; from pathlib import Path; from dovetail.locking import FolderLock\n"
    "lock = FolderLock(Path(sys.argv[1]), 'run'); print('held', flush=True); time.sleep(60)"
)


def holder(folder: Path) -> "subprocess.Popen[str]":
    """A process that holds the lock of a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


@survives("a second process resumes the run", "any", "any", GOES_ON + "; the second is refused")
def test_the_second_writer_is_told_of_the_first_and_succeeds_it_when_it_is_dead(
    tmp_path: Path,
) -> None:
    process = holder(tmp_path)
    try:
        sentence = f"in use by process {process.pid} on {socket.gethostname()}"
        with pytest.raises(UserError, match=sentence):
            FolderLock(tmp_path, "run")
        assert not is_abandoned(tmp_path)
    finally:
        process.kill()
        process.communicate()
    assert is_abandoned(tmp_path)
    with FolderLock(tmp_path, "run"):
        assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_one_process_is_one_writer_too(tmp_path: Path) -> None:
    with FolderLock(tmp_path, "run"), pytest.raises(UserError, match=f"process {os.getpid()} on"):
        FolderLock(tmp_path, "run")
    FolderLock(tmp_path, "run").close()


def test_a_host_that_cannot_be_asked(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"host": "elsewhere", "pid": 7, "started": 1}))
    with pytest.raises(UserError) as caught:
        FolderLock(tmp_path, "run")
    told = str(caught.value)
    assert "process 7 on elsewhere, which cannot be asked from here" in told
    assert told.endswith(f"remove {tmp_path / FILE}.") and (tmp_path / FILE).exists()


def test_a_process_that_has_the_number_of_a_dead_one_is_another(tmp_path: Path) -> None:
    known = {"host": socket.gethostname(), "pid": os.getpid(), "started": 1}
    (tmp_path / FILE).write_text(json.dumps(known))
    FolderLock(tmp_path, "run").close()


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"host": 3, "pid": "x", "started": 0}'])
def test_a_lock_without_a_name_is_free(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    FolderLock(tmp_path, "run").close()


def test_a_folder_that_cannot_be_locked(tmp_path: Path) -> None:
    (tmp_path / FILE).symlink_to(tmp_path / "other")
    with pytest.raises(UserError, match=r"Cannot lock .*: make the folder writable"):
        FolderLock(tmp_path, "run")
    assert not (tmp_path / "other").exists()
