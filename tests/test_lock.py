"""The lock file names everything: `make` has pip install what it names and resolve nothing."""

import subprocess
import sys


def test_nothing_that_a_package_needs_is_missing_or_of_another_version():
    checked = subprocess.run(
        [sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=120
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
