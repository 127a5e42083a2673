"""`dovetail top`: shows a run's workers live, from its telemetry and status files."""

import sys
import time

from dovetail.cli.parser import Parser
from dovetail.cli.values import convert


def run(argv: list[str]) -> None:
    """Shows how the workers spend their time, until the run ends or once."""
    parser = Parser(
        "top",
        "Follows a run: what each worker does, and where its time goes. Ctrl-C ends it.",
        "dovetail top runs/ppo-cartpole-v1-0-20260101-120000",
    )
    parser.add_argument("run", metavar="RUN", help="A run's folder")
    parser.flag("--every", "Seconds between two looks (default 2)", "S")
    parser.flag("--once", "Look once")
    words = parser.read(argv)
    every = convert(words.get("every", "2"), float, "--every")

    import dovetail

    once = "once" in words or not sys.stdout.isatty()
    while True:
        found = [f"{finding.text}" for finding in dovetail.doctor(words["run"])]
        screen = "\n".join([*found, "", str(dovetail.analyze(words["run"]))])
        print(screen if once else f"\x1b[2J\x1b[H{screen}", flush=True)
        if once or found[0].startswith("It has ended"):
            return
        time.sleep(every)
