"""Traces one iteration of an algorithm's loop into a jaxpr with boundaries in it.

`Tracing` is the `rl` passed to the algorithm during tracing. Each crossing binds one primitive for
all its leaves. Boundaries must be called in `iteration` itself: inside `jit`, `scan` or `cond` the
graph cannot be cut, so they are refused there with the user's file and line.
"""

import dataclasses
import os
import re
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
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
from dovetail.boundaries import (
    ACTOR,
    BATCH_AXIS,
    LEARNER,
    REPLAY,
    RL,
    How,
    Reach,
    Side,
    here,
    state_sides,
)
from dovetail.envs import batched
from dovetail.envs.interface import EnvSpec, JaxEnv
from dovetail.errors import UserError, defined_at, user_line
from dovetail.graph import primitives
from dovetail.graph.check import (
    check_state,
    scalar,
    two_results,
)
from dovetail.graph.cut import cut
from dovetail.graph.ir import Graph
from dovetail.graph.marks import declared, kept_on, refuse_wrong_call, refused_mark, unmarked
from dovetail.graph.primitives import Crossing
from dovetail.graph.sides import Ends, origin, settle
from dovetail.graph.traced import PythonSpec, Traced
from dovetail.graph.unroll import (
    ActorState,
    EpisodeSums,
    environment_keys,
    initial_actor,
)
from dovetail.graph.unroll_spec import Acting, zeros
from dovetail.keys import part_keys, seed_key
from dovetail.replay.data import Data, data_leaves
from dovetail.replay.replay import has_table
from dovetail.replay.sample import Sample

PACKAGE = os.path.dirname(os.path.abspath(dovetail.__file__))
INTERNAL = (
    "graph",
    "functions",
    "networks",
    "envs",
    "blocks",
    "algorithm.py",
    "boundaries.py",
    os.path.join("training", "planning.py"),
)
"""Files of Dovetail that error messages skip to find the user's line."""
# JAX's source info, which side errors quote, skips these files too.
for _name in INTERNAL:
    jex.source_info_util.register_exclusion(os.path.join(PACKAGE, _name))


def trace(
    algorithm: Algorithm,
    task: Task,
    env: JaxEnv | None = None,
    copies: Mapping[Side, int] | None = None,
    batch: int | None = None,
) -> Graph:
    """Traces one update into a graph; `env` is None for host environments.

    With `copies` of a side, its programs are traced for one copy. Copies of the actor share the
    environments; copies of other sides share the batches that are joined or divided on the way.
    One call of acting serves `batch` environments, by default all of an actor's.
    """
    bound = algorithm.bind(task)
    traced = trace_iteration(bound, env, copies or {}, batch)
    return cut(traced, bound, task.env)


def _refuse_uneven(number: int, among: int, whom: str, what: str = "environments") -> None:
    if among < 1 or number < 1 or number % among:
        option = "--num-envs" if what == "environments" else "--actors"
        raise UserError(
            f"{number} {what} cannot be split evenly among {among} {whom}: choose a multiple of "
            f"{max(among, 1)} {what} ({option})."
        )


def trace_iteration(
    algorithm: Algorithm,
    env: JaxEnv | None,
    copies: Mapping[Side, int] = MappingProxyType({}),
    batch: int | None = None,
) -> Traced:
    """Traces `iteration` of a bound algorithm on abstract values."""
    task = algorithm.task
    learners, actors = copies.get(LEARNER, 1), copies.get(ACTOR, 1)
    if not task.online:  # nobody acts: num_envs only has to divide among learners
        actors = learners
    _refuse_uneven(task.num_envs, learners, "replicas")
    _refuse_uneven(task.num_envs, actors, "actors")
    _refuse_uneven(actors, learners, "replicas", "actors")
    share = dataclasses.replace(task, num_envs=task.num_envs // actors)
    # Shapes only: nothing is computed, however large the networks are.
    state = jax.eval_shape(algorithm.init, seed_key(0))
    if not jax.tree.leaves(state):
        name = f"{defined_at(algorithm.init)}{type(algorithm).__name__}"
        raise UserError(f"{name}.init must return the state, but returned nothing.")
    actor = abstract_actor(algorithm, share, env)
    carry = jax.tree.map(np.asarray, algorithm.initial_carry())
    names: list[str] = []

    @cache
    def ends() -> Ends:
        """The ends of every crossing, from a trace without copies.

        Shapes at a crossing depend on the number of copies at its ends, and the ends are known only
        after side inference; the graph without copies has the same ends.
        """
        whole = trace_iteration(algorithm, env)
        return settle(whole.closed.jaxpr, whole.state_sides).ends

    def one_iteration(state: Any, actor: ActorState) -> Any:
        rl = Tracing(algorithm, task.env, env, actor, carry, copies, batch, ends)
        new_state, metrics = two_results(algorithm, algorithm.iteration(rl, state))
        # A leaf that `iteration` returns just as it arrived still needs an equation on its side.
        new_state, metrics = rl.landed(new_state), rl.landed(metrics)
        check_state(algorithm, state, new_state)
        # Sorted like the keys of any dict in JAX, so the order does not depend on the algorithm.
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
    except (TypeError, AttributeError) as error:
        if not re.search(r"\bAt\b", str(error)) or not user_line(error):
            raise
        raise UserError(f"{user_line(error)}: {refused_mark(state)}") from error
    return Traced(
        _without_dead_code(closed),
        jax.tree.structure(state),
        state_sides(state),
        jax.tree.structure(actor),
        tuple(names),
        task.num_envs,
        share.num_envs,
        (REPLAY,) if has_table(state) else (),
        data_leaves(state),
    )


def _user_line(error: Exception) -> str:
    """The innermost file and line of an error outside JAX and Dovetail's internals."""
    internal = tuple(os.path.join(PACKAGE, name) for name in INTERNAL)
    frames = traceback.extract_tb(error.__traceback__)
    jax_folder = os.path.dirname(os.path.abspath(jax.__file__))
    theirs = [f for f in frames if not f.filename.startswith((*internal, jax_folder))]
    last = theirs[-1] if theirs else frames[-1]
    return f"{last.filename}:{last.lineno}"


def _without_dead_code(closed: ClosedJaxpr) -> ClosedJaxpr:
    # Before the cut, so that no fragment computes and no link carries what nobody reads.
    jaxpr, _ = pe.dce_jaxpr(closed.jaxpr, True, instantiate=True)
    return ClosedJaxpr(jaxpr, closed.consts)


def abstract_actor(algorithm: Algorithm, task: Task, env: JaxEnv | None) -> ActorState:
    """The actors' state as shapes [num_envs, …]; `env` is None for host environments."""

    def build(key: jax.Array) -> ActorState:
        keys = environment_keys(key, task.num_envs)
        if env is not None:
            env_state, observation = batched.reset(env, keys)
        else:
            env_state, observation = (), zeros(task.env.observation, task.num_envs)
        return initial_actor(env_state, observation, algorithm.initial_carry(), keys)

    return jax.eval_shape(build, seed_key(0))


class Tracing(RL):
    """The `rl` of a traced iteration."""

    def __init__(
        self,
        algorithm: Algorithm,
        spec: EnvSpec,
        env: JaxEnv | None,
        actor: ActorState,
        initial_carry: Any,
        copies: Mapping[Side, int],
        batch: int | None,
        ends: Callable[[], Ends],
    ) -> None:
        self.actor = actor
        self._copies = copies
        self._ends = ends
        self._batch = batch
        self._crossings = 0
        self._received: dict[int, Any] = {}
        self.episodes: EpisodeSums | None = None
        self._algorithm = algorithm
        self._spec = spec
        self._env = env
        self._initial_carry = initial_carry
        # It changes inside `jit`, `scan`, `cond` and `vmap`, which `_refuse_nested` compares.
        self._level = jex.core.get_opaque_trace_state()

    def copies(self, side: Side) -> int:
        """Number of copies of a side that take part in one update."""
        return self._copies.get(side, 1)

    def send(
        self,
        tree: Any,
        to: Side,
        how: How | str = How.COPY,
        *,
        source: Side | None = None,
        name: str = "send",
    ) -> Any:
        """Binds one `send` for all leaves."""
        return self._cross(tree, Crossing(name, source, to, How(how), self._crossings))

    def call(
        self,
        side: Side,
        function: Callable[..., Any],
        *args: Any,
        how: How | str = How.JOIN,
        host: bool = False,
        result: Any = None,
    ) -> Any:
        """Sends the arguments, runs the function, returns the results; marked parts stay."""
        refuse_wrong_call(side, function)
        rule, sent, numbers = How(how), list[Any](), list[int]()
        for arg in unmarked(args):  # one crossing each: arguments may live on different sides
            numbers.append(self._crossings)
            sent.append(self._cross_each(arg, Crossing("call", None, side, rule, numbers[-1])))
        back = Crossing("call", None, None, rule, self._crossings, tuple(numbers))
        if host:
            made = self._called(side, function, sent, declared(function, result), back)
        else:
            made = function(*sent)
        self._refuse_nested("call")
        staying = kept_on(side, made)
        leaves, tree = jax.tree.flatten(made)
        # Marked parts stay on the called side as its new state; only the others cross back.
        going = [leaf for leaf, stays in zip(leaves, staying, strict=True) if not stays]
        gone = iter(self._cross_each(going, back._replace(number=self._crossings)))
        return tree.unflatten(
            [leaf if stays else next(gone) for leaf, stays in zip(leaves, staying, strict=True)]
        )

    def _cross_each(self, tree: Any, crossing: Crossing) -> Any:
        """Crosses for a call: arrays without a batch axis are copied, the others follow `how`."""
        leaves, structure = jax.tree.flatten(tree)
        flat = [jnp.ndim(leaf) <= BATCH_AXIS for leaf in leaves]
        copied = [leaf for leaf, is_flat in zip(leaves, flat, strict=True) if is_flat]
        others = [leaf for leaf, is_flat in zip(leaves, flat, strict=True) if not is_flat]
        arrived = iter(self._cross(others, crossing))
        copies = iter(self._cross(copied, crossing._replace(how=How.COPY)))
        return structure.unflatten([next(copies if is_flat else arrived) for is_flat in flat])

    def _called(
        self,
        side: Side,
        function: Callable[..., Any],
        args: list[Any],
        result: Any,
        back: Crossing,
    ) -> Any:
        """Plain Python on another side; each copy returns its share of the declared `result`."""
        ends = self._ends() if self._divides(back) else {}
        there = back._replace(source=origin(back, ends, side), target=side)
        crossing = self._scaled(there)

        def own(shape: Any) -> ShapedArray:
            aval = ShapedArray(shape.shape, shape.dtype)
            return primitives.scaled(aval, crossing.times, crossing.parts)

        return self.python(side, side, function, tuple(args), jax.tree.map(own, result))

    def python(
        self,
        name: str,
        side: Side,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        result: Any,
        reach: Reach | None = None,
    ) -> Any:
        """Binds a `python` equation without calling the function."""
        self._refuse_nested(name)
        leaves, in_tree = jax.tree.flatten(args)
        shapes, out_tree = jax.tree.flatten(result)
        avals = tuple(ShapedArray(shape.shape, shape.dtype) for shape in shapes)
        spec = PythonSpec(name, side, function, in_tree, out_tree, avals, reach)
        return out_tree.unflatten(primitives.python_p.bind(*leaves, spec=spec))

    def recall(self, data: Data, draws: jax.Array) -> Sample:
        """Recorded data → learner, on the same side; a replica samples its share of the draws."""
        self.refuse_uneven_draws("recall", draws)
        return data.sample(primitives.part(draws, self.copies(LEARNER)))

    def own_keys(self, keys: jax.Array, items: int, axis: int = 0) -> jax.Array:
        """This learner replica's keys, so it draws for its part of the batch."""
        replicas = self.copies(LEARNER)
        if replicas == 1:
            return keys
        # `part` of [0, 1, …] is this replica's index: `axis_index` is not bound while tracing.
        number = primitives.part(jnp.arange(replicas)[None], replicas)[0, 0]
        return part_keys(keys, number, items, replicas, axis)

    def mean(self, tree: Any) -> Any:
        """Averages over learner replicas."""
        return primitives.mean(tree)

    def max(self, tree: Any) -> Any:
        """Maximum over learner replicas."""
        return primitives.largest(tree)

    def unroll(
        self, act: Callable[..., Any], params: Params, length: int, bootstrap: Any = None
    ) -> Trajectory:
        """Actors ↔ environments."""
        self._refuse_nested("unroll")
        if isinstance(length, Tracer) or length != int(length) or length < 1:
            raise UserError(
                f"{here()}: rl.unroll needs a whole "
                f"number of steps, at least 1, but its length is {length!r}."
            )
        acting = Acting(
            self._algorithm, self._spec, self._env, self.actor, self._initial_carry, self._batch
        )
        spec, operands = acting.describe(act, params, length, bootstrap)
        leaves = operands + jax.tree.leaves(self.actor)
        outputs = primitives.unroll_p.bind(*leaves, spec=spec)
        size = spec.trajectory_tree.num_leaves
        actor_tree = jax.tree.structure(self.actor)
        self.actor = actor_tree.unflatten(outputs[size : size + actor_tree.num_leaves])
        ended = EpisodeSums(*outputs[size + actor_tree.num_leaves :])
        self.episodes = (
            ended if self.episodes is None else jax.tree.map(jnp.add, self.episodes, ended)
        )
        return spec.trajectory_tree.unflatten(outputs[:size])

    def landed(self, tree: Any) -> Any:
        """Adds a barrier to every leaf that has just crossed a boundary.

        `iteration` may return such a leaf or send it on. Fragments join the pieces and feed the
        links, so there must be an equation on the receiving side.
        """
        return jax.tree.map(
            lambda x: jax.lax.optimization_barrier(x) if id(x) in self._received else x, tree
        )

    def _cross(self, tree: Any, crossing: Crossing) -> Any:
        """Binds one `send` for the leaves of a tree; returns the tree as it arrives."""
        self._refuse_nested(crossing.name)
        self._crossings += 1
        leaves, structure = jax.tree.flatten(self.landed(tree))
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        # An empty tree, as of an algorithm without a carry: there is nothing to send.
        if not arrays:
            return tree
        crossing = self._scaled(crossing)
        for array in arrays if crossing.how in (How.JOIN, How.DIVIDE) else ():
            self._refuse_unsplit(array, crossing)
        arrived = primitives.send_p.bind(*arrays, crossing=crossing)
        # Keep the tracers alive, so that no id is reused.
        self._received |= {id(tracer): tracer for tracer in arrived}
        return structure.unflatten(arrived)

    def _scaled(self, crossing: Crossing) -> Crossing:
        """Fills in the number of sending and receiving copies.

        They determine the shapes at the target: `primitives.scaled`.
        """
        if not self._divides(crossing):
            return crossing
        source, target = crossing.source, crossing.target
        if source is None or target is None:
            source, target = self._ends().get(crossing.number, (LEARNER, LEARNER))
        if source == target:
            return crossing
        times = self.copies(source) if crossing.how is How.JOIN else 1
        return crossing._replace(times=times, parts=self.copies(target))

    def _divides(self, crossing: Crossing) -> bool:
        """Whether a crossing may change shapes, because some side has several copies."""
        several = any(count > 1 for count in self._copies.values())
        return several and crossing.how in (How.JOIN, How.DIVIDE)

    def _refuse_unsplit(self, leaf: Any, crossing: Crossing) -> None:
        """Refuses to join or divide an array whose batch axis is missing or does not divide."""
        axis, envs = BATCH_AXIS, self.actor.step.shape[0]
        if crossing.source == ACTOR and (leaf.ndim <= axis or leaf.shape[axis] != envs):
            raise UserError(
                f"{here()}: rl.{crossing.name} joins actors along "
                f"axis {axis}, the environments', but was given an array of shape "
                f"{list(leaf.shape)} from actors with {envs} environments; bring it over with "
                f"rl.reduce, or put the environments on axis {axis}."
            )
        times, parts = crossing.times, crossing.parts
        if times == parts == 1:
            return
        if leaf.ndim <= axis or leaf.shape[axis] * times % parts:
            whom = crossing.target or "caller's"
            raise UserError(
                f"{here()}: rl.{crossing.name} brings an array of shape {list(leaf.shape)} from "
                f"{times} copies of one side to {parts} of the {whom} side, along axis {axis}, "
                f"which does not divide: choose fewer copies, another batch, or how='copy'."
            )

    def _refuse_nested(self, name: str) -> None:
        if jex.core.get_opaque_trace_state() != self._level:
            raise UserError(
                f"{here()}: rl.{name} stands inside jit, scan, cond or vmap, where the graph "
                f"cannot be cut; call it in iteration itself."
            )
