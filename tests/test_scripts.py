"""An algorithm class in a plain script: trained, evaluated and resumed where it is defined."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dovetail
from dovetail.errors import UserError
from dovetail.loading import load_object, place_of, refuse_while_loading

SCRIPT = """
from dataclasses import dataclass

import dovetail as dt
from dovetail.algorithms.a2c import A2C


@dataclass(frozen=True)
class Mine(A2C):
    hidden_sizes: tuple[int, ...] = (4,)
    unroll_length: int = 2
    num_envs: int = 4


def main():
    settings = dt.Settings(episodes=2, evaluate_every=0, video=False, display="none", folder="run")
    run = dt.train(Mine(), "dovetail:CartPole-v1", STRATEGY, total_steps=16, settings=settings)
    print(len(dt.evaluate_run(run, episodes=2).returns))
    print(dt.resume(run, total_steps=32).summary["env_steps"])


"""


def python(script: str, strategy: str, stdin: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs a script as a user does."""
    text = script.replace("STRATEGY", strategy)
    Path("script.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-" if stdin else "script.py"],
        input=text if stdin else None,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(dovetail.__file__).parents[1])},
    )


LOCAL = "dt.strategies.Local()"


@pytest.mark.slow
@pytest.mark.parametrize("stdin", [False, True])
def test_a_script_trains_evaluates_and_resumes_once(stdin: bool) -> None:
    done = python(SCRIPT + "main()\n", LOCAL, stdin)
    assert (done.stdout, done.returncode) == ("2\n32\n", 0), done.stderr
    assert not Path("runs").exists()


PROCESS = "dt.strategies.Local(sides=('judge@process',))"
JUDGED = SCRIPT.replace(
    "def main",
    """    def iteration(self, rl, state):
        state, metrics = super().iteration(rl, state)
        return state, metrics | {"judged": rl.call("judge", lambda x: 2 * x, metrics["loss"])}


def main""",
).replace("    num_envs: int = 4\n\n\n", "    num_envs: int = 4\n\n")


@pytest.mark.slow
def test_processes_import_a_guarded_script_and_refuse_the_others() -> None:
    done = python(JUDGED + 'if __name__ == "__main__":\n    main()\n', PROCESS)
    assert (done.stdout, done.returncode) == ("2\n32\n", 0), done.stderr
    subprocess.run(["rm", "-r", "run"], check=True)
    done = python(JUDGED + "main()\n", PROCESS)
    assert 'put what it does under `if __name__ == "__main__":`.' in done.stderr
    subprocess.run(["rm", "-r", "run"], check=True)
    done = python(JUDGED + "main()\n", PROCESS, stdin=True)
    assert "a class is defined in a notebook or on standard input" in done.stderr


def test_a_file_that_trains_when_it_is_loaded() -> None:
    Path("script.py").write_text(SCRIPT + "dt.train(Mine(), 'CartPole-v1')\n")
    with pytest.raises(UserError, match=r"script.py calls dt.train when it is loaded for its clas"):
        load_object(f"{Path('script.py').resolve()}:Mine", "algorithm")
    refuse_while_loading("dt.train")  # nothing is being loaded any more
    assert not Path("runs").exists()


def test_a_class_that_only_this_process_knows() -> None:
    class Local:
        pass

    assert load_object(place_of(Local), "algorithm") is Local
    cell: dict[str, type] = {}
    exec("class Cell: pass\nCell.__module__ = '__main__'", cell)  # as a notebook's cell
    assert load_object(place_of(cell["Cell"]), "algorithm") is cell["Cell"]


def test_a_class_of_a_notebook_elsewhere() -> None:
    with pytest.raises(UserError, match="Gone was defined in a notebook or on standard input"):
        load_object("__main__:Gone", "algorithm")


def test_a_module_that_python_has_imported_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Path("counted_once.py").write_text("class Mine: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import counted_once  # pyright: ignore[reportMissingImports]

    assert load_object(f"{tmp_path / 'counted_once.py'}:Mine", "class") is counted_once.Mine
    del sys.modules["counted_once"]
