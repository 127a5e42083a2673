"""Ray as a host: a process is a Ray actor, and a reference is an object in Ray's store."""

import contextlib
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dovetail.errors import UserError
from dovetail.hosts.interface import LOOK_SECONDS, Pulse, whole
from dovetail.hosts.ray.actors import ActorProcess, PackedJob, SideProcess
from dovetail.hosts.ray.connection import node_names
from dovetail.plan.ir import Plan, Process
from dovetail.runtime.remote import Payload, Reply, WorkerLost
from dovetail.runtime.wire import SentValues

T = TypeVar("T")


class RayHost:
    """Starts the processes of the other workers for one learner process."""

    def __init__(self, plan: Plan, order: PackedJob) -> None:
        self._processes = {process.name: process for process in plan.processes}
        self._order = order

    def start(self, name: str, again: bool) -> "RayProcess":
        """Creates the Ray actor, preferably on the node in the plan; `again`, on any node."""
        return RayProcess(self._processes[name], self._order, again)

    def share(self, values: SentValues) -> Payload:
        """Puts one object for all processes; Ray frees it with the last reference."""
        return ray.put(values)

    def fetch(self, payload: Payload) -> SentValues:
        """Gets an object from the store; returns any other payload unchanged."""
        found = ray.get(payload) if isinstance(payload, ray.ObjectRef) else payload
        return cast(SentValues, found)


class RayProcess:
    """A Ray actor with some workers."""

    def __init__(self, process: Process, order: PackedJob, again: bool) -> None:
        self._process = process
        ids = {name: node for node, name in node_names(ray.nodes()).items()}
        strategy: str | NodeAffinitySchedulingStrategy = "SPREAD"
        if process.node in ids and not again:
            strategy = NodeAffinitySchedulingStrategy(ids[process.node], soft=True)
        # Ray makes the methods of a handle at run time, so they have no types.
        self._actor: Any = (
            ray.remote(SideProcess if process.keeps else ActorProcess)
            .options(
                num_cpus=process.cpus,
                num_gpus=process.gpus,
                resources=dict(process.others) or None,
                max_concurrency=len(process.workers) + 2,  # plus set_up and pulse
                max_restarts=0,  # supervision restarts it, with its state
                scheduling_strategy=strategy,
            )
            .remote(order, process.rank, process.name)
        )

    def set_up(self) -> "RayCall[str]":
        """Builds the workers."""
        return RayCall(self._actor.set_up.remote())

    def call(self, method: str, *args: object) -> "RayCall[Any]":
        """Calls a method of its workers."""
        return RayCall(getattr(self._actor, method).remote(*args))

    def run(
        self, worker: str, chain: int, payloads: Sequence[Payload], shared: Sequence[bool]
    ) -> "RayReply":
        """Runs a chain; each shared payload is a separate result, which stays on its node."""
        run = self._actor.run.options(num_returns=1 + sum(shared))
        made = run.remote(worker, chain, tuple(shared), *payloads)
        return RayReply(made if isinstance(made, list) else [made], shared)

    def pulse(self, worker: str) -> Pulse | None:
        """The progress of a worker."""
        try:
            return ray.get(self._actor.pulse.remote(worker), timeout=LOOK_SECONDS)
        except GetTimeoutError:
            raise TimeoutError from None
        except RayError:
            return None  # the pending call raises it

    def awaited(self) -> str:
        """The resources it needs and those that are free, in words."""
        process, free = self._process, ray.available_resources()
        return (
            f"{process.cpus:g} CPUs and {process.gpus:g} GPUs; free on the whole cluster are "
            f"{free.get('CPU', 0):g} and {free.get('GPU', 0):g}"
        )

    def kill(self) -> None:
        """Kills the Ray actor."""
        with contextlib.suppress(Exception):
            ray.kill(self._actor)


class RayCall(Generic[T]):
    """A pending call."""

    def __init__(self, result: "ray.ObjectRef[T]") -> None:
        self._result = result

    def get(self, limit: float | None = None) -> T:
        """Waits for the result; raises errors as if the call had been local."""
        try:
            return ray.get(self._result, timeout=limit)
        except GetTimeoutError:
            raise TimeoutError from None
        except RayTaskError as error:
            raise _cause(error) from error
        except RayError as error:
            raise WorkerLost(_reason(error)) from error


class RayReply:
    """A pending `run`: the first result is the reply, the others are its shared payloads."""

    def __init__(self, results: "list[ray.ObjectRef[Any]]", shared: Sequence[bool]) -> None:
        self._call = RayCall[Reply](results[0])
        self._references, self._shared = results[1:], shared

    def get(self, limit: float | None = None) -> Reply:
        """Waits for the reply, with references in place of its shared payloads."""
        return whole(self._call.get(limit), self._shared, self._references)


def _cause(error: RayTaskError) -> BaseException:
    """The error a method raised; a lost argument counts as a lost worker."""
    cause = error.cause
    if isinstance(cause, RayError):
        return WorkerLost(_reason(cause))
    return cause if isinstance(cause, BaseException) else UserError(str(error))


def _reason(error: RayError) -> str:
    """The reason of a failure, in a few words."""
    text = str(error)
    if not isinstance(error, RayActorError):
        return "what it was sent is lost, with the process that made it"
    if "worker process has died" not in text and "node" in text:
        return "its node died"
    if "SYSTEM_ERROR" in text:
        return "its process was killed"
    return text.strip().splitlines()[0]
