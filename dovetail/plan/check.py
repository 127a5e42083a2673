"""Checks that a plan is sound. Each check either passes or raises a sentence.

A strategy may be user code, so its plan is not trusted. Everything the runtime relies on is checked
here, in one ordered list.
"""

from collections import Counter
from collections.abc import Callable

from dovetail.boundaries import Side
from dovetail.errors import UserError, nearest
from dovetail.graph.ir import Fragment, Graph, Python, Unroll
from dovetail.graph.show import count
from dovetail.plan.ir import LinkKind, Plan, WorkerKind
from dovetail.plan.passes import STATE, linked, pairs, table_workers


def check(plan: Plan, graph: Graph, devices: int | None = None) -> None:
    """Refuses a plan that the runtime cannot run; `devices` is the number the machine has."""
    check_placement(plan, graph, devices)
    for one_check in LINK_CHECKS:
        one_check(plan, graph)


def check_placement(plan: Plan, graph: Graph, devices: int | None = None) -> None:
    """Refuses an unsound placement; the passes that derive links rely on a sound one."""
    for one_check in PLACEMENT_CHECKS:
        one_check(plan, graph)
    if devices is not None:
        _devices_exist(plan, devices)


def _sizes_are_positive(plan: Plan, graph: Graph) -> None:
    sizes = plan.num_envs, plan.joined, *(number for _, number in plan.copies)
    if min(sizes) < 1 or min(plan.staleness, plan.prefetch) < 0:
        copies = ", ".join(f"{number} of {side}" for side, number in plan.copies)
        raise _refusal(
            plan,
            f"has {plan.num_envs} environments, copies {copies}, of which {plan.joined} that act "
            f"make an update, a staleness of {plan.staleness} and a prefetch of {plan.prefetch}; "
            "it needs at least 1 of each, and a staleness and a prefetch of 0 or more",
        )


def _who_joins_late_is_not_waited_for(plan: Plan, graph: Graph) -> None:
    if plan.min_actors is not None and plan.ordered:
        raise _refusal(
            plan,
            f"lets actors join later ({plan.min_actors}..{plan.actors}), but every update waits "
            f"for all of them; allow a staleness of 1 or more, or give one number of actors",
        )


def _environments_divide(plan: Plan, graph: Graph) -> None:
    """Actors have equal shares, and every replica learns from equally many actors."""
    actors, replicas = plan.copies_of(*graph.acting), plan.copies_of(graph.home)
    if plan.num_envs % actors:
        raise _refusal(
            plan,
            f"has {plan.num_envs} environments on {actors} actors; choose a multiple of {actors} "
            "environments",
        )
    if graph.unrolls and (actors % plan.joined or plan.joined % replicas):
        raise _refusal(
            plan,
            f"joins {plan.joined} of {actors} actors on {replicas} replicas; let every update take "
            "as many actors as there are, or 1",
        )


def _workers_have_devices(plan: Plan, graph: Graph) -> None:
    """Workers with programs have a device, and processes only step or host other sides."""
    computing = {i.worker for i in plan.instances if not _is_host_step(i.fragment, graph)}
    for worker in plan.workers:
        if worker.name in computing and not worker.devices:
            raise _refusal(plan, f"gives worker {worker.name!r} no device, but programs to run")
        hosted = {i.fragment for i in plan.instances if i.worker == worker.name}
        local = {node.name for node in graph.on(graph.home)}
        local |= {f"{unroll.name}.act" for unroll in graph.unrolls}
        local |= {f"{u.name}.step" for u in graph.unrolls if u.step.program is not None}
        local |= {node.name for node in graph.on(*graph.acting)}
        if worker.kind is WorkerKind.PROCESS and hosted & local:
            raise _refusal(
                plan,
                f"learns or acts on worker {worker.name!r}, a process; processes step environments "
                "that live on the host, or host other sides",
            )
    if not plan.workers:
        raise _refusal(plan, "has no worker; it needs at least 1")


def _nobody_waits_to_act(plan: Plan, graph: Graph) -> None:
    """In an offline algorithm, every worker must learn."""
    busy = {instance.worker for instance in plan.instances}
    idle = next((worker.name for worker in plan.workers if worker.name not in busy), None)
    if not graph.unrolls and idle is not None:
        raise _refusal(
            plan,
            f"gives worker {idle!r} nothing to do: {graph.algorithm} learns from recorded data, "
            "and nobody acts in it: use fused, local or data-parallel",
        )


def _is_host_step(fragment: str, graph: Graph) -> bool:
    """Whether a fragment is the stepping half of an unroll."""
    return any(fragment == f"{unroll.name}.step" for unroll in graph.unrolls)


def _names_differ(plan: Plan, graph: Graph) -> None:
    for name, times in Counter(worker.name for worker in plan.workers).items():
        if times > 1:
            raise _refusal(plan, f"has {times} workers of the name {name!r}; names must differ")


def _devices_are_used_once(plan: Plan, graph: Graph) -> None:
    for worker in plan.workers:
        for device, times in Counter(worker.devices).items():
            if times > 1:
                raise _refusal(
                    plan,
                    f"gives worker {worker.name!r} device {device} {times} times; give it once",
                )


def _instances_exist(plan: Plan, graph: Graph) -> None:
    """Instances name fragments of the graph and workers of the plan."""
    fragments, workers = graph.fragments, {worker.name for worker in plan.workers}
    for instance in plan.instances:
        if instance.fragment not in fragments:
            hint = nearest(instance.fragment, fragments)
            raise _refusal(plan, f"places {instance.fragment!r}, which is no fragment; {hint}")
        if instance.worker not in workers:
            what = f"places {instance.fragment!r} on {instance.worker!r}, which is no worker"
            raise _refusal(plan, f"{what}; {nearest(instance.worker, workers)}")


def _sides_stay_together(plan: Plan, graph: Graph) -> None:
    """The state of each copy of a side must live on one worker."""
    homes: dict[tuple[Side, int], str] = {}
    for node in graph.nodes:
        name = f"{node.name}.act" if isinstance(node, Unroll) else node.name
        for instance in plan.instances_of(name):
            # A copy is identified by the first of its environments.
            copy = 0 if instance.envs is None else instance.envs[0]
            home = homes.setdefault((node.side, copy), instance.worker)
            if home != instance.worker:
                raise _refusal(
                    plan,
                    f"places {name!r} on {instance.worker!r} but other {node.side} fragments on "
                    f"{home!r}; the {node.side} side keeps its state on one worker",
                )


def _fragments_are_placed(plan: Plan, graph: Graph) -> None:
    """Every fragment is placed once per copy, or once on a worker with a device for each copy.

    Stepping covers every environment exactly once.
    """
    actors = plan.copies_of(*graph.acting)
    for node in graph.nodes:
        copies, placed = plan.copies_of(node.side), plan.instances_of(node.name)
        if isinstance(node, Unroll):
            _ranges_cover(plan, f"{node.name}.act", actors, actors)
            _ranges_cover(plan, f"{node.name}.step", None, actors)
        elif node.side == graph.home and len(placed) != 1:
            raise _refusal(
                plan,
                f"places {node.name!r} {len(placed)} times; the learner's fragments are placed "
                "once, on a worker with a device for each replica",
            )
        elif node.side in graph.acting or len(placed) > 1:
            _refuse_learning_apart(plan, graph, node.side, node.name)
            _ranges_cover(plan, node.name, copies, actors)
        elif not placed:
            raise _refusal(
                plan,
                f"places nothing of the side {node.side!r} ({node.name!r}); give its fragments a "
                "worker, or make the plan with Strategy.place, which puts them with the learner",
            )
        elif copies not in (1, len(plan.worker(placed[0].worker).devices)):
            raise _refusal(
                plan,
                f"has {copies} copies of {node.side}, but places {node.name!r} once, on a worker "
                f"with {count(len(plan.worker(placed[0].worker).devices), 'device')}; place it "
                "once for each copy",
            )


def _refuse_learning_apart(plan: Plan, graph: Graph, side: Side, fragment: str) -> None:
    """Refuses copies with changing state on several workers: they would diverge.

    Tables are exempt, since each copy holds different rows, and so are acting sides.
    """
    if side in (*graph.acting, *graph.tables):
        return
    pairs_of = zip(graph.state.inputs, graph.state.outputs, strict=True)
    if any(old.side == side and old.id != new.id for old, new in pairs_of):
        raise _refusal(
            plan,
            f"has {plan.copies_of(side)} copies of {side} on workers of their own, but "
            f"{graph.algorithm} changes the state there, so they would drift apart; use 1 copy",
        )


def _ranges_cover(plan: Plan, fragment: str, copies: int | None, actors: int) -> None:
    """The instances must partition the environments, and no range may span two actors.

    With `copies`, there must be exactly that many ranges.
    """
    ranges = sorted(i.envs or (0, plan.num_envs) for i in plan.instances_of(fragment))
    # A partition: each range begins where the one before it ends.
    ends = [0, *(last for _, last in ranges)]
    whole = [first for first, _ in ranges] == ends[:-1] and ends[-1] == plan.num_envs
    size = plan.num_envs // min(actors, copies or actors)
    inside = all(first // size == (last - 1) // size for first, last in ranges if last > first)
    if not whole or not inside or (copies is not None and len(ranges) != copies):
        served = ", ".join(f"{first}–{last - 1}" for first, last in ranges) or "none"
        wanted = count(actors, "equal range") if copies is not None else "each of them once"
        raise _refusal(
            plan,
            f"places {fragment!r} for the environments {served}; it must serve "
            f"0–{plan.num_envs - 1}, {wanted}, none across two actors",
        )


def _groups_are_equal(plan: Plan, graph: Graph) -> None:
    """With several groups of environments per actor, a batch consists of whole groups."""
    for unroll in graph.unrolls:
        steps = plan.instances_of(f"{unroll.name}.step")
        sizes = {i.envs[1] - i.envs[0] for i in steps if i.envs is not None}
        actors = plan.copies_of(unroll.side)
        if len(steps) > actors and len(sizes) > 1:
            raise _refusal(
                plan,
                f"splits the environments into groups of {_numbers(sizes)}; make them equal",
            )
        batch = plan.batch or plan.num_envs // actors
        if len(steps) > actors and sizes and batch % next(iter(sizes)):
            raise _refusal(
                plan,
                f"acts on {batch} environments at a time, but they come in groups of "
                f"{_numbers(sizes)}; choose a multiple",
            )


def _numbers(sizes: set[int]) -> str:
    return " and ".join(map(str, sorted(sizes)))


def _learner_fills_its_devices(plan: Plan, graph: Graph) -> None:
    """A learner's worker has one device for each replica."""
    replicas = plan.copies_of(graph.home)
    learners = {i.worker for n in graph.on(graph.home) for i in plan.instances_of(n.name)}
    for name in learners:
        devices = len(plan.worker(name).devices)
        if devices != replicas:
            raise _refusal(
                plan,
                f"has {replicas} learner replicas, but worker {name!r} has {devices} devices; "
                "give it one for each",
            )


def _staleness_is_tolerated(plan: Plan, graph: Graph) -> None:
    """The staleness is within what the algorithm's correction tolerates."""
    if graph.staleness is not None and plan.staleness > graph.staleness:
        raise _refusal(
            plan,
            f"lets trajectories be {count(plan.staleness, 'version')} old, but {graph.algorithm} "
            f"corrects with {graph.correction} and tolerates {graph.staleness}; lower --staleness "
            f"to {graph.staleness}, or use an algorithm with V-trace (impala, appo)",
        )
    if not plan.ordered and plan.staleness == 0:
        raise _refusal(
            plan,
            "takes unrolls as they arrive with a staleness of 0; let it be ordered, or allow 1",
        )


def _exchange_allows_staleness(plan: Plan, graph: Graph) -> None:
    """Staleness needs a single exchange between learner and actors per iteration."""
    order = [node.name for node in graph.nodes]
    sources = [edge.source for edge in graph.edges if edge.to_side in graph.acting]
    out = [order.index(source) for source in sources if source in order]
    inward = [edge for edge in graph.edges if edge.from_side in graph.acting]
    back = [order.index(target) for edge in inward for target in edge.targets]
    if plan.staleness and out and back and max(out) >= min(back):
        raise _refusal(
            plan,
            f"has a staleness of {plan.staleness}, but {graph.algorithm} sends to its actors after "
            "it has heard from them, within one iteration; use a staleness of 0",
        )


def _links_join_instances(plan: Plan, graph: Graph) -> None:
    """The ends of every link exist."""
    reached = [node.reach.side for node in graph.reaching if node.reach is not None]
    ends = [*graph.fragments, STATE, *reached]
    for link in plan.links:
        for end in (link.source, link.target):
            if end not in ends:
                raise _refusal(
                    plan,
                    f"links {link.boundary} to {end!r}, which is not placed; {nearest(end, ends)}",
                )


def _edges_are_carried(plan: Plan, graph: Graph) -> None:
    """Every edge has exactly one link for each reader, and no link is without an edge."""
    wanted = Counter[tuple[str, str, str]]()
    acting = {unroll.name: f"{unroll.name}.act" for unroll in graph.unrolls}
    for edge in graph.edges:
        for target in linked(plan, graph, edge):
            wanted[edge.boundary, acting.get(edge.source, edge.source), target] += 1
    for unroll in graph.unrolls:
        act, step = f"{unroll.name}.act", f"{unroll.name}.step"
        wanted["action", act, step] += 1
        wanted["observation", step, act] += 1
    for node in graph.reaching:
        assert node.reach is not None
        ends = (node.name, node.reach.side) if node.reach.sends else (node.reach.side, node.name)
        wanted[node.name, *ends] += 1
    # Counted, because two edges may have the same boundary and ends.
    carried = Counter((link.boundary, link.source, link.target) for link in plan.links)
    for boundary, source, target in {**wanted, **carried}:
        want, have = wanted[boundary, source, target], carried[boundary, source, target]
        if want != have:
            raise _refusal(
                plan,
                f"carries {boundary} from {source!r} to {target!r} by {have} links; "
                f"the graph has {want} such edges, each for one link",
            )


def _links_suit_their_ends(plan: Plan, graph: Graph) -> None:
    """Fused and hand-off links stay within a worker, queues join threads, the rest processes."""
    acting = {unroll.name: f"{unroll.name}.act" for unroll in graph.unrolls}
    sides: dict[tuple[str, str, str], list[Side]] = {}  # several edges may have the same ends
    for edge in graph.edges:
        for target in linked(plan, graph, edge):
            ends = edge.boundary, acting.get(edge.source, edge.source), target
            sides.setdefault(ends, []).append(edge.from_side)
    for link in plan.links:
        known = sides.get((link.boundary, link.source, link.target))
        # Links of the same ends come in the order of their edges, as `carry_edges` makes them.
        side = known.pop(0) if known else ""
        for source, target in pairs(plan, graph, link.source, link.target, side):
            one, other = plan.worker(source.worker), plan.worker(target.worker)
            within = one.name == other.name
            process = WorkerKind.PROCESS in (one.kind, other.kind)
            fits = {
                LinkKind.FUSED: within and not process,
                LinkKind.HANDOFF: within and not process,
                LinkKind.QUEUE: not within and not process,
                LinkKind.SHARED_MEMORY: process,
                LinkKind.PIPE: process,
                LinkKind.OBJECT_STORE: not within and not process and bool(plan.processes),
                LinkKind.SOCKET: False,  # its other end is outside the plan, so `pairs` is empty
            }
            if not fits[link.kind]:
                raise _refusal(
                    plan,
                    f"carries {link.boundary} from {link.source!r} on {one.kind} {one.name} to "
                    f"{link.target!r} on {other.kind} {other.name} by a {link.kind} link; fused "
                    "and hand-off links stay within a worker, queues join threads, shared memory "
                    "joins processes",
                )


def _replicas_are_joined(plan: Plan, graph: Graph) -> None:
    """Several replicas need `rl.mean`, or their weights would drift apart."""
    means = sum(node.means for node in graph.nodes if isinstance(node, Fragment))
    replicas = plan.copies_of(graph.home)
    if replicas > 1 and means == 0:
        raise _refusal(
            plan,
            f"has {replicas} learner replicas, but {graph.algorithm} never calls rl.mean, so "
            "they would drift apart; average its gradients with rl.mean, or use 1 replica",
        )


def _devices_exist(plan: Plan, devices: int) -> None:
    highest = max((device for worker in plan.workers for device in worker.devices), default=0)
    if highest >= devices:
        raise _refusal(
            plan,
            f"uses device {highest}, but this machine has {devices}, numbered from 0; lower "
            "--devices, or on a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={highest + 1}",
        )


def _tables_have_their_workers(plan: Plan, graph: Graph) -> None:
    """A table with several shards or a prefetch needs its own workers, unless all is fused."""
    if all(worker.fused for worker in plan.workers):
        return
    apart, copies = table_workers(plan, graph), plan.copies_of(*graph.tables)
    if plan.copies_of(*graph.acting) % copies:
        raise _refusal(
            plan,
            f"keeps the rows of {count(plan.copies_of(*graph.acting), 'actor')} in "
            f"{count(copies, 'shard')}; choose a number of actors that the shards divide",
        )
    if (plan.prefetch or copies > 1) and not apart:
        raise _refusal(
            plan,
            f"keeps the replay with the learner, but in {count(copies, 'shard')} and "
            f"{count(plan.prefetch, 'update')} ahead; give each shard a worker",
        )
    if apart and plan.ranks > 1:
        raise _refusal(
            plan, f"has {plan.ranks} learner processes, but one replay; use 1 learner process"
        )


def _python_is_alone(plan: Plan, graph: Graph) -> None:
    """Plain Python cannot be compiled into a fused program.

    On an acting side with other workers it is allowed: fragments there are compiled separately from
    the unroll.
    """
    for node in graph.nodes:
        apart = node.side in graph.acting and len(plan.workers) > 1
        hosts = plan.instances_of(node.name)
        if (
            isinstance(node, Python)
            and not apart
            and any(plan.worker(i.worker).fused for i in hosts)
        ):
            raise _refusal(
                plan,
                f"compiles {node.name!r}, which is plain Python ({node.where}), with other "
                "fragments; place it on a worker that is not fused",
            )


def _means_are_joined(plan: Plan, graph: Graph) -> None:
    """`mean` on an acting side synchronizes replicas only if everything is one program."""
    replicas = plan.copies_of(graph.home)
    if replicas == 1 or all(worker.fused for worker in plan.workers):
        return
    for node in graph.on(*graph.acting):
        if isinstance(node, Fragment) and node.means:
            raise _refusal(
                plan,
                f"has {replicas} replicas, but {graph.algorithm} calls rl.mean on the actors' "
                "side, which only the Fused strategy can join; average there with rl.reduce",
            )


PLACEMENT_CHECKS: tuple[Callable[[Plan, Graph], None], ...] = (
    _sizes_are_positive,  # everything below divides and counts by them
    _environments_divide,
    _who_joins_late_is_not_waited_for,
    _names_differ,  # instances name their workers
    _instances_exist,
    _nobody_waits_to_act,
    _workers_have_devices,
    _devices_are_used_once,
    _learner_fills_its_devices,  # before copies are counted by devices
    _fragments_are_placed,
    _sides_stay_together,
    _groups_are_equal,
    _staleness_is_tolerated,
    _exchange_allows_staleness,
    _replicas_are_joined,
    _tables_have_their_workers,
    _python_is_alone,
    _means_are_joined,
)
"""In this order: a check may rely on those before it."""

LINK_CHECKS: tuple[Callable[[Plan, Graph], None], ...] = (
    _links_join_instances,
    _edges_are_carried,
    _links_suit_their_ends,  # needs every link's ends placed
)
"""In this order, after the placement's."""


def _refusal(plan: Plan, found: str) -> UserError:
    stop = "" if found.endswith(("?", ".")) else "."
    return UserError(f"The plan of strategy {plan.strategy!r} {found}{stop}")
