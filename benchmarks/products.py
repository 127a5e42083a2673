"""What the matrix products of a gradient step alone take: no faster can it be, whoever asks.

    python -m benchmarks.products [--quick]

The products of each algorithm are counted in its own gradient step as JAX traces it (batch 256, two
hidden layers of 256), those of a step that comes only every so often by its share. How fast this
machine multiplies is measured with large matrices, where every library is at its best, and with
256×256 ones, of which an update has a handful at a time: numpy's BLAS and XLA, in turn, all cores.
Beside that stands what the gradient step alone takes, without acting, environment and replay: many
in one compiled loop, and one in each call, as where every step waits for an environment. The loop
has a core of its own as well, in another process, with a whole batch and with a core's part of it:
cores that tell each other nothing, not even their gradients, would be as fast as that part.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from benchmarks import protocol as p
from benchmarks.alone import ENVS, Alone, batch_shapes, bound, gradient_step
from benchmarks.run import Live
from dovetail.blocks.gradient_loop import KEYS

LARGE = 2048
CHAIN = 50
"""Small products, or gradient steps, one after another in a compiled call."""


def operations(algorithm: Any) -> float:
    """Floating-point operations of the products of one gradient step, on average."""
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), KEYS))
    step = partial(gradient_step, algorithm)
    traced = jax.make_jaxpr(step)(state, batch_shapes(algorithm), keys)
    return _operations(traced.jaxpr, 1 / getattr(algorithm, "policy_delay", 1))


def _operations(jaxpr: Any, share: float) -> float:
    """Those of a jaxpr and all within it; what a loop does at times counts by how often it is."""
    total = 0.0
    needed, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    for equation in needed.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            inner = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * inner * math.prod(equation.outvars[0].aval.shape)
        within = sum(_operations(part, share) for part in jaxprs_in_params(equation.params))
        total += within * (share if equation.primitive.name == "while" else 1.0)
    return total


def alone(name: str, rounds: int) -> dict[str, float]:
    """Milliseconds of a gradient step in a loop, in calls of its own, and in a loop on one core, of
    a whole batch and of a core's part: medians over rounds in which each has its turn."""
    made, cores = Alone(bound(name)), len(os.sched_getaffinity(0))
    taken: dict[str, list[float]] = {"loop_ms": [], "calls_ms": []}
    words = (
        f"--algorithm {name} --cores 1 --mode turns --total-steps {CHAIN} --num-envs 1 --unroll 1"
    )
    command = [sys.executable, "-m", "benchmarks.alone", *words.split()]
    with ExitStack() as stack:
        one_core = {
            loop: stack.enter_context(closing(Live([*command, "--parts", str(parts)])))
            for loop, parts in (("one_core_ms", 1), ("own_part_ms", cores))
        }
        for _ in range(rounds):
            for loop, count in (("loop_ms", CHAIN), ("calls_ms", 1)):
                began = time.perf_counter()
                for _ in range(CHAIN // count):
                    made.iterate(count)
                taken[loop].append(1e3 * (time.perf_counter() - began) / CHAIN)
            for loop, live in one_core.items():
                each = 1e3 / json.loads(live.turn())["steps_per_s"]
                taken.setdefault(loop, []).append(each)
    return {loop: statistics.median(times) for loop, times in taken.items()}


def fastest(call: Callable[[], Any], count: int) -> float:
    """Seconds of a call, at best of some."""
    call()
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)


def multiply(rounds: int) -> dict[str, float]:
    """Operations per second: medians over rounds in which each has its turn."""
    draw = np.random.default_rng(0).normal
    large = draw(size=(LARGE, LARGE)).astype(np.float32)
    small = draw(size=(p.CONTROL_BATCH, p.CONTROL_BATCH)).astype(np.float32)

    @jax.jit
    def chain(x: jax.Array, weights: jax.Array) -> jax.Array:
        def one(_: Any, x: jax.Array) -> jax.Array:
            return (x @ weights) / 16

        return jax.lax.fori_loop(0, CHAIN, one, x)

    product = jax.jit(jnp.matmul)
    pair = jnp.stack([small, small])
    once = 2.0 * LARGE**3, 2.0 * len(small) ** 3
    jobs: dict[str, tuple[float, Callable[[], Any]]] = {
        "numpy, large": (once[0], lambda: large @ large),
        "XLA, large": (once[0], lambda: product(large, large).block_until_ready()),
        "numpy, small": (once[1], lambda: small @ small),
        "XLA, small": (CHAIN * once[1], lambda: chain(small, small).block_until_ready()),
        "XLA, two small": (2 * CHAIN * once[1], lambda: chain(pair, pair).block_until_ready()),
    }
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, (work, call) in jobs.items():
            found[name].append(work / fastest(call, 30))
    return {name: statistics.median(speeds) for name, speeds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    rounds = 2 if parser.parse_args().quick else 7
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as under Local
    speeds = multiply(rounds)
    for name, speed in speeds.items():
        print(f"{name:16} {speed / 1e9:6.0f} GFLOP/s", flush=True)
    best = max(speeds.values())
    floors = {}
    for name in ENVS:
        work, found = operations(bound(name)), alone(name, 5 * rounds)
        least, most = 1e3 * work / best, best / work
        apart = 1e3 / found["own_part_ms"]
        floors[name] = {"operations": work, "least_ms": least, "most_per_s": most, **found}
        floors[name]["cores_apart_per_s"] = apart
        print(
            f"{name:16} {work / 1e6:6.0f} MFLOP a gradient step: at least {least:.2f} ms, "
            f"at most {most:.0f} steps/s; it takes {found['loop_ms']:.2f} ms in a loop, "
            f"{found['calls_ms']:.2f} ms in calls of its own, {found['one_core_ms']:.2f} ms on one "
            f"core, {found['own_part_ms']:.2f} ms with a core's part of the batch: cores that tell "
            f"each other nothing would do {apart:.0f} steps/s",
            flush=True,
        )
    print(json.dumps({"operations_per_s": speeds, "floors": floors}))


if __name__ == "__main__":
    main()
