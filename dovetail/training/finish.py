"""The end of a run: final evaluation, summary, exported policy, plots, and next commands."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dovetail.envs.resolve import Env
from dovetail.errors import UserError, command
from dovetail.evaluation.evaluate import Evaluation
from dovetail.evaluation.kept import read_kept
from dovetail.functions.statistics import bootstrap_interval, interquartile_mean
from dovetail.run.folder import Run
from dovetail.telemetry.plot import learning_curve
from dovetail.telemetry.progress import Progress, number
from dovetail.telemetry.sinks import MetricsWriter
from dovetail.telemetry.tensorboard import TensorBoardSink
from dovetail.telemetry.video import record_video
from dovetail.training.background_evaluation import BackgroundEvaluation
from dovetail.training.best_policy import BestPolicy
from dovetail.training.loop import Loop
from dovetail.training.prepare import RunStart
from dovetail.training.rows import columns
from dovetail.training.signals import Stop

FILM_STEPS = 200
"""Number of steps in TensorBoard's animation."""


@dataclass(frozen=True)
class FinalEvaluation:
    """The returns of the trained policy, or of each seed's policy."""

    final_return: float | None
    best: int
    """The seed whose policy is exported."""
    seeds: dict[str, Any]
    """With several seeds: each seed's return and the interval of the interquartile mean."""


def seed_params(params: Any, seeds: int) -> list[Any]:
    """Splits parameters by seed; with one seed there is no seed axis."""
    if seeds == 1:
        return [params]
    return [jax.tree.map(lambda x, i=i: x[i], params) for i in range(seeds)]


def judge(evaluations: list[Evaluation | None]) -> FinalEvaluation:
    """The mean return of one seed, or the interquartile mean of several with its interval."""
    means = [evaluation.mean for evaluation in evaluations if evaluation is not None]
    if not means:
        return FinalEvaluation(None, 0, {})
    if len(evaluations) == 1:
        return FinalEvaluation(means[0], 0, {})
    returns = np.asarray(means)
    low, high = bootstrap_interval(returns[:, None])
    interval = [float(np.ravel(low)[0]), float(np.ravel(high)[0])]
    seeds = {"final_returns": means, "final_return_interval": interval}
    return FinalEvaluation(
        float(np.ravel(interquartile_mean(returns))[0]), int(returns.argmax()), seeds
    )


def finish(
    start: RunStart,
    loop: Loop,
    evaluations: BackgroundEvaluation,
    recorder: MetricsWriter,
    best: BestPolicy,
    stop: Stop,
    progress: Progress,
) -> None:
    """Evaluates for the last time, writes the files of a finished run and prints a summary.

    After a stop request it skips the slow parts, evaluation and plots.
    """
    run, config, algorithm, env = start.run, start.config, start.last.algorithm, start.env
    params = seed_params(algorithm.acting(loop.good.state(replay=False)), loop.settings.seeds)
    if not stop and not loop.judged and not evaluations.silent:
        progress.message(f"Evaluating over {loop.settings.episodes} episodes …")
        found = [evaluations.evaluate(one, stop) for one in params]
        loop.evaluation = found[0] or loop.evaluation
        loop.write_row(recorder, _final_columns(found))
    else:  # the evaluation that reached the goal, or the last one, counts as the final one
        found = [loop.evaluation]
        loop.write_row(recorder)
    recorder.close()
    outcome = judge([loop.evaluation] if stop else found)
    last = params[outcome.best]
    # What was evaluated in the background was offered then.
    evaluated = None if stop or loop.judged else found[outcome.best]
    if evaluated is not None:
        best.offer(last, loop.reached, evaluated)
    summary = summarize(run, config, loop, outcome) | best.summary()
    run.write_json("summary.json", summary)
    best.write_last(last, loop.reached, evaluated or (loop.evaluation if loop.judged else None))
    progress.close()
    if not stop:
        shown = _draw(run, None if evaluations.silent else env, loop, progress)
        progress.message(farewell(run, summary, shown))


def _final_columns(found: list[Evaluation | None]) -> dict[str, float]:
    """The final evaluation as columns of the last row; empty if a stop request cut it short."""
    means = [evaluation.mean for evaluation in found if evaluation is not None]
    if len(means) < len(found):
        return {}
    return columns({"eval_return": np.asarray(means if len(means) > 1 else means[0])})


def summarize(
    run: Run, config: dict[str, Any], loop: Loop, outcome: FinalEvaluation
) -> dict[str, Any]:
    """The object that `--json` prints."""
    reached = loop.reached
    threshold, final = config["threshold"], outcome.final_return
    solved = threshold is not None and final is not None and final >= threshold
    if solved and reached.time_to_threshold is None:
        reached.time_to_threshold = loop.elapsed
    speed = loop.steps_per_s
    return {
        "algorithm": config["algorithm"],
        "env": config["env_id"],
        "strategy": config["strategy"],
        "seed": config["seed"],
        "env_steps": reached.env_steps,
        "updates": reached.updates,
        "wall_s": round(loop.elapsed, 3),
        "compile_s": round(loop.runtime.compile_seconds, 3),
        "steps_per_s": None if math.isnan(speed) else round(speed, 1),
        "final_return": outcome.final_return,
        "time_to_threshold_s": reached.time_to_threshold,
        "threshold": config["threshold"],
        "run": str(run.path),
        **outcome.seeds,
    }


def _draw(run: Run, env: Env | None, loop: Loop, progress: Progress) -> bool:
    """Draws the learning curve and, if enabled and possible, records a video; returns whether the
    agent can be watched, as far as is known."""
    try:
        learning_curve(run, run.path / "learning_curve.png")
    except UserError as nothing_to_draw:
        progress.message(str(nothing_to_draw))
    if loop.settings.video and env is not None:
        policy = read_kept(run).policy().predict
        video = record_video(env, policy, run.path / "video.mp4")
        if video.reason is not None:
            progress.message(video.reason)
            return False
        if loop.settings.log_video:
            made = record_video(env, policy, run.path / "video.gif", max_steps=FILM_STEPS)
            if made.path is not None:
                events = TensorBoardSink(run.path / "events")
                events.write_gif(loop.reached.env_steps, made.path.read_bytes())
                events.close()
    return env is not None


def farewell(run: Run, summary: dict[str, Any], watch: bool = True) -> str:
    """The final message: the result, the folder, and commands to try next, `watch` among them if it
    would show something."""
    took = f"{summary['env_steps']:,} steps in {summary['wall_s']:.1f} s"
    lines = [f"Trained {summary['algorithm']} on {summary['env']}: {took}."]
    if summary["final_return"] is not None:
        interval = summary.get("final_return_interval")
        spread = ""
        if interval:
            spread = f" (95 % interval {number(interval[0])} … {number(interval[1])})"
        kind = "interquartile mean return" if interval else "mean greedy return"
        lines.append(f"The {kind} is {number(summary['final_return'])}{spread}{_verdict(summary)}.")
    if summary.get("best_return") is not None:
        lines.append(
            f"The best policy, of step {summary['best_step']:,}, has a mean greedy return of "
            f"{number(summary['best_return'])} and is in {run.path / summary['best_policy']}"
        )
    lines.append(f"The run is in {run.path}")
    words = ("watch", "eval", "plot") if watch else ("eval", "plot")
    lines.append("Next: " + " · ".join(command(word, run.path) for word in words))
    return "\n".join(lines)


def _verdict(summary: dict[str, Any]) -> str:
    threshold, reached = summary["threshold"], summary["time_to_threshold_s"]
    if threshold is None:
        return ""
    if reached is None:
        return f"; the threshold is {threshold:g}, try more --total-steps"
    return f"; the threshold of {threshold:g} was reached after {reached:.1f} s"
