"""`dovetail replay`: `dovetail.serve_replay`."""

import json
import signal
import sys
import time

from dovetail.cli.experiment import experiment, understand, wrap_flag
from dovetail.cli.parser import Parser
from dovetail.cli.values import convert
from dovetail.errors import ServerGone

LOOK = 0.2
"""Seconds between two checks that the server is still running."""


def run(argv: list[str]) -> None:
    """Serves a replay until interrupted."""
    parser = Parser(
        "replay",
        "Serves the replay of an algorithm, in a process that trainings share: give them the\n"
        "address that it prints (--replay ADDRESS), and to other writers (ReplayClient). It ends\n"
        "with Ctrl-C or SIGTERM. The key is in a file that only you can read.",
        "dovetail replay dqn --env CartPole-v1 --num-envs 32 --listen 127.0.0.1:7777",
    )
    parser.usage = "dovetail replay ALGORITHM --env ENV [--option value …]"
    parser.flag("--env", "Environment: CartPole-v1, gymnax:CartPole-v1, my_env.py:MyEnv", "ENV")
    wrap_flag(parser)
    parser.flag("--num-envs", "Environments of all that write to it together (default 64)", "N")
    parser.flag("--listen", "Be reached over TCP, not only from this machine", "HOST:PORT")
    parser.flag("--durable", "Keep it in this folder, and go on with what is there", "FOLDER")
    parser.flag(
        "--samples-per-insert", "Mean number of samples of an item; inserts or samples wait", "X"
    )
    parser.flag("--config", "TOML file with any of these; the command line wins", "FILE")
    parser.flag("--json", "Print the address as one line of JSON")
    words = understand(parser, argv)

    import dovetail
    from dovetail.envs.wrapping import with_wraps

    wanted = experiment(words, "replay")
    kinds = {"num-envs": int, "listen": str, "durable": str, "samples-per-insert": float}
    given = {
        name.replace("-", "_"): convert(words.values[name], kind, f"--{name}")
        for name, kind in kinds.items()
        if name in words.values
    }
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    env = with_wraps(wanted.env, wanted.wrap)
    server, address = dovetail.serve_replay(wanted.algorithm.build(), env, **given)
    with server:
        if server.lost is not None:
            print(f"dovetail: Part of the replay is lost: {server.lost}.", file=sys.stderr)
        told = json.dumps({"address": address, "pid": server.address.pid})
        print(told if words.values.get("json") else f"The replay is served at {address}")
        sys.stdout.flush()
        try:
            while server.runs:
                time.sleep(LOOK)
        except KeyboardInterrupt:
            return
        raise ServerGone(server.how_it_ended())
