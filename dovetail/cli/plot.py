"""`dovetail plot`: `dovetail.plot`."""

from dovetail.cli.parser import Parser


def run(argv: list[str]) -> None:
    """Draws the learning curves of runs into one figure and prints its path."""
    parser = Parser(
        "plot",
        "Draws learning curves. Runs that differ in their seed only become one curve, with a\n"
        "confidence band.",
        "dovetail plot runs/ppo-* --x time_s --out curves.png",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="The runs' folders")
    parser.flag("--x", "Column of metrics.csv across: env_steps (default) or time_s", "COLUMN")
    parser.flag(
        "--y",
        "Column of metrics.csv upwards (default the return, or else a loss)",
        "COLUMN",
    )
    parser.flag("--out", "The picture's file, .png, .svg or .pdf", "FILE")
    given = dict(parser.read(argv))
    axes = {name: given[name] for name in ("x", "y") if name in given}

    import dovetail

    print(f"The plot is {dovetail.plot(given['runs'], given.get('out'), **axes)}.")
