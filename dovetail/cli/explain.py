"""`dovetail explain`: `dovetail.explain`."""

from pathlib import Path

from dovetail.cli.experiment import deployment, experiment, understand
from dovetail.cli.parser import Parser


def run(argv: list[str]) -> None:
    """Prints the graph and the plan, or writes the graph as a drawing."""
    parser = Parser(
        "explain",
        "Shows the graph that an algorithm traces to (fragments, edges, bytes, FLOPs) and the\n"
        "plan that a distribution policy makes of it. Nothing is trained.",
        "dovetail explain ppo --env gymnax:CartPole-v1 --policy fused --svg ppo.svg",
        "dovetail explain impala --env CartPole-v1 --policy actor-learner --cluster local",
    )
    parser.usage = "dovetail explain ALGORITHM --env ENV [--option value …]"
    parser.flag("--env", "Environment: CartPole-v1, gymnax:CartPole-v1, my_env.py:MyEnv", "ENV")
    parser.flag("--policy", "Distribution policy: see `dovetail list`, or file.py:Name", "POLICY")
    parser.flag("--cluster", "Run on Ray: local, auto or host:port", "CLUSTER")
    parser.flag("--deploy", "TOML file that says what goes where on the cluster", "FILE")
    parser.flag("--svg", "Draw the graph into this file", "FILE")
    parser.flag("--json", "Print the graph and the plan as JSON")
    words = understand(parser, argv)

    import dovetail

    wanted = experiment(words, "explain")
    policy = wanted.policy.build() if wanted.policy else None
    where, _ = deployment(words)
    explanation = dovetail.explain(wanted.algorithm.build(), wanted.env, policy, **where)
    if "svg" in words.values:
        Path(words.values["svg"]).write_text(explanation.svg(), encoding="utf-8")
    print(explanation.json() if "json" in words.values else explanation)
    if "svg" in words.values and "json" not in words.values:
        print(f"The graph is drawn in {words.values['svg']}.")
