"""Makes a virtual environment and installs a lock file and this project into it.

Needs only the standard library. It shows one line of progress, keeps what pip says in a log inside
the virtual environment, and shows the end of that log only when something failed.
"""

import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT_EVERY = 5.0
"""Seconds between two lines of progress where no terminal can redraw one."""


def main() -> int:
    """`install.py VENV LOCK`: 0 if everything is installed."""
    folder, lock = Path(sys.argv[1]), Path(sys.argv[2])
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"Making {folder} with Python {sys.version.split()[0]}.", flush=True)
        try:
            venv.create(folder, with_pip=True)
        except subprocess.CalledProcessError:
            print(
                f"{sys.executable} cannot make a virtual environment (is python3-venv installed?): "
                "install it, or name another Python: make PYTHON=/path/to/python3."
            )
            return 2
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    # The lock names everything, so pip resolves nothing: some versions of it look for the newest
    # release of a package that another one wants with an extra, which the lock does not have.
    locked = [*pip, "--progress-bar", "off", "--require-hashes", "--no-deps", "-r", str(lock)]
    project = [*pip, "--no-deps", "-e", str(ROOT)]
    total = sum("==" in line for line in lock.read_text().splitlines())
    return _pip(locked, folder, f"Installing {lock.name}", total) or _pip(
        project, folder, "Installing dovetail", 1
    )


def _pip(command: list[str], folder: Path, title: str, total: int) -> int:
    """Runs pip, its words into a log; says how far it is, and why it failed if it did."""
    log = folder / "install.log"
    started = reported = time.monotonic()
    terminal = sys.stdout.isatty()
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        while process.poll() is None:
            time.sleep(0.2)
            now = time.monotonic()
            if not terminal and now - reported < REPORT_EVERY:
                continue
            reported = now
            line = f"{title}: {_state(log.read_text(), total)}, {now - started:.0f} s"
            print(f"\r{line}\033[K" if terminal else line, end="" if terminal else "\n", flush=True)
    if terminal:
        print("\r\033[K", end="")
    if process.returncode == 0:
        print(f"{title}: done in {time.monotonic() - started:.0f} s.", flush=True)
        return 0
    print("\n".join(log.read_text().splitlines()[-20:]))
    print(f"{title} failed; pip said the above, and the whole of it is in {log}.", flush=True)
    return 1


def _state(said: str, total: int) -> str:
    """How far pip is, from what it has said so far."""
    if "\nInstalling collected packages" in said:
        return "writing files"
    found = said.count("\nCollecting ") + said.count("Requirement already satisfied")
    return f"package {min(found, total)} of {total}"


if __name__ == "__main__":
    sys.exit(main())
