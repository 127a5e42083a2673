"""The Python code equivalent to a command line."""

from collections.abc import Mapping
from typing import Any

from dovetail.cli.experiment import Choice, Experiment


def train_text(
    wanted: Experiment,
    numbers: Mapping[str, int],
    cluster: str | None,
    settings: Mapping[str, Any],
    texts: Mapping[str, Any],
    replay: str | None = None,
) -> str:
    """`dovetail train …` in Python."""
    words = [_choice_text(wanted.algorithm, "algorithms")]
    words += [repr(wanted.env)] if wanted.env is not None else []
    if wanted.strategy is not None:
        named = "strategy=" if wanted.env is None else ""
        words.append(named + _choice_text(wanted.strategy, "strategies"))
    words += [f"wrap={list(wanted.wrap)}"] if wanted.wrap else []
    words += [f"{name}={text!r}" for name, text in texts.items()]
    words += [f"{name}={value:_}" for name, value in numbers.items()]
    words += [f"cluster={cluster}"] if cluster is not None else []
    words += [f"replay={replay}"] if replay is not None else []
    if settings:
        words.append(f"settings=dt.Settings({_arguments(settings)})")
    return "\n".join([*_imports(wanted, cluster), f"run = {_call('dt.train', words)}"])


def resume_text(
    run: str, given: Mapping[str, int | str], cluster: str | None, changes: Mapping[str, Any]
) -> str:
    """`dovetail train --resume …` in Python."""
    plain = {name: isinstance(x, int) and not isinstance(x, bool) for name, x in given.items()}
    texts = {name: f"{x:_}" if plain[name] else repr(x) for name, x in given.items()}
    words = [repr(run), *(f"{name}={text}" for name, text in texts.items())]
    words += [f"cluster={cluster}"] if cluster is not None else []
    words += [f"{name}={value!r}" for name, value in changes.items()]
    return "\n".join([*_modules(cluster), f"run = {_call('dt.resume', words)}"])


def _modules(cluster: str | None) -> list[str]:
    standard = ["import dataclasses"] if cluster and cluster.startswith("dataclasses.") else []
    return [*standard, "import dovetail as dt"]


def _imports(wanted: Experiment, cluster: str | None) -> list[str]:
    lines = _modules(cluster)
    for choice in (wanted.algorithm, wanted.strategy):
        if choice is not None and choice.file is not None:
            lines.append(f"from {choice.file.stem} import {choice.kind.__name__}")
    return lines


def _choice_text(choice: Choice, package: str) -> str:
    where = f"dt.{package}." if choice.file is None else ""
    return f"{where}{choice.kind.__name__}({_arguments(choice.options)})"


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _call(function: str, words: list[str]) -> str:
    """A call on one line if it fits, otherwise with one argument per line."""
    line = f"{function}({', '.join(words)})"
    if len(line) <= 90:
        return line
    return f"{function}(\n" + "".join(f"    {word},\n" for word in words) + ")"
