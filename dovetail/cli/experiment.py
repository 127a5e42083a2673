"""The inputs of `train` and `explain`: an algorithm, an environment and a strategy, with options.

The options of the named algorithm and strategy are added to the command's parser, so that their
flags, help and errors work like the command's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from dovetail.cli import config
from dovetail.cli.options import Option, flag, read
from dovetail.cli.parser import Parser, normalized
from dovetail.cli.reference import PACKAGE, Reference, catalog, find
from dovetail.cli.values import convert
from dovetail.errors import UserError, nearest, user_line

TRACED = ("dovetail", "gymnax")
"""The back ends of JAX environments; their registry would import too much for a help text."""
ELASTIC = ("actors", "workers")
"""Options that accept a range: `--actors 2..8` starts with 2 actors and lets more join."""


@dataclass(frozen=True)
class Choice:
    """An algorithm or a strategy with its given options."""

    kind: type
    options: Mapping[str, Any]
    file: Path | None = None
    """The user's file that defines it; None for a built-in one."""

    def build(self) -> Any:
        """Creates the algorithm or strategy."""
        try:
            return self.kind(**self.options)
        except TypeError as error:
            if user_line(error):
                raise
            hint = "is it decorated with @dataclass(frozen=True)?"
            raise UserError(f"{self.kind.__name__} cannot be made ({error}): {hint}") from error


@dataclass(frozen=True)
class Words:
    """A parsed command line with its config file; nothing is imported yet."""

    algorithm: Reference | None
    strategy: Reference | None
    values: Mapping[str, Any]
    """The values by key, as text or as TOML values."""

    def section(self, name: str) -> dict[str, Any]:
        """The options given for the algorithm, the strategy or the settings."""
        start = f"{name}."
        return {k[len(start) :]: v for k, v in self.values.items() if k.startswith(start)}


@dataclass(frozen=True)
class Experiment:
    """An algorithm, an environment and a strategy to run."""

    algorithm: Choice
    env: str | None
    """None for the environment that the recorded data name."""
    strategy: Choice | None
    """None for the default."""
    wrap: tuple[str, ...] = ()
    """The wrappers around each environment."""

    @property
    def wraps(self) -> dict[str, Any]:
        """The argument `wrap`, if there are any."""
        return {"wrap": self.wrap} if self.wrap else {}


def understand(parser: Parser, words: list[str]) -> Words:
    """Parses a command line whose first word names the algorithm."""
    name, rest = (words[0], words[1:]) if words and not words[0].startswith("-") else (None, words)
    # A first pass finds the strategy and the config file, which decide the flags of the second.
    peek = Parser(parser.prog.partition(" ")[2], "")
    peek.flag("--config", "", "FILE")
    peek.flag("--strategy", "", "STRATEGY")
    peek.flag("--resume", "", "RUN")
    peek.flag("--env", "", "ENV")
    asked = [word for word in normalized(rest) if word not in ("-h", "--help")]
    seen = vars(peek.parse_known_args(asked)[0])
    path = seen.get("config")
    file = config.load(path) if path else {}
    name = name or _text(file, "algorithm")
    algorithm = find("algorithm", name) if name else _trained(seen.get("resume"))
    strategy = (
        find("strategy", word)
        if (word := seen.get("strategy") or _text(file, "strategy"))
        else None
    )
    options = read(algorithm.file, algorithm.name) if algorithm else _shared_options()
    title = f"options of {algorithm.name}" if algorithm else "options of every algorithm"
    parser.options("algorithm", title, options.values())
    _add_strategy(parser, strategy, seen.get("env") or _text(file, "env") or "")
    given = parser.read(rest)
    if path:
        known = parser.known | {"algorithm", "strategy"}
        given = config.check(path, file, parser.places, known) | dict(given)
    return Words(algorithm, strategy, given)


def _trained(run: str | None) -> Reference | None:
    """The algorithm of a run to resume; None if its class is not in a file that is still there."""
    if run is None or not Path(run, "config.json").is_file():
        return None
    from dovetail.run.folder import Run

    try:
        return find("algorithm", str(Run.open(run).config.get("algorithm")))
    except UserError:
        return None


def algorithm_options(words: Words) -> dict[str, Any]:
    """The given options of the algorithm, converted to their types."""
    given = words.section("algorithm")
    if words.algorithm is None or not given:
        return given
    return dict(_choice(words.algorithm, given).options)


def experiment(words: Words, command: str) -> Experiment:
    """Imports the named classes and converts the options to their types."""
    if words.algorithm is None:
        hint = nearest("", catalog("algorithm"))
        raise UserError(f"Name an algorithm, as in `dovetail {command} ppo …`: {hint}")
    if "env" not in words.values and "data" not in words.values:
        example = f"dovetail {command} {words.algorithm.word} --env CartPole-v1"
        raise UserError(f"Name an environment, for instance: {example}.")
    env = convert(words.values["env"], str, "--env") if "env" in words.values else None
    wrap = _wraps(words.values, env)
    algorithm = _choice(words.algorithm, words.section("algorithm"))
    options = words.section("strategy")
    if words.strategy is not None:
        return Experiment(algorithm, env, _choice(words.strategy, options), wrap)
    strategy = _default_strategy(env, options, wrap) if options else None
    return Experiment(algorithm, env, strategy, wrap)


def wrap_flag(parser: Parser) -> None:
    """Adds the flag for wrappers."""
    parser.flag(
        "--wrap",
        "Wrappers around each environment: time-limit:500,clip-reward, FlattenObservation, "
        "my_file.py:MyWrapper",
        "WRAPPERS",
    )


def _wraps(values: Mapping[str, Any], env: str | None) -> tuple[str, ...]:
    """The wrappers, each as it was written; a list in a config file."""
    if "wrap" not in values:
        return ()
    from dovetail.envs.wrapping import parse_wraps, wrap_text

    given = values["wrap"]
    if isinstance(given, list):
        given = wrap_text([convert(one, str, "--wrap") for one in given])
    text = convert(given, str, "--wrap")
    if env is None:
        raise UserError("--wrap is for the environment of --env: name one, or leave --wrap out.")
    return tuple(wrap.text for wrap in parse_wraps(text))


def deployment(words: Words) -> tuple[dict[str, Any], str | None]:
    """Returns (the argument `cluster`, if given; its Python source)."""
    cluster, file = words.values.get("cluster"), words.values.get("deploy")
    if file is None and cluster is None:
        return {}, None
    if file is None:
        return {"cluster": cluster}, repr(cluster)
    from dovetail.hosts.deployment import Deployment

    found, spelled = Deployment.load(file), f"dt.Deployment.load({file!r})"
    if cluster is not None:
        found = replace(found, cluster=cluster)
        spelled = f"dataclasses.replace({spelled}, cluster={cluster!r})"
    return {"cluster": found}, spelled


def replay(words: Words) -> tuple[dict[str, Any], str | None]:
    """Returns (the argument `replay`, if given; its Python source)."""
    kinds = {"replay-shards": int, "samples-per-insert": float, "durable": bool}
    names = {"replay-shards": "shards", "samples-per-insert": "samples_per_insert"}
    given = {
        names.get(name, name): convert(words.values[name], kind, f"--{name}")
        for name, kind in kinds.items()
        if name in words.values
    }
    where = words.values.get("replay")
    where = None if where is None else convert(where, str, "--replay")
    if given and where in (None, "learner"):
        name = next(name for name in kinds if name in words.values)
        raise UserError(f"--{name} is for a replay that servers keep: add --replay servers.")
    if where is None:
        return {}, None
    if not given:
        return {"replay": where}, repr(where)
    from dovetail.training.replay_servers import ServedReplay

    asked = ServedReplay.of(where)
    assert asked is not None
    text = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return {"replay": replace(asked, **given)}, f"dt.ServedReplay({text})"


def replay_flags(parser: Parser) -> None:
    """Adds the flags for the location of the replay."""
    parser.flag(
        "--replay",
        "Where the replay of an off-policy algorithm is kept: learner (default), servers "
        "(processes of this run), or the addresses of running servers",
        "WHERE",
    )
    parser.flag("--replay-shards", "With --replay servers: number of servers (default 1)", "N")
    parser.flag(
        "--samples-per-insert",
        "With --replay servers: mean number of samples of an item; inserts or samples wait",
        "X",
    )
    parser.flag(
        "--durable", "With --replay servers: keep the replay in the run folder, for --resume"
    )


def _choice(reference: Reference, texts: Mapping[str, Any]) -> Choice:
    kind = reference.load()
    wanted = "iteration" if reference.kind == "algorithm" else "plan"
    if not isinstance(kind, type) or not callable(getattr(kind, wanted, None)):
        raise UserError(
            f"{reference.word} is no {reference.kind}, it has no method {wanted}: "
            f"name another class, or see `dovetail list`."
        )
    file = None if reference.own else reference.file
    return Choice(kind, _converted(kind, texts), file)


def _default_strategy(
    env: str | None, texts: Mapping[str, Any], wrap: tuple[str, ...] = ()
) -> Choice:
    """The default strategy for `env`, with the given options."""
    from dovetail.envs.wrapping import with_wraps
    from dovetail.training.planning import default_strategy

    if env is None:
        raise UserError(
            f"{flag(next(iter(texts)))} is an option of a strategy: name one with --strategy, or "
            "name the environment with --env."
        )
    kind: type = type(default_strategy(with_wraps(env, wrap)))
    known = get_type_hints(kind)
    for name in texts:
        if name not in known:
            raise UserError(
                f"{kind.__name__}, the strategy for {env}, has no option {flag(name)}: "
                "name the strategy that you want with --strategy."
            )
    return Choice(kind, _converted(kind, texts))


def _converted(kind: type, texts: Mapping[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    given = dict(texts)
    for name, text in texts.items():
        few, dots, many = str(text).partition("..")
        if dots and "min_actors" in hints and name in ELASTIC:
            given |= {name: many, "min_actors": few}
    return {name: convert(text, hints[name], flag(name)) for name, text in given.items()}


def _shared_options() -> dict[str, Option]:
    """The options that every algorithm has."""
    return read(PACKAGE / "algorithm.py", "Algorithm")


def _add_strategy(parser: Parser, strategy: Reference | None, env: str) -> None:
    """Adds the options of `strategy`; without one, those of all, of which help shows the default's.

    An option of another strategy must be understood, to say that its strategy is to be named.
    """
    if strategy is not None:
        options = read(strategy.file, strategy.name)
        parser.options("strategy", f"options of {strategy.name}", options.values())
        return
    default = find("strategy", "fused" if env.partition(":")[0] in TRACED else "local")
    shown = read(default.file, default.name)
    others: dict[str, Option] = {}
    for word in catalog("strategy"):
        own = find("strategy", word)
        others |= read(own.file, own.name)
    parser.options(
        "strategy",
        f"options of {default.name}, the default strategy",
        (others | shown).values(),
        "--strategy NAME --help shows the options of another; `dovetail list` names all of them.",
        hidden=set(others) - set(shown),
    )


def _text(values: Mapping[str, object], key: str) -> str | None:
    return convert(values[key], str, key) if key in values else None
