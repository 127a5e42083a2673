"""`dovetail watch`: `dovetail.watch`."""

from typing import Any

from dovetail.cli.chosen_policy import chosen_policy, place_flags
from dovetail.cli.parser import Parser
from dovetail.cli.values import numbers


def run(argv: list[str]) -> None:
    """Shows or records an episode of a run's policy; prints the path of the video."""
    parser = Parser(
        "watch",
        "Shows the policy that a run learned: writes a video, or opens a window.",
        "dovetail watch runs/ppo-CartPole-v1-0-20260101-120000 --out cartpole.mp4",
    )
    parser.add_argument("run", metavar="RUN", help="The run's folder")
    parser.flag("--window", "Open a window instead of writing a video")
    parser.flag("--out", "The video's file (default video.mp4 in the run's folder)", "FILE")
    parser.flag("--seed", "Seed of the episode", "N")
    place_flags(parser)
    parser.flag("--trust", "Run the code that a run from elsewhere names")
    given = parser.read(argv)
    chosen: dict[str, Any] = numbers(given, "seed") | chosen_policy(given)
    chosen |= {name: given[name] for name in ("window", "out", "trust") if name in given}

    import dovetail
    from dovetail.evaluation.kept import has_best

    made = dovetail.watch(given["run"], **chosen)
    if made is not None:
        kept = "best" if has_best(dovetail.Run(given["run"])) else "last"
        which = chosen.get("which", kept)
        policy = f"the {which} policy" if isinstance(which, str) else f"checkpoint {which}"
        print(f"The video of {policy} is {made}.")
