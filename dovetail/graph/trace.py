"""Traces one iteration of an algorithm's loop into a jaxpr with boundaries in it.

`Tracing` is the `rl` that the algorithm sees while it is traced: each boundary binds one primitive
for all its leaves. Boundaries must stand in `iteration` itself; inside `jit`, `scan` or `cond` they
could not be cut, and are refused with the user's file and line.
"""

import dataclasses
import os
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval as pe

import dovetail
from dovetail.algorithm import Algorithm, Params, Task, Trajectory
from dovetail.envs import batched
from dovetail.envs.interface import EnvSpec, JaxEnv
from dovetail.errors import UserError
from dovetail.graph import primitives
from dovetail.graph.check import check_action, check_state, same_carry, scalar, two_results
from dovetail.graph.cost import flops
from dovetail.graph.cut import cut
from dovetail.graph.ir import Graph, Inner, Side
from dovetail.graph.traced import Traced, UnrollSpec
from dovetail.graph.unroll import (
    ActorState,
    Episodes,
    environment_keys,
    initial_actor,
    reset_carry,
    unroll_scan,
)
from dovetail.keys import part_keys, seed_key
from dovetail.replay.data import Data, data_leaves
from dovetail.replay.replay import Replay, insertion, of_shards, shards_of
from dovetail.replay.sample import Keys, Sample

PACKAGE = os.path.dirname(os.path.abspath(dovetail.__file__))
INTERNAL = ("graph", "functions", "networks", "envs", "algorithm.py", "planning.py")
"""Where a user's mistake shows but does not lie."""
for _name in INTERNAL:
    jex.source_info_util.register_exclusion(os.path.join(PACKAGE, _name))


def trace(
    algorithm: Algorithm,
    task: Task,
    env: JaxEnv | None = None,
    *,
    replicas: int = 1,
    actors: int | None = None,
    batch: int | None = None,
) -> Graph:
    """The graph of one of `replicas` equal shares of `task`, to the whole of which `algorithm` is
    bound; `env` is None when the environments live on the host.

    The environments are split among `actors`, as many as there are replicas unless given: each
    replica learns from actors / replicas of them. Acting serves `batch` environments per call,
    all of an actor's unless given.
    """
    actors = replicas if actors is None else actors
    _refuse_uneven(task.num_envs, replicas, "replicas")
    _refuse_uneven(task.num_envs, actors, "actors")
    _refuse_uneven(actors, replicas, "replicas", "actors")
    share = dataclasses.replace(task, num_envs=task.num_envs // actors)
    bound = algorithm.bind(task)
    traced = trace_iteration(bound, share, env, actors // replicas, batch, replicas)
    return cut(traced, bound, task.env, task.num_envs // replicas)


def _refuse_uneven(number: int, among: int, whom: str, what: str = "environments") -> None:
    if among < 1 or number < 1 or number % among:
        option = "--envs" if what == "environments" else "--actors"
        raise UserError(
            f"{number} {what} cannot be split evenly among {among} {whom}: choose a multiple of "
            f"{max(among, 1)} {what} ({option})."
        )


def trace_iteration(
    algorithm: Algorithm,
    task: Task,
    env: JaxEnv | None,
    pieces: int = 1,
    batch: int | None = None,
    replicas: int = 1,
) -> Traced:
    """Runs `iteration` on abstract values and records what it did.

    `task` is one actor's share; the learner, one of `replicas`, joins what `pieces` such actors
    send.
    """
    state = jax.eval_shape(algorithm.init, seed_key(0))
    actor = abstract_actor(algorithm, task, env)
    carry = jax.tree.map(np.asarray, algorithm.initial_carry())
    names: list[str] = []

    def one_iteration(state: Any, actor: ActorState) -> Any:
        rl = Tracing(algorithm, task.env, env, actor, carry, pieces, batch, replicas)
        new_state, metrics = two_results(algorithm, algorithm.iteration(rl, state))
        new_state, metrics = rl.landed(new_state), rl.landed(metrics)
        check_state(algorithm, state, new_state)
        names.extend(sorted(metrics))
        scalars = [scalar(name, metrics[name]) for name in names]
        return new_state, rl.actor, scalars, rl.episodes

    try:
        closed = jax.make_jaxpr(one_iteration)(state, actor)
    except jax.errors.ConcretizationTypeError as error:
        raise UserError(
            f"{_user_line(error)}: Python needs the value of a traced array here, in an if, a loop "
            f"or a conversion; use jnp.where, jax.lax.cond or jax.lax.scan instead."
        ) from error
    closed = _without_dead_code(closed)
    trees = jax.tree.structure(state), _sides(state), jax.tree.structure(actor)
    return Traced(closed, *trees, tuple(names), pieces, shards_of(state), data_leaves(state))


def _sides(state: Any) -> tuple[Side, ...]:
    """The side of every leaf of a state: what a replay holds is on its own."""
    parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, Replay))
    sides = [
        (Side.REPLAY if isinstance(part, Replay) else Side.LEARNER,) * len(jax.tree.leaves(part))
        for part in parts
    ]
    return tuple(side for several in sides for side in several)


def _user_line(error: Exception) -> str:
    """The file and line, outside Dovetail's machinery and JAX, that led to an error."""
    internal = tuple(os.path.join(PACKAGE, name) for name in INTERNAL)
    frames = traceback.extract_tb(error.__traceback__)
    jax_folder = os.path.dirname(os.path.abspath(jax.__file__))
    theirs = [f for f in frames if not f.filename.startswith((*internal, jax_folder))]
    last = theirs[-1] if theirs else frames[-1]
    return f"{last.filename}:{last.lineno}"


def _without_dead_code(closed: ClosedJaxpr) -> ClosedJaxpr:
    jaxpr, _ = pe.dce_jaxpr(closed.jaxpr, True, instantiate=True)
    return ClosedJaxpr(jaxpr, closed.consts)


def abstract_actor(algorithm: Algorithm, task: Task, env: JaxEnv | None) -> ActorState:
    """The shapes of the actors' state."""

    def build(key: jax.Array) -> ActorState:
        keys = environment_keys(key, task.num_envs)
        if env is not None:
            env_state, observation = batched.reset(env, keys)
        else:
            env_state, observation = (), _zeros(task.env.observation, task.num_envs)
        return initial_actor(env_state, observation, algorithm.initial_carry(), keys)

    return jax.eval_shape(build, seed_key(0))


class Tracing:
    """The `rl` of a traced iteration."""

    def __init__(
        self,
        algorithm: Algorithm,
        spec: EnvSpec,
        env: JaxEnv | None,
        actor: ActorState,
        initial_carry: Any,
        pieces: int = 1,
        batch: int | None = None,
        replicas: int = 1,
    ) -> None:
        self.actor = actor
        self._replicas = replicas
        self._batch = batch
        self._pieces = pieces
        self._received: dict[int, Any] = {}
        self.episodes: Episodes | None = None
        self._algorithm = algorithm
        self._spec = spec
        self._env = env
        self._initial_carry = initial_carry
        self._level = jex.core.get_opaque_trace_state()

    def broadcast(self, tree: Any) -> Any:
        """Learner → actors."""
        return self._cross("broadcast", tree)

    def gather(self, tree: Any) -> Any:
        """Actors → learner."""
        self._refuse_nested("gather")
        for leaf in jax.tree.leaves(tree):
            self._refuse_unsplit(leaf, "gather")
        return self._cross("gather", tree, pieces=self._pieces)

    def insert(
        self,
        replay: Replay,
        trajectory: Trajectory,
        rows: Any,
        final: Any = None,
        priorities: Any = None,
    ) -> Replay:
        """Actors → replay."""
        self._refuse_nested("insert")
        sent = insertion(trajectory, rows, final, priorities)
        for leaf in jax.tree.leaves(sent):
            self._refuse_unsplit(leaf, "insert")
        _refuse_uneven(self._pieces, replay.shards, "shards of the replay", "actors")
        pieces = self._pieces // replay.shards
        return replay.insert(self._cross("insert", sent, pieces=pieces), pieces)

    def sample(self, replay: Replay, draws: jax.Array) -> tuple[Replay, Sample]:
        """Replay → learner."""
        shards = replay.shards
        if draws.ndim != 2 or draws.shape[1] % shards:
            among = f" in {shards} equal parts, one for each shard" if shards > 1 else ""
            raise UserError(
                f"{primitives.where(jex.source_info_util.current())}: rl.sample takes draws "
                f"[batches, items]{among}, but was given {list(draws.shape)}: choose another "
                f"number of items (--batch-size)."
            )
        replay, found = replay.sample(self._cross("draw", draws, pieces=shards))
        return replay, of_shards(self._cross("sample", found, pieces=shards), shards)

    def recall(self, data: Data, draws: jax.Array) -> Sample:
        """Recorded data → learner, on whose side they are; a replica takes its part of draws."""
        if draws.ndim != 2 or draws.shape[1] % self._replicas:
            among = f" in {self._replicas} equal parts, one for each learner replica"
            raise UserError(
                f"{primitives.where(jex.source_info_util.current())}: rl.recall takes draws "
                f"[batches, items]{among if self._replicas > 1 else ''}, but was given "
                f"{list(draws.shape)}: choose another number of items (--batch-size)."
            )
        return data.sample(primitives.part(draws, self._replicas))

    def update_priorities(self, replay: Replay, keys: Keys, priorities: jax.Array) -> Replay:
        """Learner → replay."""
        sent = self._cross("update_priorities", (keys, priorities), pieces=replay.shards)
        return replay.update_priorities(*sent)

    def reduce(self, tree: Any) -> Any:
        """Actors → learner, averaged: over the actors of every replica too."""
        return primitives.mean(self._cross("reduce", tree))

    def own_keys(self, keys: jax.Array, items: int) -> jax.Array:
        """The keys by which a learner replica draws for its part of a batch."""
        if self._replicas == 1:
            return keys
        number = primitives.part(jnp.arange(self._replicas)[None], self._replicas)[0, 0]
        return part_keys(keys, number, items, self._replicas)

    def mean(self, tree: Any) -> Any:
        """Averages over learner replicas."""
        return primitives.mean(tree)

    def unroll(
        self, act: Callable[..., Any], params: Params, length: int, bootstrap: Any = None
    ) -> Trajectory:
        """Actors ↔ environments."""
        self._refuse_nested("unroll")
        if isinstance(length, Tracer) or length != int(length) or length < 1:
            raise UserError(
                f"{primitives.where(jex.source_info_util.current())}: rl.unroll needs a whole "
                f"number of steps, at least 1, but its length is {length!r}."
            )
        spec, operands = self._describe(act, params, length, bootstrap)
        leaves = operands + jax.tree.leaves(self.actor)
        outputs = primitives.unroll_p.bind(*leaves, spec=spec)
        size = spec.trajectory_tree.num_leaves
        actor_tree = jax.tree.structure(self.actor)
        self.actor = actor_tree.unflatten(outputs[size : size + actor_tree.num_leaves])
        ended = Episodes(*outputs[size + actor_tree.num_leaves :])
        self.episodes = (
            ended if self.episodes is None else jax.tree.map(jnp.add, self.episodes, ended)
        )
        return spec.trajectory_tree.unflatten(outputs[:size])

    def landed(self, tree: Any) -> Any:
        """What `iteration` returns, or what crosses again, with whatever just crossed a boundary
        made its side's own: pieces are joined, and links filled, by fragments."""
        return jax.tree.map(
            lambda x: jax.lax.optimization_barrier(x) if id(x) in self._received else x, tree
        )

    def _cross(self, name: str, tree: Any, **how: int) -> Any:
        self._refuse_nested(name)
        leaves, structure = jax.tree.flatten(self.landed(tree))
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        arrived = primitives.crossing_p[name].bind(*arrays, **how)
        self._received |= {id(tracer): tracer for tracer in arrived}  # kept, so no id comes again
        return structure.unflatten(arrived)

    def _refuse_unsplit(self, leaf: Any, name: str) -> None:
        """What is joined along the environments must have such an axis."""
        axis, envs = primitives.PARTS_AXIS, self.actor.step.shape[0]
        if jnp.ndim(leaf) <= axis or jnp.shape(leaf)[axis] != envs:
            raise UserError(
                f"{primitives.where(jex.source_info_util.current())}: rl.{name} joins actors along "
                f"axis {axis}, the environments', but was given an array of shape "
                f"{list(jnp.shape(leaf))} from actors with {envs} environments; bring it over with "
                f"rl.reduce, or put the environments on axis {axis}."
            )

    def _refuse_nested(self, name: str) -> None:
        if jex.core.get_opaque_trace_state() != self._level:
            raise UserError(
                f"{primitives.where(jex.source_info_util.current())}: rl.{name} stands inside jit, "
                f"scan, cond or vmap, where the graph cannot be cut; call it in iteration itself."
            )

    def _describe(
        self, act: Callable[..., Any], params: Params, length: int, bootstrap: Any
    ) -> tuple[UnrollSpec, list[jax.Array]]:
        """The spec of this unroll and its operands: captured values, then the params' leaves."""
        initial = self._initial_carry
        actor = self.actor

        def batched_act(params: Params, carry: Any, timestep: Any, keys: jax.Array) -> Any:
            carry = reset_carry(timestep.first, initial, carry)
            action, extras, after = jax.vmap(act, (None, 0, 0, 0))(params, carry, timestep, keys)
            return action, extras, same_carry(self._algorithm, carry, after)

        served = jax.tree.map(self._served, (actor.carry, actor.timestep, actor.keys))
        act_inner, act_captured = _inner("act", batched_act, params, *served)
        calls = actor.step.shape[0] / jax.tree.leaves(served)[0].shape[0]
        act_inner = dataclasses.replace(act_inner, flops=round(calls * act_inner.flops))
        value_inner, value_captured = None, []
        if bootstrap is not None:
            value_inner, value_captured = _inner(
                "bootstrap", jax.vmap(bootstrap, (None, 0, 0)), params, actor.carry, actor.timestep
            )
        step = step_function(self._env, self._spec, actor.step.shape[0])
        step_inner, action_bytes, seen_bytes = self._describe_step(step, batched_act, params)
        shapes = jax.eval_shape(
            lambda params, actor: unroll_scan(
                batched_act,
                step,
                jax.vmap(bootstrap, (None, 0, 0)) if bootstrap is not None else None,
                length,
                params,
                actor,
            ),
            params,
            actor,
        )
        operands = act_captured + value_captured + jax.tree.leaves(params)
        leaves, carry_tree = jax.tree.flatten(initial)
        spec = UnrollSpec(
            length=length,
            act=act_inner,
            step=step_inner,
            bootstrap=value_inner,
            num_inputs=len(operands),
            out_avals=tuple(ShapedArray(s.shape, s.dtype) for s in jax.tree.leaves(shapes)),
            trajectory_tree=jax.tree.structure(shapes[0]),
            initial_carry=tuple(leaves),
            carry_tree=carry_tree,
            per_step_bytes=(action_bytes, seen_bytes),
        )
        return spec, operands

    def _served(self, leaf: jax.Array) -> jax.ShapeDtypeStruct:
        """The shape of what one call of acting takes of an actor's [B, …]."""
        rows = leaf.shape[0] if self._batch is None else self._batch
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)

    def _describe_step(
        self, step: Callable[..., Any], act: Callable[..., Any], params: Params
    ) -> tuple[Inner, int, int]:
        actor = self.actor
        action = jax.eval_shape(act, params, actor.carry, actor.timestep, actor.keys)[0]
        check_action(self._algorithm, self._spec, action)
        after = jax.eval_shape(step, actor.env, action, actor.keys)
        seen = (after.observation, after.reward, after.terminated, after.truncated)
        inner = Inner("step", Side.ENVIRONMENT, None, 0, 0, None)
        if self._env is not None:
            inner, _ = _inner("step", step, actor.env, action, actor.keys, side=Side.ENVIRONMENT)
        return inner, _nbytes(action), _nbytes(seen)


def step_function(env: JaxEnv | None, spec: EnvSpec, batch: int) -> Callable[..., Any]:
    """How a batch steps: compiled for a JAX environment; for a host one, only its shapes."""
    if env is not None:
        return lambda state, action, keys: batched.step(env, state, action, keys)

    def shapes_only(state: Any, action: Any, keys: jax.Array) -> batched.BatchStep:
        observation = _zeros(spec.observation, batch)
        flag = jnp.zeros(batch, bool)
        return batched.BatchStep(
            state, observation, observation, jnp.zeros(batch), flag, flag, flag, flag
        )

    return shapes_only


def _inner(
    name: str, function: Callable[..., Any], *args: Any, side: Side = Side.ACTOR
) -> tuple[Inner, list[Any]]:
    """A per-step program, and the traced values it captured, which become its first inputs."""
    closed, out_shape = jax.make_jaxpr(function, return_shape=True)(*args)
    captured = [const for const in closed.consts if isinstance(const, Tracer)]
    fixed = [const for const in closed.consts if not isinstance(const, Tracer)]
    jaxpr = closed.jaxpr
    if captured:
        pairs = list(zip(jaxpr.constvars, closed.consts, strict=True))
        moved = [var for var, const in pairs if isinstance(const, Tracer)]
        kept = [var for var, const in pairs if not isinstance(const, Tracer)]
        jaxpr = jaxpr.replace(constvars=kept, invars=[*moved, *jaxpr.invars])
        jaxpr = jaxpr.replace(debug_info=jaxpr.debug_info._replace(arg_names=None))
    program = ClosedJaxpr(jaxpr, fixed)
    tree = jax.tree.structure(out_shape)
    return Inner(name, side, program, flops(jaxpr), len(captured), tree), captured


def _zeros(structs: Any, batch: int) -> Any:
    return jax.tree.map(lambda s: jnp.zeros((batch, *s.shape), s.dtype), structs)


def _nbytes(tree: Any) -> int:
    return sum(int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
