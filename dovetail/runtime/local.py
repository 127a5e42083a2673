"""The one-machine runtime: builds the programs of a plan and runs them.

It knows nothing about algorithms or strategies.
"""

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import jax

from dovetail.envs.resolve import Env
from dovetail.graph.ir import Graph
from dovetail.graph.unroll import ActorState
from dovetail.plan.ir import Plan
from dovetail.runtime.arrays import Leaf
from dovetail.runtime.execution import Execution
from dovetail.runtime.fused import FusedRun
from dovetail.runtime.heartbeat import Activity
from dovetail.runtime.remote import RemoteWorkers
from dovetail.runtime.report import Pending
from dovetail.runtime.single_steps import StepRun, single_steps

PATIENCE = 30.0
"""Seconds without progress after which a worker counts as stuck."""


class LocalRuntime:
    """A `Runtime` in this process: selects how to run a plan, and compiles in the background."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        env: Env,
        seeds: int = 1,
        patience: float = PATIENCE,
        tell: Callable[[str], None] = lambda _: None,
        host: RemoteWorkers | None = None,
        here: Collection[str] | None = None,
    ) -> None:
        """`tell` receives messages for the user, such as restarts and stuck workers.

        `host` connects to the workers of the plan that are not `here`, in this process.
        """
        self.graph = graph
        self.plan = plan
        self.compile_seconds = 0.0
        self._compiling: Future[float] | None = None
        self._run: FusedRun | StepRun | Execution
        if plan.fused:
            self._run = FusedRun(graph, plan, env, seeds, patience, tell)
        elif single_steps(graph, plan, env):
            self._run = StepRun(graph, plan, env, patience, tell)
        else:
            self._run = Execution(graph, plan, env, patience, tell, host, here)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds spent so far, by fragment."""
        return self._run.seconds

    def status(self) -> list[Activity]:
        """The current activity of every worker."""
        return self._run.status()

    def prepare(self, state: object, actor: ActorState) -> None:
        """Starts compiling for states of these shapes, in the background."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="dovetail-compile")
        self._compiling = pool.submit(_timed, partial(self._run.compile, state, actor))
        # The thread ends after its only task.
        pool.shutdown(wait=False)

    def load(
        self,
        state: object,
        actor: ActorState,
        *,
        episode_keys: jax.Array | None = None,
        turn: int = 0,
        watched: Sequence[int] = (),
    ) -> ActorState:
        """Sets the states at iteration `turn` and waits until everything is compiled."""
        if self._compiling is None:
            self.prepare(state, actor)
        keys = actor.keys if episode_keys is None else episode_keys
        begun = self._run.load(state, actor, keys, turn, watched)
        warm_up = _timed(self._run.warm_up)
        assert self._compiling is not None
        # The two overlap, so the longer one counts.
        self.compile_seconds = max(warm_up, self._compiling.result())
        return begun

    def ask_to_stop(self) -> None:
        """Ends what hangs and restarts nothing from now on; a signal handler may call it."""
        self._run.ask_to_stop()

    def refill(self, data: Sequence[Leaf]) -> None:
        """Replaces the recorded steps that iterations sample; no iteration may be running."""
        self._run.refill(data)

    def advance(self, iterations: int) -> Pending:
        """Starts that many iterations; wait for the result before the next call."""
        return self._run.advance(iterations)

    def close(self) -> None:
        """Stops everything it started; safe to call twice."""
        self._run.close()


def _timed(function: Callable[[], None]) -> float:
    """Calls the function and returns its duration in seconds."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began
