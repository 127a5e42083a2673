"""The wheel: it has everything, and trains where nothing but it and its requirements is installed.

The requirements are those of `requirements.lock`, linked from the packages that run the tests, so
that nothing is downloaded. Neither the checkout nor the packages of any extra can be imported.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from flit_core.buildapi import build_wheel; print(build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-c", BUILD, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.strip()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of a virtual environment in which the wheel is installed."""
    folder = tmp_path_factory.mktemp("alone") / "venv"
    venv.create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    link_requirements(packages)
    python = folder / "bin" / "python"
    install = ["install", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), *install, str(wheel)],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return folder / "bin"


def link_requirements(packages: Path) -> None:
    """Links what the lock of the core names into a folder, as if it were installed there."""
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    for name in re.findall(r"^([\w.-]+)==", lock, flags=re.MULTILINE):
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # of another platform
            continue
        for part in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            source, link = Path(str(found.locate_file(part))), packages / part
            if source.exists() and not link.exists():
                link.symlink_to(source)


def run(*command: str | Path) -> "subprocess.CompletedProcess[str]":
    """Runs a command that does not see the checkout, in the test's own folder."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        list(map(str, command)), env=env, capture_output=True, text=True, timeout=300
    )


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    package = ROOT / "dovetail"
    files = {
        file.relative_to(ROOT).as_posix()
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert "dovetail/py.typed" in names
    assert {name for name in names if name.startswith("dovetail/")} == files
    others = {name.partition("/")[0] for name in names} - {"dovetail"}
    assert len(others) == 1 and others.pop().endswith(".dist-info")


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        commands = archive.read(f"{info}/entry_points.txt").decode()
        license = archive.read(f"{info}/licenses/LICENSE").decode()
    assert "\nRequires-Python: >=3.11\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "dovetail=dovetail.cli.main:main" in commands.replace(" ", "")
    assert "Apache License" in license


def test_the_wheel_alone_trains(installed: Path) -> None:
    where = "import dovetail; print(dovetail.__file__)"
    assert run(installed / "python", "-c", where).stdout.startswith(str(installed.parent))
    assert run(installed / "python", "-c", "import ray").returncode == 1  # of no extra

    train = (
        "train ppo --env CartPole-v1 --total-steps 512 --unroll-length 32 --num-envs 8 --episodes 2"
    )
    done = run(installed / "dovetail", *train.split(), "--display", "none", "--no-video")
    assert done.returncode == 0, done.stderr
    (folder,) = Path("runs").iterdir()
    assert json.loads((folder / "summary.json").read_text())["env_steps"] == 512
    found = {file.name for file in folder.iterdir()}
    assert found >= {"config.json", "plan.txt", "graph.svg", "metrics.csv", "learning_curve.png"}


def test_the_wheel_alone_explains_and_lists(installed: Path) -> None:
    """The command line reads the options from the source files of the package."""
    listed = run(installed / "dovetail", "list")
    assert listed.returncode == 0, listed.stderr
    assert "actor-learner" in listed.stdout
    helped = run(installed / "dovetail", "train", "sac", "--help")
    assert helped.returncode == 0, helped.stderr
    assert "--learning-rate" in helped.stdout
