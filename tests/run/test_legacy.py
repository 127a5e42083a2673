"""Runs and config files with the names of earlier versions are read as if written today."""

import json
from pathlib import Path

import pytest

import dovetail as dt
from dovetail.cli.main import main
from dovetail.run import legacy
from dovetail.run.folder import Run

TINY = "--num-envs 2 --unroll-length 4 --hidden-sizes 4 --episodes 1 --no-video"


def test_an_option_keeps_its_name_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legacy, "OPTIONS", {"then": ("never", "now")})
    assert legacy.with_present_options({"then": 1, "other": 2}, {"now"}) == {"now": 1, "other": 2}
    assert legacy.with_present_options({"then": 1}, {"then", "now"}) == {"then": 1}
    assert legacy.with_present_options({"then": 1}, set()) == {"then": 1}


def test_a_run_whose_config_says_policy_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = (
        f"train a2c --env dovetail:Chain-v0 --policy fused --total-steps 16 {TINY} --run {folder}"
    )
    assert main(words.split()) == 0
    file = folder / "config.json"
    config = json.loads(file.read_text())
    assert config["strategy"] == "fused" and "policy" not in config
    earlier = {"strategy": "policy", "strategy_options": "policy_options"}
    file.write_text(json.dumps({earlier.get(key, key): value for key, value in config.items()}))
    assert Run(folder).config["strategy"] == "fused"
    assert dt.resume(folder, total_steps=32).summary["env_steps"] == 32


def test_a_config_file_may_say_policy(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('env = "dovetail:Chain-v0"\nsteps = 16\n[policy]\nname = "fused"\nenvs = 2\n')
    folder = tmp_path / "run"
    words = f"train a2c --config {file} --unroll-length 4 --hidden-sizes 4 --episodes 1 --no-video"
    assert main([*words.split(), "--run", str(folder)]) == 0
    assert Run(folder).config["strategy"] == "fused"
    assert Run(folder).config["options"]["num_envs"] == 2


@pytest.mark.parametrize("name", ["num_envs", "envs"])
def test_a_run_whose_strategy_had_the_number_of_environments_goes_on(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "run"
    words = f"train a2c --env dovetail:Chain-v0 --total-steps 16 {TINY} --run {folder}"
    assert main(words.split()) == 0
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["strategy_options"][name] = config["options"].pop("num_envs")
    file.write_text(json.dumps(config))
    assert dt.evaluate_run(folder, episodes=2).returns.shape == (2,)
    run = dt.resume(folder, total_steps=32)
    assert run.summary["updates"] == 4 and run.config["options"]["num_envs"] == 2
    assert run.config["strategy_options"] == {"sides": [], "devices": 1}


def test_the_copies_of_an_earlier_plan(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    earlier = {"policy": "actor-learner", "replicas": 1, "actors": 4, "shards": 2}
    (folder / "plan.json").write_text(json.dumps(earlier))
    (folder / "summary.json").write_text(json.dumps({"policy": "actor-learner"}))
    assert Run(folder).copies["replay"] == 2 and Run(folder).copies["actor"] == 4
    assert Run(folder).summary == {"strategy": "actor-learner"}
