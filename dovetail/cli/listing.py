"""`dovetail list`: what there is to choose from, and the environments of each back end."""

import json

from dovetail.cli.parser import Parser
from dovetail.cli.reference import Kind, catalog, find
from dovetail.errors import UserError, nearest

TITLES = ("algorithms", "strategies", "environments", "wrappers")
ENVS = ("envs", "environments")


def run(argv: list[str]) -> None:
    """Prints everything in short, one kind, or the environments of the back ends."""
    parser = Parser(
        "list",
        "Lists what there is to choose from, one line each. `dovetail list envs` lists the\n"
        "environments of every back end, or those whose names contain the given text.",
        "dovetail list envs pong --backend ale",
    )
    parser.usage = "dovetail list [algorithms|strategies|envs|wrappers] [TEXT]"
    parser.add_argument("what", nargs="?", help="One kind only")
    parser.add_argument("text", nargs="?", help="With envs: a part of the name, in any case")
    parser.flag("--backend", "With envs: only those of this back end", "BACKEND")
    parser.flag("--json", "Print one JSON object")
    given = parser.read(argv)
    what = given.get("what")
    if what not in (None, "envs", *TITLES):
        raise UserError(f"dovetail list shows no {what!r}: {nearest(what, ('envs', *TITLES))}")
    if what not in ENVS and (spare := {"text", "backend"} & set(given)):
        raise UserError(
            f"dovetail list takes {' and '.join(sorted(spare))} for environments only: write "
            "`dovetail list envs`."
        )
    if what in ENVS:
        found = _environments(given.get("text", ""), given.get("backend"))
        text = "\n".join(f"{backend}:{name}" for backend, names in found.items() for name in names)
    else:
        found = _listing() if what is None else {what: _listing()[what]}
        text = _text(found)
    print(json.dumps(found) if "json" in given else text)


def _environments(text: str, backend: str | None) -> dict[str, list[str]]:
    """The environments whose names contain `text`, by back end; installed ones only."""
    from dovetail.envs import backends, names
    from dovetail.envs.names import suggestion

    wanted = [name for name, _, installed in backends() if installed and backend in (None, name)]
    if not wanted and backend is not None:
        names(backend)  # raises if there is no such back end
        about = next(about for name, about, _ in backends() if name == backend)
        raise UserError(f"The back end {backend} is not installed: it has {about}.")
    found = {name: [env for env in names(name) if text.lower() in env.lower()] for name in wanted}
    found = {name: envs for name, envs in found.items() if envs}
    if not found:
        known = [env for name in wanted for env in names(name)]
        raise UserError(f"No environment has {text!r} in its name: {suggestion(text, known)}")
    return found


def _listing() -> dict[str, dict[str, str]]:
    import dovetail.envs
    from dovetail.envs.wrapping import SHORT

    environments = {
        name: about if installed else f"{about} (not installed)"
        for name, about, installed in dovetail.envs.backends()
    }
    kinds = (_own("algorithm"), _own("strategy"), environments, SHORT)
    return dict(zip(TITLES, kinds, strict=True))


def _own(kind: Kind) -> dict[str, str]:
    return {word: find(kind, word).summary for word in catalog(kind)}


def _text(listing: dict[str, dict[str, str]]) -> str:
    width = max(len(name) for entries in listing.values() for name in entries)
    return "\n\n".join(
        "\n".join([title, *(f"  {name:<{width}}  {line}" for name, line in entries.items())])
        for title, entries in listing.items()
    )
