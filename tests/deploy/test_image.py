"""The image is built from files that exist, from the lock, by a user who is not root."""

import fnmatch
import re
import tomllib
from typing import NamedTuple

from manifests import DEPLOY, ROOT

IGNORE = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
LOCK = (DEPLOY / "requirements.lock").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


class Step(NamedTuple):
    """One instruction: RUN, and what it runs."""

    word: str
    text: str


def steps() -> list[Step]:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\s*\\\n\s*", " ", code)
    return [Step(*line.split(" ", 1)) for line in joined.splitlines() if line.strip()]


STEPS = steps()


def texts(word: str) -> list[str]:
    return [step.text for step in STEPS if step.word == word]


def sources() -> list[str]:
    """What is copied into the image, in order."""
    return [source for text in texts("COPY") for source in text.split()[:-1]]


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps `path` from the build: its last line that fits decides."""
    verdict = False
    for line in (line for line in IGNORE if line and not line.startswith("#")):
        if fnmatch.fnmatch(path, line.lstrip("!")):
            verdict = not line.startswith("!")
    return verdict


def test_the_instructions_are_known_and_in_one_stage() -> None:
    words = [step.word for step in STEPS]
    assert set(words) <= {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "ARG", "USER"}
    assert texts("FROM") == ["python:3.11-slim"]
    assert words[0] == "FROM"


def test_what_is_copied_exists_and_reaches_the_build() -> None:
    assert sources() == [
        "deploy/requirements.lock",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "dovetail",
    ]
    assert [path for path in sources() if not (ROOT / path).exists()] == []
    assert [path for path in sources() if ignored(path)] == []
    assert ignored("runs") and ignored("tests") and ignored(".git") and ignored(".venv")


def test_code_is_copied_after_the_packages_are_installed() -> None:
    order = [step.text for step in STEPS]
    locked = order.index("pip install --require-hashes --no-deps --requirement requirements.lock")
    assert order.index("deploy/requirements.lock ./") < locked < order.index("dovetail ./dovetail")
    assert order.index("dovetail ./dovetail") < order.index(
        'pip install --no-deps ".[ray]" && pip check'
    )


def test_the_extra_exists_and_is_locked() -> None:
    """With every package that it and Dovetail ask for, each with its hashes."""
    (extra,) = re.findall(r"\"\.\[(\w+)\]\"", " ".join(texts("RUN")))
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"][extra]
    names = {re.split(r"[\[<>=;, ]", line)[0].lower().replace("_", "-") for line in wanted}
    locked = re.findall(r"^([a-z0-9-]+)==\S+ .*\\\n    --hash=sha256:", LOCK, flags=re.MULTILINE)
    assert names - set(locked) == set()
    assert len(locked) == len(re.findall(r"^[a-z0-9-]+==", LOCK, flags=re.MULTILINE))


def test_the_lock_agrees_with_the_one_that_is_tested() -> None:
    """A package that both have is of the same version in the image as in the tests."""
    pattern = re.compile(r"^([a-z0-9-]+)==(\S+)(.*?)\\?$", flags=re.MULTILINE)
    tested = (ROOT / "requirements-test.lock").read_text(encoding="utf-8")
    ours = {(name, mark.strip()): version for name, version, mark in pattern.findall(LOCK)}
    theirs = {(name, mark.strip()): version for name, version, mark in pattern.findall(tested)}
    both = ours.keys() & theirs.keys()
    assert len(both) > 30
    assert {key: ours[key] for key in both} == {key: theirs[key] for key in both}


def test_it_runs_as_nobody_special_and_only_with_a_token() -> None:
    assert texts("USER") == ["1000"]
    assert [step.word for step in STEPS][-2:] == ["USER", "WORKDIR"]
    assert "useradd --create-home --uid 1000 dovetail" in texts("RUN")[0]
    assert "RAY_AUTH_MODE=token" in " ".join(texts("ENV")).split()
