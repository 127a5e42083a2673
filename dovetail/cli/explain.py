"""`dovetail explain`: `dovetail.explain`."""

from pathlib import Path

from dovetail.cli.experiment import (
    deployment,
    experiment,
    replay,
    replay_flags,
    understand,
    wrap_flag,
)
from dovetail.cli.parser import Parser


def run(argv: list[str]) -> None:
    """Prints the graph and the plan, writes them as SVG, or prints a run's measurements."""
    if "--analyze" in argv:
        _analyze(argv)
        return
    parser = Parser(
        "explain",
        "Shows the graph that an algorithm traces to (fragments, edges, bytes, FLOPs) and the\n"
        "plan that a strategy makes of it. Nothing is trained. With --analyze it shows\n"
        "where the time of a run went, live or finished.",
        "dovetail explain ppo --env gymnax:CartPole-v1 --strategy fused --svg ppo.svg",
        "dovetail explain impala --env CartPole-v1 --strategy actor-learner --cluster local",
        "dovetail explain runs/ppo-cartpole-v1-0-20260101-120000 --analyze",
    )
    parser.usage = "dovetail explain ALGORITHM --env ENV [--option value …] | RUN --analyze"
    parser.flag("--env", "Environment: CartPole-v1, gymnax:CartPole-v1, my_env.py:MyEnv", "ENV")
    wrap_flag(parser)
    parser.flag("--strategy", "Strategy: see `dovetail list`, or file.py:Name", "STRATEGY")
    parser.flag("--cluster", "Run on Ray: local, auto or host:port", "CLUSTER")
    parser.flag("--deploy", "TOML file that says what goes where on the cluster", "FILE")
    replay_flags(parser)
    parser.flag("--analyze", "What was measured in the run whose folder is named, not an algorithm")
    parser.flag("--svg", "Draw the graph into this file", "FILE")
    parser.flag("--json", "Print the graph and the plan as JSON")
    words = understand(parser, argv)

    import dovetail

    wanted = experiment(words, "explain")
    strategy = wanted.strategy.build() if wanted.strategy else None
    where, _ = deployment(words)
    kept, _ = replay(words)
    algorithm = wanted.algorithm.build()
    more = where | kept | wanted.wraps
    explanation = dovetail.explain(algorithm, wanted.env, strategy, **more)
    if "svg" in words.values:
        Path(words.values["svg"]).write_text(explanation.svg(), encoding="utf-8")
    print(explanation.json() if "json" in words.values else explanation)
    if "svg" in words.values and "json" not in words.values:
        print(f"The graph is drawn in {words.values['svg']}.")


def _analyze(argv: list[str]) -> None:
    """Prints a run's measured times."""
    parser = Parser("explain", "", "dovetail explain RUN --analyze")
    parser.add_argument("run", metavar="RUN", help="A run's folder")
    parser.flag("--analyze", "Show what was measured")
    parser.flag("--json", "Print it as JSON")
    words = parser.read(argv)

    import dovetail

    found = dovetail.analyze(words["run"])
    print(found.json() if "json" in words else found)
