"""The entry point: dispatches to a command and turns failures into messages and exit codes.

Exit codes: 0 success, 1 an error in Dovetail, 2 an error that the user can fix, 130 interrupted
(143 by SIGTERM), 141 broken pipe on standard output.
"""

import importlib
import os
import select
import sys
import threading
import traceback
from collections.abc import Sequence

from dovetail.cli.interrupts import insisting
from dovetail.errors import UserError, nearest, one_sentence, user_line

COMMANDS = {
    "train": "trains an algorithm on an environment, or resumes a run",
    "eval": "evaluates the policy that a run learned",
    "watch": "shows it at work, in a video or in a window",
    "plot": "draws the learning curves of runs",
    "explain": "shows an algorithm's graph, and the plan that a strategy makes of it",
    "top": "follows a run: what each worker does, and where its time goes",
    "replay": "serves a replay for several trainings to share",
    "doctor": "says what this machine has, or why a run is stuck",
    "trace": "writes what a run's workers did when, for Perfetto or Chrome",
    "data": "works with recorded data: info, merge, split, export, repair, estimate",
    "generate": "completes prompts with a language model",
    "list": "lists algorithms, strategies and environment back ends",
}
"""The commands with a one-line help each; `dovetail.cli.<command>` defines its `run(argv)`."""

LEAVE_SECONDS = 3.0
"""How long the process may take to end once it was interrupted."""

MODULES = {"eval": "evaluate", "list": "listing"}
"""Commands whose module has another name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    if debug:
        words.remove("--debug")
    with insisting(last=argv is None) as interrupts:
        try:
            _dispatch(words)
            sys.stdout.flush()
        except SystemExit as ended:  # argparse has printed help
            return ended.code if isinstance(ended.code, int) else 0
        except KeyboardInterrupt as interrupted:
            interrupts.over()
            code = getattr(interrupted, "code", 130)
            if argv is None:
                _leave_in_time(code)
            return _fail(str(interrupted) or "Interrupted.", code, debug)
        except Exception as error:
            if interrupts.seen:  # an extension module may turn Ctrl-C into another exception
                return _fail("Interrupted.", 130, debug)
            return _explain(error, debug)
    return 0


def _explain(error: Exception, debug: bool) -> int:
    """Prints the error; returns the exit code."""
    if isinstance(error, UserError):
        return _fail(str(error), 2, debug)
    if _reader_has_gone(error):
        return 141
    if isinstance(error, OSError) and error.filename and not user_line(error):
        return _fail(f"Cannot use {error.filename}: {error.strerror}.", 2, debug)
    hint = "" if debug else " Run with --debug for the traceback."
    # What arises in the user's own code is the user's to repair, with Dovetail's code 2.
    return _fail(one_sentence(error) + hint, 2 if user_line(error) else 1, debug)


def _dispatch(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return
    command, *rest = words
    if command == "--version":
        from importlib.metadata import version

        print(f"dovetail {version('dovetail')}")
        return
    if command not in COMMANDS:
        what = "option" if command.startswith("-") else "command"
        hint = nearest(command.lower(), COMMANDS)
        raise UserError(f"dovetail has no {what} {command!r}: {hint}")
    importlib.import_module(f"dovetail.cli.{MODULES.get(command, command)}").run(rest)


def usage() -> str:
    """The text of `dovetail --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {line}" for name, line in COMMANDS.items()]
    return "\n".join(
        [
            "usage: dovetail COMMAND …",
            "",
            "Write a reinforcement-learning algorithm once; a strategy decides how it runs.",
            "",
            "commands:",
            *lines,
            "",
            "`dovetail COMMAND --help` says more; --debug adds the traceback to any error.",
            "",
            "example:",
            "  dovetail train ppo --env CartPole-v1 --until 475",
        ]
    )


def _fail(sentence: str, code: int, debug: bool) -> int:
    """Prints the message to standard error, with the traceback if `debug`; returns `code`."""
    if debug:
        traceback.print_exc()
    print(f"dovetail: {sentence}", file=sys.stderr)
    return code


def _leave_in_time(code: int) -> None:
    """Ends the process soon, even if Python waits for threads that are stuck or still compile."""
    ending = threading.Timer(LEAVE_SECONDS, os._exit, (code,))
    ending.daemon = True
    ending.start()


def _reader_has_gone(error: Exception) -> bool:
    """Whether standard output is a pipe without a reader; if so, redirects it to /dev/null.

    Otherwise Python would fail again when it flushes standard output at exit.
    """
    if not isinstance(error, BrokenPipeError):
        return False
    try:
        output = sys.stdout.fileno()
    except OSError:
        return False
    pipe = select.poll()
    pipe.register(output, 0)
    if not pipe.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True
