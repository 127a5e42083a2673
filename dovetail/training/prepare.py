"""Prepares a start of a run: its phases, each with place, plan and bound algorithm."""

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dovetail.algorithm import Algorithm
from dovetail.envs.resolve import Env
from dovetail.evaluation.play import check_greedy
from dovetail.hosts.deployment import Deployment
from dovetail.run.folder import Run
from dovetail.run.settings import Settings
from dovetail.strategies.interface import Strategy
from dovetail.training.callbacks import Callbacks
from dovetail.training.changes import Changed
from dovetail.training.dataset import RecordedData
from dovetail.training.phases import Phase, phases, task_of
from dovetail.training.place import Place
from dovetail.training.planning import Planned
from dovetail.training.replay_servers import ServedReplay

if TYPE_CHECKING:
    from dovetail.training.warm_start import WarmStart


@dataclass(frozen=True)
class PreparedPhase:
    """A phase with its plan and the algorithm bound to its task."""

    phase: Phase
    place: Place
    planned: Planned
    algorithm: Algorithm

    @property
    def last_step(self) -> int:
        """The last gradient step of an offline phase: its end, rounded up to whole updates."""
        each = self.planned.graph.offline_steps
        return -(-self.phase.end // each) * each


@dataclass(frozen=True)
class Preparation:
    """The common inputs of a run's phases."""

    algorithm: Algorithm
    given: Any
    """The environment as the user gave it."""
    env: Env
    where: Deployment | None
    settings: Settings
    recorded: RecordedData | None
    seed: int
    replay: ServedReplay | None = None
    """The servers that hold the replay, if any."""

    def phases(
        self, strategy: Strategy, steps: int, online_steps: int, stack: ExitStack
    ) -> list[PreparedPhase]:
        """Plans the phases of a run; `stack` closes their places."""
        data = None
        if self.recorded is not None:
            data = self.recorded.prepare(self.algorithm, self.env.spec, self.seed)
        found: list[PreparedPhase] = []
        for one in phases(self.algorithm, strategy, steps, online_steps, data is not None):
            # The offline phase takes whole updates and may end a little after `steps`.
            end = found[0].last_step + online_steps if found else one.end
            phase = replace(one, end=end)
            record = self.settings.record is not None and phase.online
            replay = self.replay if phase.online else None
            place = Place(self.algorithm, self.given, phase.strategy, self.where, record, replay)
            stack.callback(place.close)
            total = phase.end if phase.online else steps
            planned = place.plan(self.env, total, self.settings, data, phase.online)
            bound = self.algorithm.bind(task_of(planned, total, data, phase.online, place.served))
            found.append(PreparedPhase(phase, place, planned, bound))
        check_greedy(found[-1].algorithm)
        return found


@dataclass(frozen=True)
class RunStart:
    """One start of a run, new or resumed."""

    run: Run
    env: Env
    phases: list[PreparedPhase]
    config: dict[str, Any]
    settings: Settings
    began: float
    """`time.perf_counter()` when `train` or `resume` was called."""
    recorded: RecordedData | None
    silent: str | None
    """The reason why nothing is evaluated; None if evaluation is possible."""
    resumed: bool
    changed: Changed = field(default_factory=dict)
    """Options that change with this start of a resumed run."""
    warm: "WarmStart | None" = None
    """The parameters to begin with, if they are another run's."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    checkpoint: int | None = None
    """The checkpoint to resume from; by default, the latest."""

    @property
    def last(self) -> PreparedPhase:
        """The last phase."""
        return self.phases[-1]
