"""Records a run as a dataset: the graph's tap returns the steps of every update."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from dovetail.algorithm import Trajectory
from dovetail.data.recorder import Lanes, RecordedSteps, Recorder
from dovetail.errors import UserError
from dovetail.graph.ir import Graph
from dovetail.runtime.report import Report, UpdatePart


def recorded_steps(trajectory: Trajectory) -> RecordedSteps:
    """Selects the recorded part of a trajectory; the graph's tap returns exactly this."""
    named = {name: getattr(trajectory, name) for name in RecordedSteps._fields[:-1]}
    return RecordedSteps(**named, log_probability=getattr(trajectory.extras, "log_prob", None))


class Recording:
    """Passes the steps of every report to a recorder."""

    def __init__(self, recorder: Recorder, graph: Graph, updates: int) -> None:
        """`graph` has a tap of `recorded_steps`; `updates` were done before this start."""
        assert graph.tap is not None
        self._recorder, self._tree, self._updates = recorder, graph.tap.tree, updates

    def add(self, report: Report) -> None:
        """Records the steps of each update of a report."""
        for values, parts in report.taps:
            steps = self._tree.unflatten([np.asarray(leaf) for leaf in values])
            self._add(cast(RecordedSteps, steps), parts or [UpdatePart(0, self._updates, 0)])
            self._updates += 1

    def _add(self, steps: RecordedSteps, parts: Sequence[UpdatePart]) -> None:
        count = steps.reward.shape[1]
        each = count // len(parts)  # environments of a part
        actor, turn, behind = (np.repeat(column, each) for column in zip(*parts, strict=True))
        # Each actor owns `each` consecutive environments.
        env = each * actor + np.arange(count) % each
        self._recorder.add(steps, self._updates - behind, Lanes(env, turn))


def not_recorded(strategy: Any) -> UserError:
    """The error for a strategy that does not bring all steps to one learner."""
    return UserError(
        f"--record takes what one learner gathers, and {type(strategy).__name__} does not bring it "
        "all steps: choose another strategy, as local or actor-learner."
    )
