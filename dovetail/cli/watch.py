"""`dovetail watch`: `dovetail.watch`."""

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
    given = dict(parser.read(argv))
    given |= numbers(given, "seed")

    import dovetail

    made = dovetail.watch(given.pop("run"), **given)
    if made is not None:
        print(f"The video is {made}.")
