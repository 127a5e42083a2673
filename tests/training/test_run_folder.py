"""What a training leaves behind, and what `--json` prints."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from small import LENGTH

from dovetail.algorithms import A2C
from dovetail.cli.main import main
from dovetail.inspection.explain import explain
from dovetail.plan.serial import from_json
from dovetail.run.folder import Run
from dovetail.strategies import Local
from dovetail.training.finish import farewell

KEYS = [
    "algorithm",
    "env",
    "strategy",
    "seed",
    "env_steps",
    "updates",
    "wall_s",
    "compile_s",
    "steps_per_s",
    "final_return",
    "time_to_threshold_s",
    "threshold",
    "run",
    "best_return",
    "best_step",
    "best_policy",
]
NAMES = (
    "config.json plan.txt plan.json graph.svg metrics.csv events telemetry.json spans.npz"
    " status.json checkpoints policy learning_curve.png video.mp4 summary.json"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The folder, standard output and standard error of one training by command."""
    folder = tmp_path_factory.mktemp("folder") / "run"
    line = "train a2c --env CartPole-v1 --strategy local --num-envs 4 --seed 5"
    line += f" --unroll-length {LENGTH}"
    line += f" --hidden-sizes 8 --total-steps 160 --episodes 3 --json --run {folder}"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            assert main(line.split()) == 0, err.getvalue()
    return folder, out.getvalue(), err.getvalue()


def test_every_file_is_there(trained: tuple[Path, str, str]) -> None:
    folder = trained[0]
    assert {path.name for path in folder.iterdir()} == set(NAMES.split())
    assert all(path.stat().st_size for path in folder.iterdir() if path.is_file())
    assert list((folder / "events").iterdir()) and len(list((folder / "policy").iterdir())) == 2
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["10"]
    assert (folder / "learning_curve.png").read_bytes()[:4] == b"\x89PNG"
    assert b"ftyp" in (folder / "video.mp4").read_bytes()[:16]


def test_json_is_the_summary_on_the_last_line(trained: tuple[Path, str, str]) -> None:
    folder, out, _ = trained
    told = json.loads(out.splitlines()[-1])
    assert list(told) == KEYS
    assert told == json.loads((folder / "summary.json").read_text()) == Run.open(folder).summary
    assert told["algorithm"] == "a2c" and told["strategy"] == "local" and told["seed"] == 5
    assert told["env"] == "gymnasium:CartPole-v1" and told["run"] == str(folder)
    assert (told["env_steps"], told["updates"], told["threshold"]) == (160, 10, 475.0)
    assert told["final_return"] >= 8 and told["time_to_threshold_s"] is None
    assert 0 < told["compile_s"] < told["wall_s"] and told["steps_per_s"] > 0


def test_config_names_everything(trained: tuple[Path, str, str]) -> None:
    config = Run.open(trained[0]).config
    assert (config["steps"], config["seed"], config["env"]) == (160, 5, "CartPole-v1")
    assert config["options"]["hidden_sizes"] == [8] and config["options"]["unroll_length"] == LENGTH
    assert config["strategy_options"] == {"sides": []}
    assert config["settings"]["episodes"] == 3
    assert {"dovetail", "jax", "gymnasium"} <= config["versions"].keys()


def test_metrics_are_rows_of_what_was_measured(trained: tuple[Path, str, str]) -> None:
    metrics = Run.open(trained[0]).metrics
    assert list(metrics)[:3] == ["time_s", "env_steps", "updates"]
    assert metrics["env_steps"][-1] == 160 and metrics["updates"][-1] == 10
    assert (np.diff(metrics["env_steps"]) > 0).all() and (np.diff(metrics["time_s"]) > 0).all()
    assert {"loss", "entropy", "steps_per_s", "episode_return"} <= metrics.keys()
    shares = [column[-1] for name, column in metrics.items() if name.startswith("share_")]
    assert 0.2 < sum(shares) <= 1.001


def test_the_end_says_what_was_done_and_what_to_try(trained: tuple[Path, str, str]) -> None:
    folder, _, err = trained
    assert err.startswith("The same in Python:")
    *_, told, value, best, where, following = err.splitlines()
    assert told.startswith("Trained a2c on gymnasium:CartPole-v1: 160 steps in ")
    assert "the threshold is 475, try more --total-steps" in value
    assert best.startswith("The best policy, of step 160, has a mean greedy return of ")
    assert where == f"The run is in {folder}"
    assert following.startswith(f"Next: dovetail watch {folder}")


def test_the_end_proposes_what_works() -> None:
    summary = {"algorithm": "a2c", "env": "x", "env_steps": 9, "wall_s": 1.0, "threshold": None}
    summary |= {"final_return": 0.92, "time_to_threshold_s": None}
    told = farewell(Run("my runs/x"), summary, watch=False)
    assert "return is 0.92." in told
    assert told.endswith("Next: dovetail eval 'my runs/x' · dovetail plot 'my runs/x'")
    assert "dovetail watch 'my runs/x'" in farewell(Run("my runs/x"), summary)


def test_the_plan_and_the_graph_are_the_plans(trained: tuple[Path, str, str]) -> None:
    text = (trained[0] / "plan.txt").read_text()
    assert "A2C" in text and "gymnasium:CartPole-v1" in text and "local" in text
    assert (trained[0] / "graph.svg").read_text().startswith("<svg")
    plan = from_json(json.loads((trained[0] / "plan.json").read_text()))
    explained = explain(
        A2C(unroll_length=LENGTH, num_envs=4, hidden_sizes=(8,)), "CartPole-v1", Local()
    )
    assert plan == explained.plan
