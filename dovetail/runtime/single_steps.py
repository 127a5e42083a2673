"""Runs iterations of a single step: one compiled call and one environment step, alternating.

If an unroll is one step long, the overhead around the learner's program (separate programs before
the unroll and for acting, unroll buffers, a record of every iteration) costs more than the program
itself. Here one program does everything: it learns from the last step and chooses the next action
with the new weights. It updates its state in place and sums the metrics on the device.

This is a separate loop from `host_unroll.py` because its program learns between a step and the next
act. In that loop these are separate calls, and DQN takes 1.5 to 2 times as long.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.envs.interface import HostStep
from dovetail.envs.resolve import Env
from dovetail.graph.ir import Fragment, Graph, Unroll, Value
from dovetail.graph.unroll import ActorState, act_key, info_sums
from dovetail.plan.ir import Plan, WorkerKind
from dovetail.runtime.act_program import ActProgram
from dovetail.runtime.arrays import Leaf, Values, is_key, leaves_of, numbered
from dovetail.runtime.environments import HostStepper, begin_episodes, make_environments
from dovetail.runtime.heartbeat import Activity, Watch, Watchdog
from dovetail.runtime.interruption import Interruption
from dovetail.runtime.packing import Bundle, Slab, bundles_of_state
from dovetail.runtime.programs import run_fragments
from dovetail.runtime.report import Report, Tapped, all_finite
from dovetail.runtime.supervision import StopRequest, end_hang
from dovetail.telemetry.spans import COMPUTE, WAIT, Track
from dovetail.trajectory import Timestep

KeyKind = object
"""The implementation of a random key, as `jax.random.key_impl` returns it."""
NOTED = 256
"""Number of steps that share one span."""


def single_steps(graph: Graph, plan: Plan, env: Env) -> bool:
    """Whether a plan can run this way.

    It needs one worker that steps host environments itself, one unroll of one step, and acting
    without a carry.
    """
    if env.host is None or env.jax is not None or len(graph.unrolls) != 1 or plan.processes:
        return False
    [unroll] = graph.unrolls
    one = len(plan.workers) == 1 and plan.workers[0].kind is WorkerKind.THREAD
    whole = all(copies == 1 for _, copies in plan.copies)
    whole = whole and all(isinstance(node, Fragment | Unroll) for node in graph.nodes)
    bare = unroll.carry_tree.num_leaves == 0 and unroll.bootstrap is None
    if not (one and whole and bare) or unroll.length != 1 or len(plan.workers[0].devices) > 1:
        return False
    return _acting(unroll).in_words and _slab(graph, unroll) is not None


def _acting(unroll: Unroll) -> ActProgram:
    live = unroll.trajectory_tree.unflatten(unroll.live)
    return ActProgram(unroll, jax.tree.leaves(live.extras), len(jax.tree.leaves(live.observation)))


class Seen:
    """The values that the environments produce; those that are read share one memory block."""

    def __init__(self, graph: Graph, unroll: Unroll) -> None:
        self.row = unroll.trajectory_tree.unflatten(unroll.trajectory)
        self.live = unroll.trajectory_tree.unflatten(unroll.live)
        self.actor = graph.actor.tree.unflatten(unroll.actor_outputs)

    def values(self) -> list[Value]:
        """The values in the memory block."""
        made = ("observation", "reward", "terminated", "truncated", "first", "valid")
        rows = [leaf for name in made for leaf in jax.tree.leaves(getattr(self.row, name))]
        finals = jax.tree.leaves(self.row.next_observation)
        wanted = jax.tree.leaves(self.live.next_observation)
        rows += [leaf for leaf, live in zip(finals, wanted, strict=True) if live]
        return [*rows, *jax.tree.leaves((self.actor.timestep, self.actor.step))]

    @property
    def step(self) -> Value:
        """The step number of every environment."""
        [value] = jax.tree.leaves(self.actor.step)
        return value


def _slab(graph: Graph, unroll: Unroll) -> Slab | None:
    return Slab.of(Seen(graph, unroll).values())


class Held(NamedTuple):
    """The arguments that the program updates in place."""

    state: list[Leaf]
    """The state, packed."""
    chosen: jax.Array | None
    """The words of the chosen action; None before the first choice."""
    sums: jax.Array
    """The sum of each metric since the last report."""


class StepRun:
    """The only worker of such a plan, in the caller's thread."""

    def __init__(
        self, graph: Graph, plan: Plan, env: Env, patience: float, tell: Callable[[str], None]
    ) -> None:
        [unroll] = graph.unrolls
        [worker] = plan.workers
        slab = _slab(graph, unroll)
        assert slab is not None
        self._graph, self._env, self._unroll = graph, env, unroll
        self._acting, self._slab, self._seen = _acting(unroll), slab, Seen(graph, unroll)
        first = graph.nodes.index(unroll)
        self._before = [node for node in graph.nodes[:first] if isinstance(node, Fragment)]
        self._after = [node for node in graph.nodes[first + 1 :] if isinstance(node, Fragment)]
        names = [node.name for node in (*self._before, *self._after)]
        self._name = " + ".join([*names, f"{unroll.name}.act"])
        self._step_name = f"{unroll.name}.step"
        [acts] = plan.instances_of(f"{unroll.name}.act")
        steps = plan.instances_of(f"{unroll.name}.step")
        self._actor_envs = make_environments(plan, env, acts, steps, patience)
        assert isinstance(self._actor_envs.stepper, HostStepper)
        self._stepper = self._actor_envs.stepper
        self._watch, self._track = Watch(worker.name), Track(worker.name)
        self._patience, self._stop = patience, StopRequest()
        self._interruption = Interruption(HostStepper.step, HostStepper.reset)
        self._watchdog = Watchdog([self._watch], patience, tell, self._end_hang)
        self._watched: Sequence[int] = ()
        self.seconds = {self._name: 0.0, self._step_name: 0.0}
        """Seconds spent so far, by program."""
        self._bundles: list[Bundle] = []
        self._alone: list[Value] = []
        self._recorded = [graph.state.inputs[i] for i in graph.data]
        self._data: list[Leaf] = []
        """Recorded steps, which the program only reads."""
        self._held = Held([], None, self._no_metrics())
        self._keys: jax.Array | None = None
        """The actors' keys. Programs take their words: passing a key costs more than an array."""
        self._impl: KeyKind = None
        """Key implementations, to rebuild keys from words: of the actors, and of state values."""
        self._impls: dict[int, KeyKind] = {}
        self._number = np.zeros(0, np.int32)
        self._steps = 0
        self._totals: list[np.ndarray] = []
        """Running return and length of every environment's episode."""
        self._episodes: list[np.ndarray] = []
        """Number, returns and lengths of episodes finished since the last report."""
        self._tapped: list[Tapped] = []
        """The tapped values of each step since the last report."""
        self._call: Callable[..., tuple[Held, list[Leaf]]]
        self._call = jax.jit(self._turn, donate_argnums=0)
        self._choose: Callable[..., jax.Array] = jax.jit(self._first_choice)
        self._copied: Callable[[list[Leaf]], dict[int, jax.Array]] = jax.jit(self._copies)
        self._memory, arrays = slab.buffers()
        self._now: Timestep = jax.tree.map(lambda v: arrays[v.id], self._seen.actor.timestep)
        """The current timestep, as views of the memory block."""
        self._row = HostRow(self._seen, arrays, self._now)

    def ask_to_stop(self) -> None:
        """Ends what hangs from now on; a signal handler may call it."""
        self._stop.ask()

    def _end_hang(self) -> None:
        end_hang(self._interruption, self._watch, self._patience, self._stop)

    def compile(self, state: object, actor: ActorState) -> None:
        """Compiles by one call on zeros with the shapes of this state."""
        self._arrange(jax.tree.leaves(state))
        zeros = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]
        held, keys = self._together(zeros), jnp.zeros(actor.keys.shape, actor.keys.dtype)
        self._impl, words = jax.random.key_impl(keys), jax.random.key_data(keys)
        given = [zeros[i] for i in self._graph.data], words, np.zeros_like(self._memory)
        made = self._choose(held, *given)
        jax.block_until_ready(self._copied(held))
        jax.block_until_ready(self._call(Held(held, made, self._no_metrics()), *given))

    def load(
        self,
        state: object,
        actor: ActorState,
        episode_keys: jax.Array,
        first_turn: int,
        watched: Sequence[int] = (),
    ) -> ActorState:
        """Sets the states of the next iteration and begins an episode in every environment.

        Returns the actors' state with the first observations.
        """
        self._arrange(jax.tree.leaves(state))
        self._watched = watched
        self._keys, self._impl = actor.keys, jax.random.key_impl(actor.keys)
        begun = begin_episodes(self._env, self._actor_envs, actor, episode_keys)
        leaves = jax.tree.leaves(state)
        self.refill([leaves[i] for i in self._graph.data])
        # The program donates its state, and the caller keeps these arrays: copy them.
        own = jax.tree.map(jnp.copy, self._together(leaves))
        self._held = Held(own, None, self._no_metrics())
        for place, leaf in zip(_leaves(self._now), _leaves(begun.timestep), strict=True):
            place[...] = np.asarray(leaf)
        self._number = np.asarray(begun.number)
        self._steps = int(np.asarray(begun.step)[0])
        self._totals = [np.array(begun.episode_return), np.array(begun.episode_length)]
        return begun

    def refill(self, data: Sequence[Leaf]) -> None:
        """Replaces the recorded steps that iterations sample."""
        self._data = list(data)

    def warm_up(self) -> None:
        """Does nothing: `compile` has compiled everything."""

    def advance(self, iterations: int) -> "Done":
        """Runs that many iterations before it returns."""
        watch, track = self._watch, self._track
        watch.begin()
        if track.paused is not None:
            spent = time.perf_counter() - track.paused
            track.add(WAIT, "leave to go on", track.paused, spent)
        watch.doing("learning from each step")
        watch.stepping = True
        self._episodes = [
            np.zeros(len(self._number), kind) for kind in (np.int32, np.float32, np.int32)
        ]
        if self._unroll.info:
            self._episodes.append(np.zeros((len(self._number), 4 * self._unroll.info), np.float32))
        for start in range(0, iterations, NOTED):
            self._go(min(NOTED, iterations - start))
        watch.warm = True
        watch.idle()
        report = self._report(iterations)
        track.paused = time.perf_counter()
        return Done(report)

    def _go(self, iterations: int) -> None:
        """Runs some iterations and records them as one span per program."""
        assert self._keys is not None
        clock, call, step, watch = time.perf_counter, self._call, self._stepper.step, self._watch
        words, unpack = jax.random.key_data(self._keys), self._acting.unpack
        given = self._data, words, self._memory
        began, computing, stepping = clock(), 0.0, 0.0
        chosen = self._held.chosen
        if chosen is None:
            self._row.step[...] = self._steps
            chosen = self._choose(self._held.state, *given)
            self._held = self._held._replace(chosen=chosen)
        action = self._acting.action(unpack(chosen))
        computing += clock() - began
        for _ in range(iterations):
            before = clock()
            after = step(action, self._steps)
            watch.since = between = clock()
            stepping += between - before
            self._write(after)
            held, tapped = call(self._held, *given)
            assert held.chosen is not None
            action = self._acting.action(unpack(held.chosen))  # blocks until the call is done
            self._held = held
            if tapped:
                self._tapped.append(Tapped(tapped))
            computing += clock() - between
        whole = clock() - began
        self.seconds[self._name] += computing
        self.seconds[self._step_name] += stepping
        items = iterations * len(self._number)
        self._track.add(COMPUTE, self._name, began, computing, iterations)
        self._track.add(
            COMPUTE, self._step_name, began + computing, stepping, iterations, items=items
        )
        spent = computing + stepping
        self._track.add(COMPUTE, f"{self._unroll.name}.record", began + spent, whole - spent)

    def _write(self, after: HostStep) -> None:
        """Writes a step into the memory that the program reads, and counts finished episodes."""
        row = self._row
        for place, leaf in row.before:
            place[...] = leaf
        row.reward[...] = after.reward
        row.terminated[...] = after.terminated
        row.truncated[...] = after.truncated
        row.valid[...] = after.valid
        for place, i in row.next_observation:
            place[...] = _leaves(after.next_observation)[i]
        for place, leaf in zip(row.shown, _leaves(after.observation), strict=True):
            place[...] = leaf
        row.last_reward[...] = after.reward
        row.begins[...] = after.first
        # Beginnings are rare: test before the masked write.
        if np.count_nonzero(after.first):
            row.last_reward[after.first] = 0
        self._steps += 1
        row.step[...] = self._steps
        returns, lengths = self._totals
        returns += after.reward
        lengths += after.valid
        done = after.terminated | after.truncated
        if self._unroll.info:
            self._episodes[3] += info_sums(after.info, done, after.valid)
        if np.count_nonzero(done):
            number, all_returns, all_lengths = self._episodes[:3]
            number += done
            all_returns += returns * done
            all_lengths += lengths * done
            returns[done] = 0
            lengths[done] = 0

    def _report(self, iterations: int) -> Report:
        """The report; copies the state, since the program updates it in place."""
        graph, sums = self._graph, self._held.sums
        self._held = self._held._replace(sums=self._no_metrics())
        copied = self._copied(self._held.state)
        recorded = dict(zip((value.id for value in self._recorded), self._data, strict=True))
        values = graph.state.inputs
        # None for the arrays of a replay, which are too large to copy for every report.
        kept = [recorded.get(value.id, copied.get(value.id)) for value in values]
        actor = self._actor()
        names = [name for name, _ in graph.metrics]
        taps, self._tapped = self._tapped, []

        def state(replay: bool = True) -> object:
            if not replay:
                return graph.state.tree.unflatten(kept)
            held = self._apart(self._held.state, self._data)
            own = zip(values, kept, strict=True)
            return graph.state.tree.unflatten(
                [held[value.id] if leaf is None else leaf for value, leaf in own]
            )

        return Report(
            iterations,
            dict(zip(names, np.asarray(sums), strict=True)),
            list(self._episodes),
            state,
            lambda: actor,
            spans={self._watch.worker: self._track.drain()},
            dropped_spans=self._track.dropped,
            finite=all_finite(kept, self._watched),
            taps=taps,
        )

    def _copies(self, together: Sequence[Leaf]) -> dict[int, jax.Array]:
        """Copies of the state values, except replays."""
        found, recorded = self._apart(together, ()), {value.id for value in self._recorded}
        return {
            value.id: jnp.copy(found[value.id])
            for value in self._graph.state.inputs
            if value.id not in recorded and value.side not in self._graph.tables
        }

    def _actor(self) -> ActorState:
        returns, lengths = self._totals
        step = np.full(len(self._number), self._steps, np.int32)
        timestep = jax.tree.map(np.copy, self._now)
        # Numpy arrays, where compiled code would have JAX arrays.
        totals = np.copy(returns), np.copy(lengths)
        return ActorState._make(((), timestep, (), self._keys, self._number, step, *totals))

    def status(self) -> list[Activity]:
        """The current activity of the only worker."""
        return [self._watch.status()]

    def close(self) -> None:
        """Stops the watchdog and closes the environments; safe to call twice."""
        self._watchdog.close()
        self._interruption.close()
        self._actor_envs.close()

    def _arrange(self, leaves: Sequence[Leaf]) -> None:
        """Decides which arrays of the state are packed."""
        self._bundles = bundles_of_state(self._graph, leaves)
        packed = {value.id for bundle in self._bundles for value in bundle.taken}
        packed |= {value.id for value in self._recorded}
        self._alone = [value for value in self._graph.state.inputs if value.id not in packed]
        self._impls = {
            value.id: jax.random.key_impl(jnp.zeros((), leaf.dtype))
            for value, leaf in zip(self._graph.state.inputs, leaves, strict=True)
            if is_key(leaf)
        }

    def _together(self, leaves: Iterable[Leaf]) -> list[Leaf]:
        """Packs the leaves of the state; keys become words."""
        found = dict(zip((v.id for v in self._graph.state.inputs), leaves, strict=True))
        packed = [bundle.pack([found[v.id] for v in bundle.taken]) for bundle in self._bundles]
        alone = [found[value.id] for value in self._alone]
        return [*packed, *(jax.random.key_data(x) if is_key(x) else x for x in alone)]

    def _apart(self, held: Sequence[Leaf], data: Sequence[Leaf]) -> dict[int, Leaf]:
        """Inverse of `_together`: the values of the state by number."""
        found = dict(zip((value.id for value in self._recorded), data, strict=bool(data)))
        for bundle, array in zip(self._bundles, held, strict=False):
            numbers = (value.id for value in bundle.taken)
            found |= dict(zip(numbers, bundle.unpack(array), strict=True))
        for value, array in zip(self._alone, held[len(self._bundles) :], strict=True):
            impl = self._impls.get(value.id)
            found[value.id] = array
            if impl is not None:
                found[value.id] = jax.random.wrap_key_data(jnp.asarray(array), impl=impl)
        return found

    def _no_metrics(self) -> jax.Array:
        return jnp.zeros(len(self._graph.metrics))

    def _turn(
        self, held: Held, data: list[Leaf], words: jax.Array, memory: jax.Array
    ) -> tuple[Held, list[Leaf]]:
        """Learns from the last step, then chooses the next action; compiled."""
        assert held.chosen is not None
        graph, seen = self._graph, self._read(memory)
        values: Values = {**self._apart(held.state, data)}
        run_fragments(self._before, values)
        values |= self._trajectory(held.chosen, seen)
        run_fragments(self._after, values)
        state = leaves_of(values, graph.state.outputs)
        metrics = leaves_of(values, [value for _, value in graph.metrics])
        sums = held.sums
        if metrics:
            sums = sums + jnp.stack([metric.astype(jnp.float32) for metric in metrics])
        after = Held(self._together(state), self._choice(state, words, seen), sums)
        return after, leaves_of(values, graph.tapped)

    def _first_choice(
        self, held: list[Leaf], data: list[Leaf], words: jax.Array, memory: jax.Array
    ) -> jax.Array:
        """Chooses the first action, before any learning; compiled."""
        values = self._apart(held, data)
        state = [values[value.id] for value in self._graph.state.inputs]
        return self._choice(state, words, self._read(memory))

    def _choice(self, state: list[Leaf], words: jax.Array, seen: dict[int, jax.Array]) -> jax.Array:
        """Acts with the weights in `state` on the timestep in `seen`; returns the words."""
        values = numbered(self._graph.state.inputs, state)
        run_fragments(self._before, values)
        at: Timestep = jax.tree.map(lambda value: seen[value.id], self._seen.actor.timestep)
        keys = jax.random.wrap_key_data(words, impl=self._impl)
        own = jax.vmap(act_key)(keys, seen[self._seen.step.id])
        return self._acting.choose(leaves_of(values, self._unroll.inputs), at, own)

    def _read(self, memory: jax.Array) -> dict[int, jax.Array]:
        """The values in the memory block."""
        bundle = self._slab.bundle(self._seen.values())
        assert bundle is not None
        numbers = (value.id for value in bundle.taken)
        return dict(zip(numbers, bundle.unpack(memory), strict=True))

    def _trajectory(self, made: jax.Array, seen: dict[int, jax.Array]) -> dict[int, jax.Array]:
        """The values of the unroll that are read, each [1, B, …]."""
        row, live = self._seen.row, self._seen.live
        extras = zip(jax.tree.leaves(row.extras), jax.tree.leaves(live.extras), strict=True)
        chosen = [*jax.tree.leaves(row.action), *(value for value, is_live in extras if is_live)]
        leaves = zip(chosen, self._acting.leaves(made), strict=True)
        found = {value.id: leaf[None] for value, leaf in leaves}
        last = zip(
            jax.tree.leaves(row.last), jax.tree.leaves(self._seen.actor.timestep), strict=True
        )
        found |= {value.id: seen[now.id][None] for value, now in last}
        return found | seen


class Done:
    """Finished iterations."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def wait(self) -> Report:
        """Returns the report immediately."""
        return self._report


class HostRow:
    """Views into the memory block to which the host writes a step."""

    def __init__(self, seen: Seen, arrays: dict[int, np.ndarray], now: Timestep) -> None:
        def of(tree: object) -> list[np.ndarray]:
            return [arrays[value.id][0] for value in jax.tree.leaves(tree)]

        row = seen.row
        [self.reward], [self.terminated] = of(row.reward), of(row.terminated)
        [self.truncated], [self.valid] = of(row.truncated), of(row.valid)
        self.shown = _leaves(now.observation)
        """The current observation."""
        [self.last_reward], [self.begins] = _leaves(now.reward), _leaves(now.first)
        pairs = zip(of((row.observation, row.first)), [*self.shown, self.begins], strict=True)
        self.before = list(pairs)
        """(row, current) pairs to copy before the current timestep is overwritten."""
        finals = enumerate(jax.tree.leaves(row.next_observation))
        self.next_observation = [
            (arrays[value.id][0], i) for i, value in finals if value.id in arrays
        ]
        self.step = arrays[seen.step.id]


def _leaves(tree: object) -> list[np.ndarray]:
    """The leaves of a tree; a bare array, the common case, skips the tree walk."""
    return [tree] if isinstance(tree, np.ndarray) else jax.tree.leaves(tree)
