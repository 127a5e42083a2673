"""Checks that an environment keeps its contract; every failure is a sentence.

Run it on your own environment in a test: `check_jax_env(MyEnv())`, or
`check_host_env(resolve("my_file.py:MyEnv").host)`. Nothing is returned; a violation raises
`UserError`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.envs.interface import (
    ActionSpace,
    Continuous,
    Discrete,
    EnvSpec,
    HostEnv,
    HostStep,
    JaxEnv,
    JaxStep,
    MultiDiscrete,
)
from dovetail.errors import UserError

_BATCH = 3


def check_jax_env(env: JaxEnv | None, *, steps: int = 100, seed: int = 0) -> None:
    """Shapes and dtypes, fixed state types, jit and vmap, determinism, flags, action bounds."""
    if not isinstance(env, JaxEnv):
        raise UserError(f"{env!r} lacks spec, reset(key) or step(state, action, key).")
    spec = env.spec
    _check_spec(spec)
    key = jax.random.key(seed)
    action = jax.tree.map(jnp.asarray, _actions(spec.action, 1, 1, seed)[0][0])
    try:
        state, observation = jax.eval_shape(env.reset, key)
        after = jax.eval_shape(env.step, state, action, key)
    except Exception as error:
        raise UserError(f"{spec.id} cannot be traced by JAX: {error}") from error
    _require_kind(after, JaxStep, f"{spec.id}: step must return a JaxStep.")
    _check_tree(spec, "reset's observation", observation, ())
    _check_tree(spec, "step's observation", after.observation, ())
    _check_scalars(spec, after)
    _require(
        _types(state) == _types(after.state),
        f"{spec.id}: step returns a state of types {_types(after.state)}, but reset one of "
        f"{_types(state)}; they must agree, for the state goes round a loop.",
    )
    _check_jax_run(env, steps, seed)
    _check_bounds(env, key)


def _check_jax_run(env: JaxEnv, steps: int, seed: int) -> None:
    """Compares a batch in one compiled loop with a second run and with a single environment."""
    spec = env.spec
    actions = jax.tree.map(jnp.asarray, _actions(spec.action, steps, _BATCH, seed))

    def run(key: jax.Array, actions: Any) -> tuple[Any, Any]:
        def body(state: Any, now: tuple[Any, jax.Array]) -> tuple[Any, Any]:
            action, t = now
            after = env.step(state, action, jax.random.fold_in(key, t))
            new, first = env.reset(jax.random.fold_in(key, steps + t))
            done = after.terminated | after.truncated
            state = jax.tree.map(lambda a, b: jnp.where(done, a, b), new, after.state)
            return state, (after._replace(state=()), first)

        state, observation = env.reset(key)
        return observation, jax.lax.scan(body, state, (actions, jnp.arange(steps)))[1]

    keys = jax.random.split(jax.random.key(seed), _BATCH)
    mapped = jax.jit(jax.vmap(run, in_axes=(0, 1)))
    once, again = mapped(keys, actions), mapped(keys, actions)
    alone = jax.jit(run)(keys[1], jax.tree.map(lambda a: a[:, 1], actions))
    _require(_finite(once), f"{spec.id} shows observations or rewards that are not finite.")
    _require(_equal(once, again), f"{spec.id} does different things with the same keys.")
    second = jax.tree.map(lambda x: x[1], once)
    _require(
        _equal(second, alone, 1e-4),
        f"{spec.id} does something else in a batch than alone: its functions must be pure.",
    )
    flags: JaxStep = once[1][0]
    _require(
        not np.any(flags.terminated & flags.truncated),
        f"{spec.id} sets terminated and truncated at once: an episode that ended in the task's own "
        "sense was not cut, so truncated must be False there.",
    )


def _check_bounds(env: JaxEnv, key: jax.Array) -> None:
    """Extreme actions are legal; actions beyond the bounds act like the bounds."""
    reset_and_step = jax.jit(lambda action: env.step(env.reset(key)[0], action, key))
    for low, high in _extremes(env.spec.action):
        here, beyond = reset_and_step(low), reset_and_step(high)
        _require(
            _finite((here.observation, here.reward)),
            f"{env.spec.id} shows something that is not finite after the action {low.tolist()}.",
        )
        _require(
            _equal(here.observation, beyond.observation),
            f"{env.spec.id} does not clip: the action {high.tolist()} led elsewhere than "
            f"{low.tolist()}, the bound.",
        )


def _extremes(space: ActionSpace) -> list[tuple[jax.Array, jax.Array]]:
    """Pairs of (an extreme action, an action that must have the same effect)."""
    match space:
        case Discrete(n):
            ends = [jnp.int32(0), jnp.int32(n - 1)]
        case MultiDiscrete(nvec):
            ends = [jnp.zeros(len(nvec), jnp.int32), jnp.asarray(nvec, jnp.int32) - 1]
        case Continuous(size, bounded):
            beyond = 3.0 if bounded else 1.0
            return [(jnp.full(size, side), jnp.full(size, side * beyond)) for side in (-1.0, 1.0)]
    return [(end, end) for end in ends]


def check_host_env(
    factory: Callable[[int], HostEnv] | None,
    *,
    steps: int = 100,
    seed: int = 0,
    independent: bool = True,
) -> None:
    """Shapes and dtypes, determinism by seed, and the meaning of first, valid and next_observation.

    `independent` also requires that environment i depends on seeds[i] alone, so that a run does not
    change with the split of its environments among workers; some vector back ends cannot do this.
    """
    if factory is None:
        raise UserError("There are no host environments here: use check_jax_env(env.jax).")
    seeds = [seed + 10 * i for i in range(_BATCH)]
    env = factory(_BATCH)
    _require_kind(env, HostEnv, f"{env!r} lacks spec, num_envs, reset, step or close.")
    try:
        spec = env.spec
        _check_spec(spec)
        _require(
            env.num_envs == _BATCH, f"{spec.id} made {env.num_envs} environments, not {_BATCH}."
        )
        actions = _actions(spec.action, steps, _BATCH, seed)
        once = _host_run(env, seeds, actions)
        again = _host_run(env, seeds, actions)
    finally:
        env.close()
        env.close()  # closing twice must be harmless
    _require(_finite(once), f"{spec.id} shows observations or rewards that are not finite.")
    _require(
        _equal(once, again), f"{spec.id} does different things when reset with the same seeds."
    )
    _check_host_semantics(spec, once[0], once[1])
    if independent:
        _check_independent(factory, seeds, actions, once)


def _check_independent(
    factory: Callable[[int], HostEnv], seeds: list[int], actions: np.ndarray, batch: Any
) -> None:
    env = factory(1)
    try:
        alone = _host_run(env, seeds[1:2], actions[:, 1:2])
    finally:
        env.close()
    observation, run = batch
    second = (
        jax.tree.map(lambda x: x[1:2], observation),
        [jax.tree.map(lambda x: x[1:2], step) for step in run],
    )
    _require(
        _equal(second, alone, 1e-5),
        f"{env.spec.id}: environment 1 of {len(seeds)} does something else than alone with the "
        "same seed: its randomness depends on the others (pass independent=False to allow it).",
    )


def _host_run(env: HostEnv, seeds: list[int], actions: np.ndarray) -> tuple[Any, list[HostStep]]:
    """The first observation and every step, copied, with shapes and dtypes checked."""
    spec, lead = env.spec, (len(seeds),)
    observation = jax.tree.map(np.copy, env.reset(seeds))
    _check_tree(spec, "reset's observation", observation, lead)
    run = []
    for action in actions:
        step = env.step(action)
        _require_kind(step, HostStep, f"{spec.id}: step must return a HostStep.")
        _check_tree(spec, "observation", step.observation, lead)
        _check_tree(spec, "next_observation", step.next_observation, lead)
        for name in ("terminated", "truncated", "first", "valid"):
            _check_array(spec, name, getattr(step, name), lead, np.bool_)
        _check_array(spec, "reward", step.reward, lead, np.float32)
        run.append(jax.tree.map(np.copy, step))
    return observation, run


def _check_host_semantics(spec: EnvSpec, observation: Any, run: list[HostStep]) -> None:
    """Episodes end, start and continue according to the flags."""
    waiting = np.zeros(_BATCH, np.bool_)  # ended, and the back end has not reset yet
    for t, step in enumerate(run):
        at = f"{spec.id}, step {t}:"
        done = step.terminated | step.truncated
        _require(
            not np.any(step.terminated & step.truncated),
            f"{at} terminated and truncated are set at once; termination must win.",
        )
        _require(
            np.array_equal(~step.valid, waiting),
            f"{at} valid must be False just after an episode that ended without first, and only "
            "there.",
        )
        _require(
            not np.any(done & ~step.valid) and not np.any(step.reward[~step.valid]),
            f"{at} a step that is not valid ends an episode or pays a reward.",
        )
        _require(
            bool(np.all(step.first[~step.valid])),
            f"{at} a step that only reset must have first set.",
        )
        _require(
            not np.any(step.first & step.valid & ~done),
            f"{at} first is set though no episode ended.",
        )
        going_on = ~(step.first & step.valid)
        _require(
            _equal(_rows(step.observation, going_on), _rows(step.next_observation, going_on)),
            f"{at} observation and next_observation differ where no episode began.",
        )
        waiting = done & ~step.first


def _check_spec(spec: Any) -> None:
    _require(isinstance(spec, EnvSpec), f"spec is a {type(spec).__name__}, not an EnvSpec.")
    leaves = jax.tree.leaves(spec.observation)
    ok = leaves and all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    _require(bool(ok), f"{spec.id}: spec.observation must be a tree of jax.ShapeDtypeStruct.")
    _require(
        isinstance(spec.action, Discrete | MultiDiscrete | Continuous),
        f"{spec.id}: spec.action must be Discrete, MultiDiscrete or Continuous.",
    )


def _check_tree(spec: EnvSpec, what: str, found: Any, lead: tuple[int, ...]) -> None:
    structures = jax.tree.structure(spec.observation), jax.tree.structure(found)
    _require(
        structures[0] == structures[1],
        f"{spec.id}: {what} has the structure {structures[1]}, the spec {structures[0]}.",
    )
    expected = jax.tree.leaves(spec.observation)
    for leaf, array in zip(expected, jax.tree.leaves(found), strict=True):
        _check_array(spec, what, array, (*lead, *leaf.shape), leaf.dtype)


def _check_scalars(spec: EnvSpec, step: JaxStep) -> None:
    _check_array(spec, "reward", step.reward, (), np.float32)
    _check_array(spec, "terminated", step.terminated, (), np.bool_)
    _check_array(spec, "truncated", step.truncated, (), np.bool_)


def _check_array(spec: EnvSpec, what: str, x: Any, shape: tuple[int, ...], dtype: Any) -> None:
    found = f"{getattr(x, 'dtype', type(x).__name__)}{list(getattr(x, 'shape', []))}"
    _require(
        getattr(x, "shape", None) == shape and getattr(x, "dtype", None) == dtype,
        f"{spec.id}: {what} is {found}, not {np.dtype(dtype)}{list(shape)}.",
    )


def _actions(space: ActionSpace, steps: int, batch: int, seed: int) -> np.ndarray:
    """Random actions, [steps, batch, …]."""
    generator = np.random.default_rng(seed)
    match space:
        case Discrete(n):
            return generator.integers(0, n, (steps, batch), np.int32)
        case MultiDiscrete(nvec):
            shape = (steps, batch, len(nvec))
            return generator.integers(0, np.asarray(nvec), shape).astype(np.int32)
        case Continuous(size):
            return generator.uniform(-1, 1, (steps, batch, size)).astype(np.float32)


def _require(kept: bool, otherwise: str) -> None:
    if not kept:
        raise UserError(otherwise)


def _require_kind(found: object, kind: type, otherwise: str) -> None:
    _require(isinstance(found, kind), otherwise)


def _types(tree: Any) -> str:
    return str(jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree))


def _rows(tree: Any, mask: np.ndarray) -> Any:
    return jax.tree.map(lambda x: x[mask], tree)


def _equal(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)


def _finite(tree: Any) -> bool:
    return all(
        bool(np.isfinite(x).all())
        for x in jax.tree.leaves(tree)
        if jnp.issubdtype(x.dtype, jnp.floating)
    )
