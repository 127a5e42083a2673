"""Ten thousand mutations of every kind of file that Dovetail reads.

    benchmarks/fuzz.py [NUMBER] [KIND …]

Prints how many were read and how many were refused; any other answer ends the program with its
traceback and the seed that repeats it.
"""

import collections
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from fuzzing import TARGETS, attempt


def main(number: int, kinds: list[str]) -> None:
    for name in kinds or TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            target, pristine = TARGETS[name], Path(folder) / "real" / "files"
            pristine.parent.mkdir()
            target.make(pristine)
            began, told = time.monotonic(), collections.Counter[str]()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for seed in range(number):
                answer = attempt(target, pristine, Path(folder) / "work", seed)
                told["read" if answer == "read" else "refused"] += 1
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            spent = time.monotonic() - began
            print(
                f"{name}: {told['read']} read, {told['refused']} refused, in {spent:.0f} s; "
                f"{grown:.0f} MB more memory",
                flush=True,
            )


if __name__ == "__main__":
    words = sys.argv[1:]
    count = int(words.pop(0)) if words and words[0].isdigit() else 10_000
    main(count, words)
