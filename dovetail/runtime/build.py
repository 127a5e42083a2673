"""Builds the programs of a plan's workers and the environments they step.

Copies of the actor on one device share their compiled programs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import jax

from dovetail.envs.resolve import Env
from dovetail.graph.ir import Arrival, Fragment, Graph, Node, Python, Unroll
from dovetail.plan.ir import Instance, LinkKind, Plan
from dovetail.runtime.batched_unroll import BatchedUnroll
from dovetail.runtime.devices import Device
from dovetail.runtime.environments import ActorEnvironments, make_environments
from dovetail.runtime.host_unroll import HostUnroll
from dovetail.runtime.joins import CountPieces
from dovetail.runtime.packing import Bundle
from dovetail.runtime.placement import names_many_devices, pieces, stepping_for
from dovetail.runtime.programs import FragmentProgram, Program, PythonProgram, UnrollProgram
from dovetail.runtime.replicated import ReplicatedProgram
from dovetail.runtime.turns import Compiled
from dovetail.runtime.worker import RunningWorker

NodeT = TypeVar("NodeT", Fragment, Unroll)


class Programs:
    """The programs of a plan's workers. Close it: environments may be processes."""

    def __init__(self, graph: Graph, plan: Plan, env: Env, patience: float) -> None:
        self.acting: list[tuple[HostUnroll, RunningWorker]] = []
        """The unrolls with host environments, each with its worker."""
        self.envs_of: dict[str, ActorEnvironments] = {}
        """Their environments, by the name of the acting worker."""
        self._graph, self._plan, self._env, self._patience = graph, plan, env, patience
        # On a single device nothing has to be moved, which saves a check per array and call.
        self._devices = jax.devices() if names_many_devices(plan) else None
        self._built: list[Program] = []
        self._python: list[PythonProgram] = []
        self._shared: dict[tuple[str, int | None], Program] = {}
        """By the name of the node and the number of the device."""
        self._compiled: dict[str, Compiled] = {}

    @property
    def many_devices(self) -> bool:
        """Whether the programs run on several devices."""
        return self._devices is not None

    def compile(self) -> None:
        """Compiles every fragment for the shapes in the graph."""
        for program in self._built:
            if isinstance(program, FragmentProgram | ReplicatedProgram):
                program.compile()

    def close(self) -> None:
        """Closes the environments and the resources of plain Python."""
        for program in self._python:
            program.close()
        for actor_envs in self.envs_of.values():
            actor_envs.close()

    def build(self, node: Node, worker: RunningWorker) -> Program:
        """Builds the program of a node; call it for a worker's nodes in execution order."""
        if isinstance(node, Unroll):
            return self._unroll(node, worker)
        if isinstance(node, Python):
            self._python.append(PythonProgram(node))
            return self._python[-1]
        devices = self._plan.worker(worker.name).devices
        if len(devices) == 1 or self._plan.copies_of(node.side) == 1:
            bundles = [*worker.bundles, *self._beside(node, worker)]
            return self._once(node, devices[0], partial(self._fragment, bundles))
        replicas = [jax.devices()[d] for d in devices]
        made = ReplicatedProgram(node, self._graph, replicas, self._pieces(node))
        self._built.append(made)
        return made

    def _pieces(self, node: Fragment) -> CountPieces:
        """The number of pieces in which each input of a fragment arrives."""

        def count(arrival: Arrival) -> int:
            return pieces(self._graph, self._plan, arrival, node.side)

        return count

    def _beside(self, node: Fragment, worker: RunningWorker) -> list[Bundle]:
        """The slab that a fragment takes from the preceding unroll on the same worker, if any."""
        if node.side in self._graph.acting:
            return []
        # The last unroll before this node: nodes are built in execution order.
        unrolls = [program for program, owner in self.acting if owner is worker]
        found = [u.slab.bundle(node.inputs) for u in unrolls[-1:] if u.slab is not None]
        return [bundle for bundle in found if bundle is not None]

    def _once(
        self, node: NodeT, device: int, make: Callable[[NodeT, Device | None], Program]
    ) -> Program:
        """Builds a program once per device; copies on the same device share it."""
        key = (node.name, device if self._devices is not None else None)
        if key not in self._shared:
            self._shared[key] = make(node, self._device(device))
            # `compile` compiles it once for all copies that share it.
            self._built.append(self._shared[key])
        return self._shared[key]

    def _device(self, number: int) -> Device | None:
        """The device with this number; None if the plan uses only one."""
        return None if self._devices is None else self._devices[number]

    def _fragment(
        self, bundles: Sequence[Bundle], node: Fragment, device: Device | None
    ) -> FragmentProgram:
        """The program of a fragment; `bundles` are those of its worker."""
        graph = self._graph
        own = [b for b in bundles if b.taken[0] in node.inputs]
        return FragmentProgram(
            node,
            self._pieces(node),
            device,
            {unroll.side for unroll in graph.unrolls if unroll.step.program is None},
            own,
            graph.state,
            graph.tables,
        )

    def _unroll(self, node: Unroll, worker: RunningWorker) -> Program:
        """The program of an unroll: fused with its environments, stepped here, or batched."""
        plan, jax_env = self._plan, self._env.jax
        number = plan.worker(worker.name).devices[0]
        # A fused link means that the environments are traced into the program that acts.
        if self._stepping(node) is LinkKind.FUSED:
            assert jax_env is not None
            return self._once(node, number, lambda u, d: UnrollProgram(u, jax_env, self._graph, d))
        acting = next(i for i in plan.instances_of(f"{node.name}.act") if i.worker == worker.name)
        actor_envs = self._actor_envs(node, worker.name, acting)
        compiled = self._compiled.setdefault(node.name, Compiled(node))
        device = self._device(number)
        if actor_envs.groups:
            batch = plan.batch or self._graph.actor_envs
            program: HostUnroll = BatchedUnroll(
                node,
                self._graph,
                compiled,
                actor_envs,
                worker.watch,
                worker.track,
                batch,
                plan.batch_seconds,
                device,
            )
        else:
            program = HostUnroll(
                node, self._graph, compiled, actor_envs, worker.watch, worker.track, device
            )
        self.acting.append((program, worker))
        return program

    def _stepping(self, node: Unroll) -> LinkKind:
        """The kind of link that carries actions to the environments."""
        return next(
            link.kind
            for link in self._plan.links
            if link.boundary == "action" and link.source == f"{node.name}.act"
        )

    def _actor_envs(self, node: Unroll, worker: str, acting: Instance) -> ActorEnvironments:
        if worker not in self.envs_of:
            steps = stepping_for(self._plan, node, acting)
            self.envs_of[worker] = make_environments(
                self._plan, self._env, acting, steps, self._patience
            )
        return self.envs_of[worker]
