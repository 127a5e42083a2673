"""The programs of an exported policy: its greedy and its sampled act, written by `jax.export`.

Both take tuples of leaves: (weights, carry, observation, reward, first), and the sampled act a
random key as uint32[2]. Both reset the carry where an episode begins.
"""

import base64
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.algorithm import Algorithm, Params, Timestep
from dovetail.batching import act_for_one, defines, greedy_for_one
from dovetail.errors import UserError
from dovetail.keys import plain, unplain

PLATFORMS = ("cpu", "cuda", "tpu")
"""The platforms for which a program is lowered, whatever machine exports it."""

Leaves = tuple[Any, ...]
Program = dict[str, Any]
"""{"platforms": names, "batched": whether it takes a batch, "stablehlo": base64}, and of the
sampled act "log_prob": whether it knows the probability of its actions."""


def flat_greedy(algorithm: Algorithm, params: Params) -> Callable[..., tuple[Any, Leaves]]:
    """The greedy act of one environment on tuples of leaves: (action, carry)."""
    choose, enter = greedy_for_one(algorithm), _entered(algorithm, params)

    def greedy(weights: Leaves, carry: Leaves, *seen: Any) -> tuple[Any, Leaves]:
        action, after = choose(*enter(weights, carry, *seen))
        return action, tuple(map(plain, jax.tree.leaves(after)))

    return greedy


def flat_sample(algorithm: Algorithm, params: Params) -> Callable[..., tuple[Any, Any, Leaves]]:
    """The act of training on tuples of leaves: (action, log-probability or 0, carry)."""
    choose, enter = act_for_one(algorithm), _entered(algorithm, params)

    def sample(weights: Leaves, carry: Leaves, *seen: Any) -> tuple[Any, Any, Leaves]:
        *rest, data = seen
        key = jax.random.wrap_key_data(data, impl="threefry2x32")
        action, extras, after = choose(*enter(weights, carry, *rest), key)
        known = getattr(extras, "log_prob", None)
        log_prob = jnp.float32(0) if known is None else jnp.asarray(known, jnp.float32)
        return action, log_prob, tuple(map(plain, jax.tree.leaves(after)))

    return sample


def _entered(algorithm: Algorithm, params: Params) -> Callable[..., tuple[Any, Any, Timestep]]:
    """Makes (params, carry, timestep) of leaves; the carry is new where an episode begins."""
    initial = algorithm.initial_carry()
    trees = (params, initial, algorithm.task.env.observation)
    structures = [jax.tree.structure(tree) for tree in trees]
    inverses = [[unplain(leaf) for leaf in jax.tree.leaves(tree)] for tree in trees]

    def enter(weights: Leaves, carry: Leaves, seen: Leaves, reward: Any, first: Any) -> Any:
        given, old, observed = (
            jax.tree.unflatten(tree, [back(leaf) for back, leaf in zip(own, leaves, strict=True)])
            for tree, own, leaves in zip(structures, inverses, (weights, carry, seen), strict=True)
        )
        fresh = jax.tree.map(lambda new, kept: jnp.where(first, new, kept), initial, old)
        return given, fresh, Timestep(observed, reward, first)

    return enter


def arguments(algorithm: Algorithm, params: Params, *lead: Any) -> tuple[Any, ...]:
    """The shapes of the arguments of `flat_greedy`, with leading axes for all but the weights."""

    def struct(leaf: Any, *lead: Any) -> jax.ShapeDtypeStruct:
        leaf = plain(leaf)
        return jax.ShapeDtypeStruct((*lead, *jnp.shape(leaf)), jnp.result_type(leaf))

    seen = algorithm.task.env.observation
    return (
        tuple(struct(x) for x in jax.tree.leaves(params)),
        tuple(struct(x, *lead) for x in jax.tree.leaves(algorithm.initial_carry())),
        tuple(struct(x, *lead) for x in jax.tree.leaves(seen)),
        jax.ShapeDtypeStruct((*lead,), jnp.float32),
        jax.ShapeDtypeStruct((*lead,), jnp.bool_),
    )


def export_programs(algorithm: Algorithm, params: Params) -> dict[str, Program]:
    """The programs of a bound algorithm: "greedy", and "sample" if its act can be exported."""
    programs = {"greedy": _exported(flat_greedy(algorithm, params), algorithm, params)}
    if defines(algorithm, "act") or defines(algorithm, "act_batch"):
        with contextlib.suppress(Exception):  # an act may do on the host what no program can
            known = _knows_log_prob(algorithm, params)
            sampled = _exported(flat_sample(algorithm, params), algorithm, params, key=True)
            programs["sample"] = {**sampled, "log_prob": known}
    return programs


def _knows_log_prob(algorithm: Algorithm, params: Params) -> bool:
    weights, carry, *seen = arguments(algorithm, params)
    enter, act = _entered(algorithm, params), act_for_one(algorithm)

    def extras(data: jax.Array) -> Any:
        given = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (weights, carry, *seen))
        return act(*enter(*given), jax.random.wrap_key_data(data, impl="threefry2x32"))[1]

    return hasattr(jax.eval_shape(extras, jax.ShapeDtypeStruct((2,), jnp.uint32)), "log_prob")


def _exported(
    one: Callable[..., Any], algorithm: Algorithm, params: Params, key: bool = False
) -> Program:
    """Exports a function of one environment.

    It takes any batch size, unless the algorithm's code needs a concrete number where JAX has only
    a symbolic dimension. It runs on every platform, unless a part of it lowers for this machine's
    platform only.
    """
    from jax import export

    many = jax.vmap(one, in_axes=(None, *[0] * (5 if key else 4)))
    # From the most general export to the most restricted; the first that works is taken.
    failures: list[Exception] = []
    for platforms in (PLATFORMS, (platform(),)):
        for function, lead in ((many, export.symbolic_shape("b")), (one, ())):
            given = arguments(algorithm, params, *lead)
            if key:
                given = (*given, jax.ShapeDtypeStruct((*lead, 2), jnp.uint32))
            try:
                exported = export.export(jax.jit(function), platforms=platforms)(*given)
            except Exception as error:  # tracing runs user code, which may raise anything
                failures.append(error)
                continue
            text = base64.b64encode(exported.serialize()).decode()
            batched = function is many
            return {
                "platforms": list(exported.platforms), "batched": batched, "stablehlo": text
            }  # fmt: skip
    raise failures[-1]


def loaded_program(record: Mapping[str, Any], version: str) -> Callable[..., Any]:
    """A stored program for batches; compiled at the first call for each batch size.

    `version` is that of the JAX that wrote it.
    """
    from jax import export

    if platform() not in record["platforms"]:
        raise UserError(
            f"The policy was exported for {', '.join(record['platforms'])}, but JAX runs on "
            f"{platform()} here: set JAX_PLATFORMS to one of those, or export it on this machine."
        )
    try:
        call = export.deserialize(bytearray(base64.b64decode(record["stablehlo"]))).call
    except Exception as error:
        raise UserError(
            f"The policy's program was exported by JAX {version} and cannot be read by JAX "
            f"{jax.__version__}: export it again with a nearer version."
        ) from error
    if record["batched"]:
        return jax.jit(call)

    def mapped(weights: Leaves, *batch: Any) -> Any:
        return jax.lax.map(lambda one: call(weights, *one), batch)

    return jax.jit(mapped)


def platform() -> str:
    """This machine's platform, by the name that `jax.export` has for it."""
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend
