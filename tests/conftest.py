"""Four CPU devices, and one cache of compiled programs for all the workers of a test session."""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

CACHE = "JAX_COMPILATION_CACHE_DIR"
_made_here: str | None = None
_state: str | None = None
if CACHE not in os.environ:  # the first process of the session; its workers inherit the variable
    os.environ[CACHE] = _made_here = tempfile.mkdtemp(prefix="dovetail-tests-")
# Reading a small program from the cache takes as long as compiling it, and writing it longer.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["JAX_PLATFORMS"] = "cpu"
# Most tests compile far more than they compute: these make compiling three times as quick.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=4 --xla_cpu_use_fusion_emitters=false "
    # Both cores are busy with tests: compiling small programs in parts only costs a sixth more.
    "--xla_cpu_parallel_codegen_split_count=1"
)

# What tests train is remembered as the user's own: not in the home of whoever runs them.
if "DOVETAIL_TESTS_STATE" not in os.environ:
    _state = os.environ["DOVETAIL_TESTS_STATE"] = tempfile.mkdtemp(prefix="dovetail-tests-")
    os.environ["XDG_STATE_HOME"] = _state

# Who is started in the background ignores Ctrl-C, and so would whatever the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Ray's workers are nice, and would wait for the tests beside them.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112

# A worker keeps millions of JAX's objects: to look through all of them often takes a twentieth.
gc.set_threshold(100_000, 10, 10)


def pytest_configure(config: pytest.Config) -> None:
    """JAX does not write its cache atomically: who reads while another writes compiles himself."""
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache")


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not look at it again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Removes the session's cache, from the process that made it."""
    if _made_here is not None:
        shutil.rmtree(_made_here, ignore_errors=True)
    if _state is not None:
        shutil.rmtree(_state, ignore_errors=True)


@pytest.fixture(autouse=True)
def _folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """Whatever a test writes without saying where goes to a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def optimized() -> Iterator[None]:
    """Programs as fast as users have them: for a test that computes far more than it compiles."""
    import jax

    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
