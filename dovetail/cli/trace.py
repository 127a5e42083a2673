"""`dovetail trace`: `dovetail.write_trace`."""

from dovetail.cli.parser import Parser
from dovetail.cli.values import convert


def run(argv: list[str]) -> None:
    """Writes the trace and prints how to open it."""
    parser = Parser(
        "trace",
        "Writes what every worker of a run did when, as a trace for Perfetto or Chrome.",
        "dovetail trace runs/ppo-cartpole-v1-0-20260101-120000 --seconds 2",
    )
    parser.add_argument("run", metavar="RUN", help="A run's folder")
    parser.flag("--out", "File to write (default: trace.json in the run's folder)", "FILE")
    parser.flag("--seconds", "How much of the end of the run (default 10)", "S")
    words = parser.read(argv)

    import dovetail

    seconds = convert(words.get("seconds", "10"), float, "--seconds")
    path = dovetail.write_trace(words["run"], words.get("out"), seconds)
    print(f"The trace is in {path}: open it in Perfetto (Open trace file) or chrome://tracing.")
