"""Loads the trained policy of a run, or an exported policy, to act with it anywhere."""

from pathlib import Path

from dovetail.errors import UserError
from dovetail.evaluation.export import RECORD_FILE, Exported, Origin, PolicyExporter, read_exported
from dovetail.evaluation.kept import LAST, Which, check_which, has_best, read_best
from dovetail.evaluation.policy import Policy
from dovetail.evaluation.trained import load_trained
from dovetail.run.checkpoint import Checkpoints
from dovetail.run.folder import Run


def load(
    run: Run | str | Path,
    which: Which | None = None,
    *,
    algorithm: type | str | None = None,
    trust: bool = False,
) -> Policy:
    """Loads a trained policy: `action, state = load(run).predict(observation)`.

    `run` is a run, its folder, or a folder with an exported policy. Of a run it takes the best
    policy, or the last if none was evaluated; `which` is "best", "last" or the number of a
    checkpoint. A checkpoint needs the algorithm's class, given as `algorithm` (the class, or
    "file.py:Name") if the run's own file is no longer found; exported policies need neither.
    `trust` allows the code that the config of a run from elsewhere names.
    """
    return find_exported(run, which, algorithm=algorithm, trust=trust).policy()


def find_exported(
    run: Run | str | Path,
    which: Which | None = None,
    *,
    algorithm: type | str | None = None,
    trust: bool = False,
) -> Exported:
    """The exported policy of a run or folder; see `load`."""
    check_which(which)
    if not isinstance(run, Run):
        folder = Path(run)
        if (folder / RECORD_FILE).is_file():
            return _alone(folder, which)
        if folder.name == "policy" and (folder.parent / "config.json").is_file():
            folder = folder.parent
        run = Run.open(folder)
    if which == "best" or (which is None and has_best(run)):
        return read_best(run)
    latest = Checkpoints(run.path / "checkpoints").latest()
    if which in (None, "last") and (run.path / LAST / RECORD_FILE).is_file():
        exported = read_exported(run.path / LAST)
        if latest is None or exported.origin.updates >= latest:
            return exported
    return _from_checkpoint(run, "last" if which is None else which, algorithm, trust)


def _alone(folder: Path, which: Which | None) -> Exported:
    """The one policy of a folder that is not a run's."""
    if which is not None and folder.name != which:
        raise UserError(
            f"{folder} holds one policy, so there is none to choose: leave out which={which!r}, or "
            "give the run's folder."
        )
    return read_exported(folder)


def _from_checkpoint(run: Run, which: Which, algorithm: type | str | None, trust: bool) -> Exported:
    """Exports the policy of a checkpoint; of several seeds, that with the highest final return."""
    trained = load_trained(run, which=which, algorithm=algorithm, trust=trust)
    returns = run.summary.get("final_returns") or [0.0] * len(trained.params)
    seed = max(range(len(trained.params)), key=lambda index: returns[index])
    origin = Origin(trained.env_steps, trained.updates)
    return PolicyExporter(trained.algorithm).export(trained.params[seed], origin)
