"""Imports point one way, as the folders do; the front door and the help cost no JAX.

Each rule says what a folder may import of Dovetail, and why. Everyone may use what everyone speaks:
the errors, the interface of environments, random keys, lazy attributes,
the loading of users' files, the locks of folders.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dovetail"

EVERYONE = ("errors", "envs.interface", "keys", "lazy", "loading", "locking")

RULES: dict[str, tuple[tuple[str, ...], str]] = {
    "errors": ((), "everyone stands on it"),
    "keys": ((), "everyone stands on it"),
    "lazy": ((), "everyone stands on it"),
    "loading": ((), "everyone stands on it"),
    "locking": ((), "everyone stands on it"),
    "functions": ((), "equations know nothing of where they are used"),
    "networks": (("functions",), "a network is a pair of pure functions"),
    "envs": ((), "an environment knows no algorithm"),
    "trajectory": ((), "what an unroll records names no machinery"),
    "boundaries": (("replay", "trajectory"), "where the loop may be cut names no machinery"),
    "algorithm": (
        ("boundaries", "replay", "trajectory"),
        "what a user implements names no machinery",
    ),
    "blocks": (
        ("algorithm", "boundaries", "functions", "networks", "replay", "trajectory"),
        "what algorithms call knows no algorithm",
    ),
    "algorithms": (
        ("algorithm", "blocks", "boundaries", "functions", "networks", "replay", "trajectory"),
        "an algorithm is its loop and equations",
    ),
    "extras": ((), "names the extra that a missing package belongs to"),
    "language": (("extras",), "models and generation know nothing of training"),
    "batching": (
        ("algorithm", "boundaries", "trajectory"),
        "how an algorithm acts on a batch, whoever asks",
    ),
    "graph": (
        ("algorithm", "batching", "boundaries", "envs", "replay", "trajectory"),
        "what is traced, before anyone decides where it runs",
    ),
    "strategies": (("boundaries", "graph", "plan.ir"), "a pure object: graph in, plan out"),
    "plan": (
        ("boundaries", "graph", "run.legacy", "strategies"),
        "the plan and its passes; no runtime",
    ),
    "runtime": (
        ("plan", "graph", "envs", "telemetry.spans", "boundaries", "trajectory"),
        "runs any plan; of RL it knows the record of an unroll, and no algorithm",
    ),
    "hosts": (
        ("boundaries", "envs", "graph", "plan", "runtime", "telemetry.spans", "trajectory"),
        "starts processes and carries channels; knows no algorithm",
    ),
    "run": ((), "a folder and what is written there"),
    "replay": ((), "tables know nothing of algorithms, nor of where they are kept"),
    "data": (
        ("envs", "replay", "run"),
        "recorded episodes know no algorithm, nor who learns from them",
    ),
    "estimation": (
        ("algorithm", "batching", "data", "evaluation", "functions", "networks", "run"),
        "judges a trained policy from recorded data, without an environment",
    ),
    "telemetry": (("run", "functions", "envs"), "shows what others measured, drives nothing"),
}
"""Folder or module → (what of Dovetail it may import beside its own, why)."""

CLI = [
    "algorithms",
    "data",
    "envs",
    "errors",
    "estimation",
    "evaluation",
    "hosts.deployment",
    "inspection",
    "language",
    "lazy",
    "loading",
    "strategies",
    "replay",
    "run",
    "telemetry",
    "training",
]
"""What the command line may import beside itself and the public door."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(file: Path) -> Iterator[tuple[str, int]]:
    """Every module of Dovetail that a file imports, lazily or not, without the package's name."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in whole if node.module == "dovetail" else [node.module]:
                if name.startswith("dovetail."):
                    yield name.removeprefix("dovetail."), node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("dovetail."):
                    yield alias.name.removeprefix("dovetail."), node.lineno
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{file}: a relative import"


def within(module: str, allowed: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def violations(file: Path) -> list[str]:
    part = file.relative_to(PACKAGE).with_suffix("").parts[0]
    found: list[str] = []
    for module, line in imports(file):
        if part == "cli":
            if not within(module, ("cli", *CLI)):
                found.append(f"{file}:{line} imports {module}, which is not for the command line")
        elif within(module, ("cli",)) and part != "__main__":
            found.append(f"{file}:{line} imports {module}: the command line is on top of all")
        elif part in RULES:
            allowed, why = RULES[part]
            if not within(module, (part, *allowed, *EVERYONE)):
                found.append(f"{file}:{line} imports {module}, but {part}: {why}")
    return found


@pytest.mark.parametrize("file", modules(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_one_way(file: Path) -> None:
    assert violations(file) == []


def test_every_folder_has_a_rule() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    above = {"cli", "training", "evaluation", "inspection"}  # may import all the others
    assert folders - above <= set(RULES)


def test_a_violation_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "graph").mkdir()
    file = tmp_path / "graph" / "bad.py"
    file.write_text("def f():\n    from dovetail.runtime.local import run\n")
    (found,) = violations(file)
    assert found.startswith(f"{file}:2 imports runtime.local, but graph: ")
    file.write_text("import dovetail.graph.ir\nfrom dovetail import errors\n")
    assert violations(file) == []


@pytest.mark.parametrize("file", modules(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_nothing_is_pickled(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not {"pickle", "cloudpickle", "dill", "joblib"} & {
        name.partition(".")[0] for name in names
    }


@pytest.mark.parametrize(
    "program",
    [
        "import dovetail",
        "import dovetail.algorithms, dovetail.strategies",
        "from dovetail.cli.main import main; main(['--help'])",
        "from dovetail.cli.main import main; main(['train', 'ppo', '--help'])",
        "from dovetail.cli.main import main; main(['explain', 'a2c', '--strategy', 'fused', '-h'])",
        "from dovetail.cli.main import main; main(['eval', '--help'])",
        "from dovetail.cli.main import main; main(['list', '--help'])",
        "from dovetail.cli.main import main; main(['data', 'estimate', '--help'])",
    ],
)
def test_the_door_and_the_help_import_no_jax(program: str) -> None:
    heavy = "{'jax', 'numpy', 'gymnasium', 'matplotlib', 'rich', 'optax'}"
    check = f"import sys; print(sorted({heavy} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; {check}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == "[]\n"
