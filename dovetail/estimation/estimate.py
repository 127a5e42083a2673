"""Estimates a policy's return by every method that a dataset supports."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dovetail.algorithm import Algorithm
from dovetail.data.blocks import whole_episodes
from dovetail.data.episode import LOG_PROBABILITY
from dovetail.data.hdf5 import Piece
from dovetail.data.reader import Reader, check_fits
from dovetail.envs.interface import Continuous, Discrete
from dovetail.errors import UserError, check_option, nearest
from dovetail.estimation.fitted_q import FittedQ, Tell, Values, fit
from dovetail.estimation.parts import STEPS, Array, parts
from dovetail.estimation.target import Followed, Target
from dovetail.evaluation.trained import Trained, lacks_environment, load_trained
from dovetail.functions import off_policy_evaluation as ope
from dovetail.run.folder import Run

SAMPLING = {
    "is": ope.ordinary,
    "wis": ope.weighted,
    "pdis": ope.per_decision,
    "wpdis": ope.weighted_per_decision,
}
METHODS = {
    "is": "importance sampling",
    "wis": "weighted importance sampling",
    "pdis": "per-decision importance sampling",
    "wpdis": "weighted per-decision importance sampling",
    "dr": "doubly robust",
    "fqe": "fitted-Q evaluation",
}
ACTING = ("greedy", "sampled")
"""How the evaluated policy may act."""
CONFIDENCE = 0.95
DEVIATIONS = 1.96
"""Half the width of that interval, in standard deviations."""
UNSETTLED = 0.03
"""Tolerated remaining change of a value, as a fraction of it,"""
WIDE = 0.1
"""or, if that is within the interval, as a fraction of the typical value."""
FEW = 10
"""With fewer effective episodes than this, an interval is unreliable."""


@dataclass(frozen=True)
class Estimate:
    """The estimate of one method."""

    method: str
    value: float
    """The mean discounted return."""
    low: float
    high: float
    """The 95 % interval."""
    effective_episodes: float | None
    """Number of on-policy episodes with about as much information; None for fitted-Q."""
    note: str = ""
    """A caveat; empty if there is none."""


class _Lived(NamedTuple):
    """The data of each whole episode, one array per episode."""

    ratios: list[Array]
    rewards: list[Array]
    action_values: list[Array]
    """Empty, like `values`, unless values were fitted."""
    values: list[Array]
    """One more than there are steps."""


def estimate(
    dataset: str | Path,
    run: Run | str | Path,
    methods: tuple[str, ...] = (),
    *,
    gamma: float | None = None,
    acting: str = "greedy",
    epsilon: float = 0.0,
    options: FittedQ = FittedQ(),
    env: Any = None,
    tell: Tell | None = None,
) -> list[Estimate]:
    """The expected return of a run's policy in the environment in which a dataset was recorded.

    `acting` is "greedy", or "sampled" for the policy as it samples its actions in training.
    `methods` are keys of `METHODS`; by default, all that the dataset supports. `gamma` defaults to
    the algorithm's. With `epsilon` the policy takes that fraction of its actions uniformly at
    random. A run trained without an environment is assumed to have the dataset's observations and
    actions.
    """
    check_option("acting", acting, acting in ACTING, " or ".join(ACTING))
    opened = run if isinstance(run, Run) else Run.open(run)
    with Reader(dataset) as reader:
        trained = _loaded(opened, reader, env)
        own = getattr(trained.algorithm, "gamma", FittedQ.gamma)
        target = Target(trained.algorithm, trained.params[0], epsilon, acting == "sampled")
        chosen = own if gamma is None else gamma
        return estimate_policy(reader, target, methods, chosen, options, tell)


def _loaded(run: Run, reader: Reader, env: Any) -> Trained:
    """The run's policy, checked against the dataset's observations and actions."""
    try:
        trained = load_trained(run, env, reader.spec)
    except UserError as error:
        if env is not None or not lacks_environment(run):
            raise
        raise UserError(
            f"{run.path} was trained without an environment, and does not fit what the dataset "
            f"{reader.folder} shows: give one like {run.config['data']['folder']}, from which it "
            f"learned ({str(error).rstrip('.')})."
        ) from error
    check_fits(reader, trained.env.spec)
    return trained


def estimate_policy(
    reader: Reader,
    target: Target,
    methods: tuple[str, ...] = (),
    gamma: float = FittedQ.gamma,
    options: FittedQ = FittedQ(),
    tell: Tell | None = None,
) -> list[Estimate]:
    """The expected return of a target policy; see `estimate`."""
    for name in methods:
        if name not in METHODS:
            raise UserError(f"There is no method {name!r}: {nearest(name, METHODS)}")
    _refuse_gamma(gamma)
    _refuse_epsilon(target)
    _refuse_unknown_chances(target)
    if not reader.episodes.begun.any():
        raise UserError(
            f"No episode of {reader.folder} was recorded from its first step, and what a policy "
            "returns is counted from there: record whole episodes."
        )
    why_not = _no_sampling(reader, target)
    sampled = [name for name in methods if name != "fqe"]
    if why_not and sampled:
        raise UserError(why_not)
    wanted = methods or (("fqe",) if why_not else tuple(METHODS))
    followed = target.follow(reader)
    fitted = None
    if {"dr", "fqe"} & set(wanted):
        options = _with_gamma(options, gamma)
        fitted = fit(reader, followed.actions, options, epsilon=target.epsilon, tell=tell)
    lived = None
    if set(wanted) - {"fqe"}:
        lived = _lived(reader, followed, fitted)
    return [_one(name, reader, followed, lived, fitted, gamma) for name in wanted]


def _one(
    name: str,
    reader: Reader,
    followed: Followed,
    lived: _Lived | None,
    fitted: Values | None,
    gamma: float,
) -> Estimate:
    if name == "fqe":
        assert fitted is not None
        values = fitted.first_states(reader, followed.actions)
        return _by_values(fitted, values, reader.episodes.begun)
    assert lived is not None
    if name == "dr":
        found = ope.doubly_robust(*lived, gamma)
    else:
        found = SAMPLING[name](lived.ratios, lived.rewards, gamma)
    low, high = ope.interval(found, CONFIDENCE)
    effective = ope.effective_episodes(lived.ratios)
    return Estimate(name, ope.weighted_mean(found), low, high, effective, _note(name, effective))


def _note(name: str, effective: float) -> str:
    if effective >= FEW:
        return ""
    if name == "dr":
        return "hardly any episode counts: it rests on the fitted values"
    if effective == 0:
        return "the policy never agrees with a whole episode: nothing is left to weigh"
    return "hardly any episode counts: the interval is too narrow"


def _by_values(fitted: Values, values: Array, begun: Array) -> Estimate:
    """The first member's mean value over the first states of `begun` episodes; the spread of the
    others gives the interval."""
    # Values of states within an episode are not returns of a whole one.
    weights = fitted.weights * begun
    means = (weights * values).sum(axis=1) / np.maximum(weights.sum(axis=1), 1)
    half = DEVIATIONS * float(means[1:].std(ddof=1)) if len(means) > 2 else np.nan
    value = float(means[0])
    lack, within = fitted.lack, min(np.nan_to_num(half), WIDE * fitted.scale)
    settled = abs(lack) <= max(UNSETTLED * abs(value + lack), within)
    note = "" if settled else f"not settled, and about {lack:+.4g} to go: give more updates"
    return Estimate("fqe", value, value - half, value + half, None, note)


def _with_gamma(options: FittedQ, gamma: float) -> FittedQ:
    if not 0 <= gamma < 1:
        raise UserError(
            f"Fitted-Q evaluation was given the discount {gamma}: give 0 or more and less than "
            "1, or choose another method."
        )
    return replace(options, gamma=gamma)


def _refuse_gamma(gamma: float) -> None:
    if not 0 <= gamma <= 1:
        raise UserError(f"The discount is {gamma}: give 0 to 1, less than 1 for dr and fqe.")


def _refuse_epsilon(target: Target) -> None:
    space = target.algorithm.task.env.action
    if not 0 <= target.epsilon <= 1:
        raise UserError(f"epsilon is {target.epsilon}: give 0 to 1.")
    if target.epsilon > 0 and not isinstance(space, Discrete):
        raise UserError(
            f"epsilon is {target.epsilon}, but the policy's actions are {space}: only Discrete "
            "actions can be drawn evenly; leave it out."
        )


def _refuse_unknown_chances(target: Target) -> None:
    kind = type(target.algorithm)
    if target.sampled and kind.log_prob is Algorithm.log_prob:
        raise UserError(
            f"{kind.__name__} does not say how probable its actions are, so it cannot be judged as "
            "sampled: judge it as greedy, with epsilon for the share of its random actions."
        )


def _no_sampling(reader: Reader, target: Target) -> str:
    """Why importance sampling is impossible, and the alternatives; empty if it is possible."""
    space = target.algorithm.task.env.action
    if isinstance(space, Continuous) and not target.sampled:
        return (
            f"Importance sampling cannot judge a greedy policy with the actions {space}, for it "
            "never takes exactly what was recorded: use the method fqe, which needs no "
            "probabilities, or judge the policy as it draws its actions (--acting sampled)."
        )
    unknown = _unknown(reader)
    if unknown:
        return (
            f"The dataset {reader.folder} does not say how probable {unknown:,} of its "
            f"{reader.num_steps:,} actions were, and importance sampling needs that: use the "
            "method fqe, which does not, or record a policy that draws its actions "
            "(dovetail eval RUN --explore --record FOLDER, of ppo, dqn, sac, iql or their kin)."
        )
    return ""


def _unknown(reader: Reader) -> int:
    """Number of steps without a recorded log-probability."""
    if not reader.has_log_probabilities:
        return reader.num_steps
    lengths, column, count = reader.episodes.lengths, f"infos/{LOG_PROBABILITY}", 0
    for run in whole_episodes(lengths, STEPS):
        pieces = [Piece(number, 0, int(lengths[number])) for number in run]
        count += int(np.isnan(reader.storage.read(pieces, [column])[column]).sum())
    return count


def _lived(reader: Reader, followed: Followed, fitted: Values | None) -> _Lived:
    """The data of every whole episode; fragments are left out."""
    lengths, whole = reader.episodes.lengths, reader.episodes.whole
    if not whole.any():
        raise UserError(
            f"No episode of {reader.folder} was recorded from its first step to its last: "
            "importance sampling needs whole ones; record for longer, or use the method fqe."
        )
    lived, at = _Lived([], [], [], []), 0
    for run in parts(reader):
        rows = reader.rows(run.start, run.stop)
        own, chance = (x[at : at + len(rows.reward)] for x in followed)
        at += len(rows.reward)
        ratios = np.exp(chance - rows.log_probability)
        q, v = fitted.along(rows, own) if fitted is not None else (None, None)
        begin = 0
        for number in run:
            part = slice(begin, begin + int(lengths[number]))
            begin = part.stop + 1
            if not whole[number]:
                continue
            lived.ratios.append(ratios[part])
            lived.rewards.append(rows.reward[part])
            if q is not None and v is not None:
                # The value after a termination is zero.
                v[part.stop] *= not rows.terminated[part.stop - 1]
                lived.action_values.append(q[part])
                lived.values.append(v[part.start : part.stop + 1])
    return lived
