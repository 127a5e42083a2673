"""Runs that learn from recorded data: alone, then in the environment, interrupted, refused."""

import csv
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
from recorded_control import OFFLINE, OfflineTD3, record_random
from small import QUIET, numbers, ppo, stop_after

import dovetail
from dovetail.algorithms import DQN, R2D2, TD3
from dovetail.cli.main import main
from dovetail.data import Episode, Metadata, Reader, Source, Writer
from dovetail.errors import UserError
from dovetail.evaluation.trained import load_trained
from dovetail.run.checkpoint import Checkpoints
from dovetail.run.folder import Run
from dovetail.run.settings import Settings
from dovetail.strategies import Local

ALGORITHM = OfflineTD3(**OFFLINE, buffer_size=64, learning_starts=4)
HERE = f"{Path(__file__).parent.parent / 'recorded_control.py'}:OfflineTD3"


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_random(tmp_path_factory.mktemp("data") / "pendulum", "Pendulum-v1", 6, 20)


def quiet(folder: Path, **more: Any) -> Settings:
    return dataclasses.replace(QUIET, folder=str(folder), **more)


def params(run: Run) -> np.ndarray:
    return numbers(load_trained(run, which="last").params)


def rows(run: Run) -> list[dict[str, str]]:
    with open(run.path / "metrics.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_gradient_steps_are_what_is_counted(pendulum: Path, tmp_path: Path) -> None:
    run = dovetail.train(ALGORITHM, data=pendulum, total_steps=22, settings=quiet(tmp_path / "run"))
    assert run.summary["env_steps"] == 24 and run.summary["updates"] == 6
    assert run.summary["env"] == "gymnasium:Pendulum-v1" and run.summary["strategy"] == "fused"
    assert run.summary["final_return"] < 0
    assert run.config["data"]["steps"] == 120 and run.config["env"] == "gymnasium:Pendulum-v1"
    assert rows(run)[-1]["env_steps"] == "24"
    expected = dovetail.interpret(
        ALGORITHM,
        "Pendulum-v1",
        iterations=6,
        total_steps=22,
        data=pendulum,
        debug=False,
    )
    own = ALGORITHM.bind(dovetail.Task(load_trained(run).env.spec, 8, 22)).acting(expected.state)
    np.testing.assert_allclose(params(run), numbers([own]), rtol=1e-5, atol=1e-5)
    assert dovetail.evaluate_run(run, episodes=2).mean == pytest.approx(run.summary["final_return"])


def test_the_data_are_not_in_checkpoints(pendulum: Path, tmp_path: Path) -> None:
    run = dovetail.train(ALGORITHM, data=pendulum, total_steps=8, settings=quiet(tmp_path / "run"))
    record = json.loads((run.path / "checkpoints" / "2" / "meta.json").read_text())
    names = [leaf["path"] for leaf in record["leaves"]]
    assert names and not any(".data" in name or ".replay" in name for name in names)


def test_a_resumed_run_is_the_same_run(
    pendulum: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the offline phase, between the phases, and in the online one."""
    told: dict[str, Any] = {"data": pendulum, "total_steps": 11, "online_steps": 24}
    few, local = dataclasses.replace(ALGORITHM, num_envs=4), Local()
    whole = dovetail.train(few, None, local, **told, settings=quiet(tmp_path / "whole"))
    assert whole.summary["env_steps"] == 36 and whole.summary["updates"] == 3 + 6
    assert [int(row["updates"]) for row in rows(whole)][-1] == 9
    monkeypatch.setattr("dovetail.training.loop.REPORT_SECONDS", 0.0)
    for looks in (3, 6, 9):
        folder = tmp_path / str(looks)
        with monkeypatch.context() as patched:
            stop_after(patched, looks)
            with pytest.raises(BaseException, match="everything is saved"):
                dovetail.train(few, None, local, **told, settings=quiet(folder))
        reached = Checkpoints(folder / "checkpoints").latest()
        assert reached is not None and reached < 9
        run = dovetail.resume(folder)
        assert run.summary["env_steps"] == 36 and run.summary["updates"] == 9
        updates = [int(row["updates"]) for row in rows(run)]
        assert updates == sorted(set(updates))
        if reached <= 3:  # host environments begin new episodes where they are resumed
            np.testing.assert_array_equal(params(run), params(whole))


def test_an_offline_run_goes_on_online_later(pendulum: Path, tmp_path: Path) -> None:
    run = dovetail.train(ALGORITHM, data=pendulum, total_steps=12, settings=quiet(tmp_path / "run"))
    before = params(run)
    with pytest.raises(UserError, match="its total is 12: give a larger one with --total-steps"):
        dovetail.resume(run)
    more = dovetail.resume(run, online_steps=64)
    assert more.config["strategy"] == "local" and more.summary["env_steps"] == 76
    state = load_trained(more, which="last")
    assert np.abs(numbers(state.params) - before).max() > 1e-4
    with pytest.raises(UserError, match="its total is 76: give a larger one with --online-steps"):
        dovetail.resume(run)


def test_any_off_policy_algorithm_takes_data_beside_its_replay(
    pendulum: Path, tmp_path: Path
) -> None:
    algorithm = TD3(**OFFLINE, buffer_size=64, learning_starts=4)
    run = dovetail.train(
        algorithm, "Pendulum-v1", data=pendulum, total_steps=32, settings=quiet(tmp_path / "run")
    )
    assert run.summary["env_steps"] == 32 and run.summary["strategy"] == "local"
    assert load_trained(run, which="last").updates == 4


def test_several_seeds_share_the_data(pendulum: Path, tmp_path: Path) -> None:
    settings = quiet(tmp_path / "run", seeds=2)
    run = dovetail.train(ALGORITHM, data=pendulum, total_steps=8, settings=settings)
    assert len(run.summary["final_returns"]) == 2
    first, second = (numbers(one) for one in load_trained(run, which="last").params)
    alone = dovetail.train(
        ALGORITHM, data=pendulum, total_steps=8, seed=1, settings=quiet(tmp_path / "alone")
    )
    np.testing.assert_allclose(second, params(alone), rtol=1e-5, atol=1e-5)
    assert np.abs(first - second).max() > 1e-3


def test_without_an_environment_nothing_is_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = record_random(tmp_path / "data", "Pendulum-v1", 3, 9, environment="")
    settings = quiet(tmp_path / "run", display="plain", video=True)
    run = dovetail.train(ALGORITHM, data=folder, total_steps=8, settings=settings)
    assert run.summary["final_return"] is None and run.summary["env"] == "dataset:data"
    told = capsys.readouterr().err
    assert "Nothing is evaluated: the dataset names no environment." in told
    assert "8 gradient steps on 27 recorded steps of" in told
    assert "--num-envs" not in told  # nobody acts
    with pytest.raises(UserError, match="without an environment: give one with --env"):
        dovetail.evaluate_run(run)
    found = dovetail.evaluate_run(run, episodes=1, env="Pendulum-v1")
    assert found.mean < 0 and found.which == "last"
    assert run.summary["best_return"] is None and dovetail.load(run).mean_return is None
    with pytest.raises(UserError, match="has no best policy, since none of its policies was eval"):
        dovetail.load(run, "best")
    folder = folder.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="there is no such folder: give its new place with --data"):
        dovetail.resume(run, total_steps=16)
    assert dovetail.resume(run, total_steps=16, data=folder).summary["env_steps"] == 16
    assert run.config["data"]["folder"] == str(folder)
    with pytest.raises(UserError, match=r"no environment to act in \(the dataset names no"):
        dovetail.train(ALGORITHM, data=folder, total_steps=8, online_steps=8)


def test_a_dataset_that_changed_is_not_gone_on_with(tmp_path: Path) -> None:
    folder = record_random(tmp_path / "data", "Pendulum-v1", 3, 9)
    run = dovetail.train(ALGORITHM, data=folder, total_steps=8, settings=quiet(tmp_path / "run"))
    record = folder / "data" / "metadata.json"
    text = record.read_text()
    record.write_text(text + "\n")
    with pytest.raises(UserError, match=r"has changed since the run began \(its metadata.json"):
        dovetail.resume(run, total_steps=16)
    shutil.rmtree(folder)
    record_random(folder, "Pendulum-v1", 4, 9)
    with pytest.raises(UserError, match="has 36 steps, but had 27 when the run began"):
        dovetail.resume(run, total_steps=16)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match=f"learns from the dataset {folder}, and there is no such"):
        dovetail.resume(run, total_steps=16)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["train", *words]) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    return told.splitlines()[-1]


def test_what_does_not_fit_is_refused(pendulum: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(pendulum)
    told = refused(capsys, HERE, "--env", "Pendulum-v1")
    assert "OfflineTD3 learns from recorded data: give the folder of a dataset with --data" in told
    told = refused(capsys, "ppo", "--env", "Pendulum-v1", "--data", data)
    assert "PPO learns only from what it does itself, not from recorded data" in told
    told = refused(capsys, "r2d2", "--env", "CartPole-v1", "--data", data)
    assert "R2D2 learns only from what it does itself" in told
    told = refused(capsys, "td3", "--env", "MountainCarContinuous-v0", "--data", data)
    assert "has observations float32[3], but" in told and "shows float32[2]" in told
    told = refused(capsys, "dqn", "--env", "Pendulum-v1", "--data", data)
    assert "DQN acts in Discrete action spaces" in told
    told = refused(capsys, "td3", "--data", str(pendulum / "nothing"))
    assert "There is no dataset" in told
    told = refused(capsys, "td3", "--env", "Pendulum-v1", "--online-steps", "8")
    assert "--online-steps 8 go on acting after learning from recorded data" in told
    told = refused(capsys, HERE, "--data", data, "--strategy", "actor-learner")
    assert "nobody acts in it: use fused, local or data-parallel" in told
    told = refused(capsys, HERE, "--data", data, "--record", "somewhere")
    assert "--record takes what is lived through, and nobody acts" in told
    told = refused(capsys, HERE, "--data", data, "--data-memory", "0")
    assert "--data-memory is 0: give 1 megabyte or more" in told


def test_actions_of_other_bounds_are_refused(pendulum: Path, tmp_path: Path) -> None:
    def scaled() -> Any:
        low, high = np.array([[-1], [1]], np.float32)
        return gymnasium.wrappers.RescaleAction(gymnasium.make("Pendulum-v1"), low, high)

    told: dict[str, Any] = {"data": pendulum, "total_steps": 4, "settings": quiet(tmp_path / "run")}
    sentence = r"has actions from -2 to 2 \(entry 0\), but python:scaled takes them from -1 to 1: "
    with pytest.raises(UserError, match=sentence):
        dovetail.train(ALGORITHM, scaled, **told)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("field", ["observations", "actions", "rewards"])
@pytest.mark.parametrize("streamed", [False, True])
def test_numbers_that_are_not_finite_are_named_before_there_is_a_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    streamed: bool,
) -> None:
    from gymnasium import spaces

    box = spaces.Box(-1, 1, (2,), np.float32)
    folder, run = tmp_path / "data", tmp_path / "run"
    with Writer(folder, Metadata(box, box, sources=(Source("none"),))) as writer:
        for number in range(3):
            arrays = {
                "observations": np.zeros((6, 2), np.float32),
                "actions": np.zeros((5, 2), np.float32),
                "rewards": np.zeros(5, np.float32),
            }
            if number == 1:
                arrays[field][3] = np.nan
            end = np.arange(5) == 4
            writer.write(Episode(**arrays, terminations=end, truncations=~end & False))
    if streamed:  # a step at a time
        monkeypatch.setattr("dovetail.training.dataset.MEGABYTE", 1)
    words = ["--data", str(folder), "--data-memory", "2000" if not streamed else "100"]
    told = refused(capsys, HERE, *words, "--total-steps", "4", "--run", str(run), "--no-video")
    assert f"has nan in {field} of episode 1, step 3" in told
    assert not run.exists()


def test_choices_that_cannot_be_are_named_before_there_is_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not as a loss that diverged."""
    folder = record_random(tmp_path / "data", "CartPole-v1", 3, 9)
    with Reader(folder) as reader:
        metadata, episodes = reader.metadata, list(reader)
    episodes[1].actions[2] = 7
    with Writer(tmp_path / "bad", metadata) as writer:
        for episode in episodes:
            writer.write(episode)
    run = tmp_path / "run"
    told = refused(capsys, "dqn", "--data", str(tmp_path / "bad"), "--run", str(run))
    assert "has 7 in actions of episode 1, step 2, which is outside of Discrete(2)" in told
    assert not run.exists()


def test_data_that_are_in_memory_are_read_once(
    pendulum: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    pieces = Reader.pieces

    def noted(reader: Reader, asked: Any) -> Any:
        read.append(sum(piece.stop - piece.start for piece in asked))
        return pieces(reader, asked)

    monkeypatch.setattr(Reader, "pieces", noted)
    dovetail.train(ALGORITHM, data=pendulum, total_steps=4, settings=quiet(tmp_path / "run"))
    assert read == [1, 120 + 6]  # a row to see what rows are like, and all


def test_a_damaged_dataset_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record_random(tmp_path / "data", "Pendulum-v1", 3, 9)
    file = folder / "data" / "main_data.hdf5"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert "main_data.hdf5" in refused(capsys, HERE, "--data", str(folder))
    file.unlink()
    assert "main_data.hdf5" in refused(capsys, HERE, "--data", str(folder))


def test_actions_are_clipped_inside_their_bounds(tmp_path: Path) -> None:
    from dovetail.training.dataset import RecordedData

    folder = record_random(tmp_path / "data", "Pendulum-v1", 3, 9)
    data = RecordedData(folder)
    spec = data.reader.spec
    data.prepare(ALGORITHM, spec, 0)
    with data.reader as reader:
        bound = ALGORITHM.bind(dovetail.Task(spec, 1, 1))
        own = np.concatenate([episode.actions for episode in reader])
        seen = bound.recorded_row(reader.rows(0, 3)._replace(action=own)).action
    assert own.max() > 1.9 and own.min() < -1.9
    assert seen.max() == np.float32(1 - 1e-5) == -seen.min()


def test_the_command_line_goes_the_whole_way(
    pendulum: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    words = [
        HERE,
        "--data",
        str(pendulum),
        "--total-steps",
        "8",
        "--online-steps",
        "16",
        "--run",
        run,
    ]
    words += [
        "--batch-size",
        "8",
        "--hidden-sizes",
        "8",
        "--gradient-steps",
        "4",
        "--learning-starts",
        "4",
    ]
    words += ["--episodes", "2", "--evaluate-every", "0", "--no-video", "--display", "none"]
    assert main(["train", *words, "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["env_steps"] == 24
    assert f"data={str(pendulum)!r}" in told.err and "online_steps=16" in told.err
    assert main(["eval", run, "--episodes", "2"]) == 0
    assert main(["train", "--resume", run, "--online-steps", "32", "--quiet"]) == 0
    assert Run.open(run).summary["env_steps"] == 40


def test_dqn_can_be_shown_recorded_steps_alone(tmp_path: Path) -> None:
    folder = record_random(tmp_path / "data", "CartPole-v1", 6, 9)
    algorithm = DQN(4, 2, 8, buffer_size=64, learning_starts=4, hidden_sizes=(8,))
    told: dict[str, Any] = {
        "total_steps": 4,
        "online_steps": 32,
        "settings": quiet(tmp_path / "run"),
    }
    run = dovetail.train(algorithm, "dovetail:CartPole-v1", data=folder, **told)
    assert run.summary["env_steps"] == 4 + 32 and run.summary["strategy"] == "fused"
    assert not R2D2.takes_data and not ppo().takes_data
    assert jax.tree.leaves(load_trained(run, which="last").params)


def test_a_dataset_on_the_disk_is_read_as_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round after round, however far one dispatch would go; and the same when it is resumed."""
    from dovetail.data import rounds

    folder = record_random(tmp_path / "data", "Pendulum-v1", 30, 20)
    monkeypatch.setattr("dovetail.training.dataset.MEGABYTE", 14_000)  # 600 steps take 20 kB
    taken: list[int] = []
    take = rounds.Feed.take

    def noted(feed: rounds.Feed, update: int) -> Any:
        taken.append(update)
        return take(feed, update)

    monkeypatch.setattr(rounds.Feed, "take", noted)
    told: dict[str, Any] = {"data": folder, "data_memory": 1}
    run = dovetail.train(ALGORITHM, **told, total_steps=24, settings=quiet(tmp_path / "run"))
    assert taken[:3] == [0, 2, 4] and len(taken) == 3  # 72 steps at a time, 32 of each update
    whole = dovetail.interpret(
        ALGORITHM, "Pendulum-v1", iterations=6, total_steps=24, data=folder,
        data_memory=1,
        debug=False,
    )  # fmt: skip
    own = ALGORITHM.bind(dovetail.Task(load_trained(run).env.spec, 8, 24)).acting(whole.state)
    np.testing.assert_allclose(params(run), numbers([own]), rtol=1e-5, atol=1e-5)
    half = dovetail.train(ALGORITHM, **told, total_steps=12, settings=quiet(tmp_path / "half"))
    np.testing.assert_array_equal(params(dovetail.resume(half, total_steps=24)), params(run))
