"""`dovetail list`: the algorithms, strategies and back ends, one line each."""

import json

from dovetail.cli.parser import Parser
from dovetail.cli.reference import Kind, catalog, find


def run(argv: list[str]) -> None:
    """Prints algorithms, strategies and environment back ends."""
    parser = Parser("list", "Lists what there is to choose from, one line each.", "dovetail list")
    parser.flag("--json", "Print one JSON object")
    given = parser.read(argv)

    import dovetail.envs

    listing = {
        "algorithms": _own("algorithm"),
        "strategies": _own("strategy"),
        "environments": {
            name: about if installed else f"{about} (not installed)"
            for name, about, installed in dovetail.envs.backends()
        },
    }
    print(json.dumps(listing) if "json" in given else _text(listing))


def _own(kind: Kind) -> dict[str, str]:
    return {word: find(kind, word).summary for word in catalog(kind)}


def _text(listing: dict[str, dict[str, str]]) -> str:
    width = max(len(name) for entries in listing.values() for name in entries)
    return "\n\n".join(
        "\n".join([title, *(f"  {name:<{width}}  {line}" for name, line in entries.items())])
        for title, entries in listing.items()
    )
