"""Which Python runs a contestant: Dovetail's own, or a peer's environment made on demand."""

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / "benchmarks" / ".venvs"


def interpreter(name: str) -> Path:
    """`dovetail`; `ray`, which is that with Ray; or one whose packages are in peers/<name>.txt."""
    if name == "dovetail":
        own = ROOT / ".venv" / "bin" / "python"
        return own if own.exists() else Path(sys.executable)
    return _with_ray() if name == "ray" else _peer(name)


def _with_ray() -> Path:
    """Dovetail's own packages and Ray, as in the image for clusters."""
    lock, folder = ROOT / "deploy" / "requirements.lock", VENVS / "ray"
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    if not (stamp.exists() and stamp.read_text() == lock.read_text()):
        installer = ROOT / "tools" / "install.py"
        subprocess.run([sys.executable, str(installer), str(folder), str(lock)], check=True)
        stamp.write_text(lock.read_text())
    return python


def _peer(name: str) -> Path:
    """The peer's interpreter; installs it unless these very packages are installed."""
    pins = (ROOT / "benchmarks" / "peers" / f"{name}.txt").read_text()
    folder = VENVS / name
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    if python.exists() and stamp.exists() and stamp.read_text() == pins:
        return python
    print(f"Installing {name} into {folder.relative_to(ROOT)} …", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    packages = pins.split()
    # torch alone first: a build that is already chosen is not replaced by another's requirement
    if packages[0].startswith("torch"):
        subprocess.run([*pip, packages[0]], check=True)
    subprocess.run([*pip, *packages], check=True)
    stamp.write_text(pins)
    return python
