"""The tour of the code names files that exist, and its commands are targets of the Makefile."""

import re
import subprocess

import pytest
from pages import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PATHS = sorted(
    {name for name in re.findall(r"`([\w./-]+(?:\.py|\.md|\.toml|/))`", TEXT) if "NAME" not in name}
)


@pytest.mark.parametrize("path", PATHS)
def test_a_file_that_is_named_exists(path: str) -> None:
    """From the root, or anywhere below the package where a row goes on about one folder."""
    assert (ROOT / path).exists() or any((ROOT / "dovetail").rglob(path.rstrip("/")))


def test_files_are_named() -> None:
    assert len(PATHS) > 30


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z]+)\b", TEXT))))
def test_make_has_the_target(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_fast_tests_exist() -> None:
    done = subprocess.run(["make", "-n", "check"], cwd=ROOT, capture_output=True, text=True)
    paths = re.findall(r"(?<= )tests/\S+", done.stdout)
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []
