"""What the workers and links of a crew have measured so far."""

from collections.abc import Sequence

import numpy as np

from dovetail.plan.ir import Plan
from dovetail.runtime.inference import BatchedUnroll
from dovetail.runtime.schedule import Crew


def measures_of(
    crew: Crew, plan: Plan, staleness: Sequence[int], restarts: int, lost: int
) -> dict[str, float]:
    """A crew's measures by name. `staleness` is that of the latest parcels, `lost` are unrolls that
    were begun in another process and never came."""
    found: dict[str, float] = {}
    if not crew.is_one and staleness:
        found["staleness"] = float(np.mean(staleness))
        found["staleness_max"] = float(max(staleness))
        found["dropped"] = float(crew.links.dropped)
    if len(plan.workers) > 1:
        found["restarts"] = float(restarts)
    calls = sum(program.calls for program, _ in crew.remote)
    if calls:
        spent = sum(worker.seconds.get(program.name, 0.0) for program, worker in crew.remote)
        inside = sum(program.inside for program, _ in crew.remote)
        found["message_ms"] = 1e3 * (spent - inside) / calls
        found["lost_unrolls"] = float(lost)
    for program, _ in crew.programs.acting:
        if isinstance(program, BatchedUnroll) and program.calls:
            found["act_batch"] = program.served / program.calls
    return found


def seconds_of(crew: Crew) -> dict[str, float]:
    """Seconds by fragment, an unroll's two halves apart, on average over its copies; waits by
    worker."""
    spent: dict[str, list[float]] = {}
    programs = [program for program, _ in (*crew.programs.acting, *crew.remote)]
    apart = {program.name for program in programs}
    for worker in crew.workers:
        for name, seconds in worker.seconds.items():
            if name not in apart:
                spent.setdefault(name, []).append(seconds)
        if not crew.is_one:
            spent[f"wait_{worker.name}"] = [worker.watch.waited]
    for program in programs:
        for name, seconds in program.seconds.items():
            spent.setdefault(name, []).append(seconds)
    return {name: sum(copies) / len(copies) for name, copies in spent.items()}
