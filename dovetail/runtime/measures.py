"""Measurements of the workers and channels of a plan."""

from collections.abc import Sequence

import numpy as np

from dovetail.plan.ir import Plan
from dovetail.runtime.batched_unroll import BatchedUnroll
from dovetail.runtime.schedule import Workers


def measures_of(
    workers: Workers, plan: Plan, staleness: Sequence[int], restarts: int, lost: int
) -> dict[str, float]:
    """The measures by name, as metrics report them: docs/metrics.md lists them.

    `staleness` lists that of recent unrolls; `lost` counts unrolls begun in another process that
    never arrived.
    """
    found: dict[str, float] = {}
    if not workers.is_one and staleness:
        found["staleness"] = float(np.mean(staleness))
        found["staleness_max"] = float(max(staleness))
        found["dropped"] = float(workers.channels.dropped)
    if len(plan.workers) > 1:
        found["restarts"] = float(restarts)
    calls = sum(program.calls for program, _ in workers.remote)
    if calls:
        spent = sum(worker.seconds.get(program.name, 0.0) for program, worker in workers.remote)
        inside = sum(program.inside for program, _ in workers.remote)
        # The time of the round trips, without the work in the other processes.
        found["message_ms"] = 1e3 * (spent - inside) / calls
        found["lost_unrolls"] = float(lost)
    for program, _ in workers.programs.acting:
        if isinstance(program, BatchedUnroll) and program.calls:
            found["act_batch"] = program.served / program.calls
    return found


def seconds_of(workers: Workers) -> dict[str, float]:
    """Seconds by fragment, averaged over its copies, and waiting time by worker.

    The halves of an unroll are separate entries.
    """
    spent: dict[str, list[float]] = {}
    programs = [program for program, _ in (*workers.programs.acting, *workers.remote)]
    # These programs time their halves, or their fragments, themselves.
    apart = {program.name for program in programs}
    for worker in workers.all:
        for name, seconds in worker.seconds.items():
            if name not in apart:
                spent.setdefault(name, []).append(seconds)
        if not workers.is_one:
            spent[f"wait_{worker.name}"] = [worker.watch.waited]
    for program in programs:
        for name, seconds in program.seconds.items():
            spent.setdefault(name, []).append(seconds)
    return {name: sum(copies) / len(copies) for name, copies in spent.items()}
