"""Lines about environments that are not quite what their names say."""

import re
from collections.abc import Mapping
from typing import Any

from dovetail.envs.ale import game_of
from dovetail.envs.names import EnvId

PREPROCESSED = "frame skip 4, 84 × 84 gray frames in stacks of 4, rewards clipped to -1 … 1"
"""What ALE's vector environment does."""


def atari_alias(found: EnvId) -> EnvId | None:
    """The id meant by a name of the old Gym, `PongNoFrameskip-v4`: `ale:pong`, or Gymnasium's plain
    game if the user brings the preprocessing; None for other names."""
    if found.backend is not None or not re.fullmatch(r"\w+NoFrameskip-v\d+", found.name):
        return None
    if "wrap" in found.options or "vectorization" in found.options:
        return EnvId("gymnasium", found.name, "", found.options, found.query)
    return EnvId("ale", game_of(found.name), "", found.options, found.query)


def note(given: EnvId, backend: str) -> str:
    """The line about an environment that `backend` makes; empty if there is nothing to say."""
    lines = [_atari(given, backend), _normalizing(given.options)]
    return " ".join(line for line in lines if line)


def _atari(given: EnvId, backend: str) -> str:
    name, game = given.name, f"ale:{game_of(given.name)}"
    if backend == "ale" and given.backend is None:
        return (
            f"{name} runs as {game}, with the usual preprocessing ({PREPROCESSED}); "
            f"gymnasium:{name} is the plain game, for wrappers of your own."
        )
    if backend != "gymnasium" or not (name.startswith("ALE/") or "NoFrameskip" in name):
        return ""
    if "wrap" in given.options or given.options.get("vectorization") in ("sync", "async"):
        return (
            f"{name} is the plain game here, with your wrappers only; {game} brings the usual "
            f"preprocessing ({PREPROCESSED})."
        )
    if not name.startswith("ALE/"):
        return f"{name} is the plain game here; {game} brings the usual preprocessing."
    return (
        f"{name} is preprocessed as {game} is ({PREPROCESSED}), and has the sticky actions of "
        f"version 5, which {game} has not; --wrap begins with the plain frames."
    )


def _normalizing(options: Mapping[str, Any]) -> str:
    if "NormalizeObservation" not in str(options.get("wrap", "")):
        return ""
    return (
        "NormalizeObservation keeps statistics of its own in every environment, which are not "
        "saved: the option normalize_observations of an algorithm keeps them with the policy."
    )
