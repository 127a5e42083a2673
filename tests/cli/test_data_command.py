"""`dovetail data`: every action prints what it did, and every mistake is a sentence."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from gymnasium import spaces
from recorded_control import OFFLINE, record_random
from small import QUIET

import dovetail
from dovetail.algorithms import BC
from dovetail.cli import data as command
from dovetail.cli.main import main
from dovetail.data import Episode, Metadata, Reader, Source, Writer
from dovetail.data.spaces import to_json
from dovetail.estimation import Estimate, FittedQ

BOX = spaces.Box(-np.inf, np.inf, (2,), np.float32)


def make(folder: str, lengths: list[int], bad: int | None = None, actions: int = 3) -> Path:
    source = Source("test:Env-v0", "training", "runs/x", "DQN", 3)
    metadata = Metadata(BOX, spaces.Discrete(actions), "test:Env-v0", sources=(source,))
    with Writer(folder, metadata) as writer:
        for number, steps in enumerate(lengths):
            rewards = np.ones(steps)
            rewards[0] = np.nan if number == bad else 1
            end = np.arange(steps) == steps - 1
            writer.write(
                Episode(
                    observations=np.zeros((steps + 1, 2)),
                    actions=np.zeros(steps),
                    rewards=rewards,
                    terminations=end & (number > 0),
                    truncations=end & (number == 0),
                    infos={"version": np.full(steps, number)},
                )
            )
    return Path(folder)


def told(capsys: pytest.CaptureFixture[str], line: str) -> str:
    assert main(shlex.split(f"data {line}")) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.parametrize("action", command.ACTIONS)
def test_every_action_has_a_help_with_an_example(
    action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = told(capsys, f"{action} --help")
    assert "\nexample:\n" in out
    assert out.splitlines()[-1].startswith(f"  dovetail data {action} ")
    assert f"\n  {action} " in told(capsys, "--help")


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    make("d", [2, 4])
    assert told(capsys, "info d --check").splitlines()[1:] == [
        "environment    test:Env-v0",
        "episodes       2 with 6 steps: 1 terminated, 1 truncated",
        "returns        mean 3 ± 1, from 2 to 4",
        "lengths        mean 3, from 2 to 4",
        "observations   Box(-inf, inf, (2,), float32)",
        "actions        Discrete(3)",
        "probabilities  of actions are not known",
        "versions       0 to 1",
        "source         training, of DQN, on test:Env-v0, seed 3, run runs/x",
        "checked        all of it is whole and finite, every choice is in its space",
    ]
    make("e", [1])
    first, second = map(json.loads, told(capsys, "info d e --json").splitlines())
    assert (first["steps"], second["steps"], first["checked"]) == (6, 1, False)
    assert first["returns"] == {"mean": 3.0, "deviation": 1.0, "low": 2.0, "high": 4.0}


def test_merge_split_and_export(capsys: pytest.CaptureFixture[str]) -> None:
    make("a", [2, 4, 1, 1, 1, 1])
    make("b", [3, 5, 2, 2], bad=1)
    assert told(capsys, "merge a b --out c --drop-invalid") == (
        "c has 9 episodes, 17 steps; 1 were left out.\n"
    )
    with Reader("c") as reader:
        assert reader.episodes.lengths.tolist() == [2, 4, 1, 1, 1, 1, 3, 2, 2]
        assert reader.episodes.sources.tolist() == [0] * 6 + [1] * 3
    made = json.loads(told(capsys, "split c --shares 0.6,0.4 --out x,y --seed 4 --json"))
    assert [one["episodes"] for one in made] == [5, 4]
    assert sum(one["steps"] for one in made) == 17
    with Reader("x") as one, Reader("y") as other:
        lengths = [*one.episodes.lengths.tolist(), *other.episodes.lengths.tolist()]
        assert sorted(lengths) == [1, 1, 1, 1, 2, 2, 2, 3, 4]
    assert json.loads(told(capsys, "export c --format parquet --out t --json"))["steps"] == 17
    assert Path("t/data/part-00000.parquet").exists()
    assert told(capsys, "export t --out back") == "back has 9 episodes, 17 steps.\n"
    with Reader("back") as reader:
        assert reader.episode(1).rewards.tolist() == [1, 1, 1, 1]
        assert len(reader.metadata.sources) == 2


def test_what_of_minaris_is_left_out_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    folder = make("theirs", [2, 4]) / "data"
    with h5py.File(folder / "main_data.hdf5", "a") as file:
        file["episode_0"].attrs["seed"] = 7
        file["episode_1/infos/wind"] = np.zeros((4, 2))
    (folder / "index.npz").unlink()  # as Minari leaves it
    sentence = "Minari's own infos/wind, seed were left out: they are not read here.\n"
    assert told(capsys, "merge theirs --out ours") == f"ours has 2 episodes, 6 steps.\n{sentence}"
    assert told(capsys, "export theirs --format parquet --out t").endswith(sentence)
    assert told(capsys, "split theirs --shares 0.5,0.5 --out x,y").endswith(f"steps.\n{sentence}")
    made = json.loads(told(capsys, "merge theirs --out again --json"))
    assert made["unread"] == ["infos/wind", "seed"]
    assert told(capsys, "merge ours t --out both") == "both has 4 episodes, 12 steps.\n"


def test_repair(capsys: pytest.CaptureFixture[str]) -> None:
    writer = Writer("d", Metadata(BOX, spaces.Discrete(3), sources=(Source("e"),)))
    end = np.array([True])
    writer.write(Episode(np.zeros((2, 2)), np.zeros(1), np.ones(1), end, ~end))
    writer.abandon()
    assert told(capsys, "repair d") == "d has 1 episodes, 1 steps.\n"
    assert json.loads(told(capsys, "info d --json"))["episodes"] == 1


def test_estimate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []

    def estimate(*given: Any, options: FittedQ, tell: Any, **more: Any) -> list[Estimate]:
        seen.append((given, options, more))
        return [
            Estimate("wis", 12.5, 10.0, 15.0, 34.25),
            Estimate("fqe", 13.0, float("nan"), float("nan"), None, "beware"),
        ]

    monkeypatch.setattr(dovetail, "estimate", estimate, raising=False)
    line = "estimate d runs/x --method wis,fqe --gamma 0.9 --updates 7 --epsilon 0.1"
    line += " --acting sampled"
    assert told(capsys, line).splitlines() == [
        "wis         12.5  95 % 10 to 15  34.2 effective episodes",
        "fqe           13  95 % nan to nan  (beware)",
    ]
    assert seen == [
        (
            ("d", "runs/x", ("wis", "fqe")),
            FittedQ(updates=7),
            {"gamma": 0.9, "epsilon": 0.1, "acting": "sampled"},
        )
    ]
    shown = json.loads(told(capsys, "estimate d runs/x --json"))
    assert [one["low"] for one in shown["estimates"]] == [10.0, None]


@pytest.mark.slow
def test_estimate_of_a_run_that_had_no_environment(capsys: pytest.CaptureFixture[str]) -> None:
    record_random(Path("d"), "CartPole-v1", 6, 9, environment="")
    record_random(Path("other"), "Acrobot-v1", 2, 9, environment="")
    settings = replace(QUIET, folder="runs/alone")
    dovetail.train(BC(**OFFLINE), data="d", total_steps=8, settings=settings)
    shown = json.loads(told(capsys, "estimate d runs/alone --updates 20 --json"))
    assert [one["method"] for one in shown["estimates"]] == ["fqe"]
    assert np.isfinite(shown["estimates"][0]["value"])
    assert told(capsys, "estimate d runs/alone --updates 20").startswith("fqe ")
    assert main(shlex.split("data estimate other runs/alone")) == 2
    err = capsys.readouterr().err
    assert "runs/alone was trained without an environment, and does not fit what the data" in err
    assert "/d, from which it learned (" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "line, sentence",
    [
        ("inf d", "dovetail data has no action 'inf': did you mean 'info'?"),
        ("info", "DATASET is missing"),
        ("info absent", "There is no dataset absent: give the folder of a dataset."),
        ("info d", "The dataset d has nan in rewards of episode 0, step 0"),
        ("merge d", "Name the folder of the new dataset with --out FOLDER."),
        ("merge d --out d", "The folder d is not empty, and a dataset never overwrites anything"),
        ("merge d e --out new", "e has actions Discrete(2), but d has Discrete(3)"),
        ("merge d --out new --drop-invalid", "No episode is left for new: it would be empty."),
        ("split d --out x,y --shares 0.5,0.6", "The shares are 0.5,0.6: give two or more above 0"),
        ("split d --out x,y --shares a", "--shares wants a comma-separated list (a number)"),
        ("split d --out x", "There are 2 shares, but 1 folders: give one each."),
        ("split d --out x,x", "Two parts would go into one folder"),
        ("split d --out x,y", "d has 1 episodes, too few for the shares 0.9,0.1"),
        (
            "export d --format parqet --out x",
            "There is no format 'parqet': did you mean 'parquet'?",
        ),
        ("repair d", "d has no recording.part: there is nothing to repair."),
        ("estimate d", "RUN is missing"),
        ("estimate d absent", "There is no run at absent"),
    ],
)
def test_a_mistake_is_a_sentence(
    line: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make("d", [3], bad=0)
    make("e", [3], actions=2)
    if line == "info d":
        line = "info d --check"
    assert main(shlex.split(f"data {line}")) == 2
    out, err = capsys.readouterr()
    assert sentence in err and err.count("\n") == 1
    assert out == ""
    assert not Path("new/data").exists()


@pytest.mark.parametrize(
    "change, sentence",
    [
        (
            {"action_space": json.dumps({"type": "Discrete", "n": 0})},
            "d/data/metadata.json is damaged (AssertionError: ",
        ),
        (
            {"action_space": json.dumps({"type": "Discreet", "n": 3})},
            "d/data/metadata.json: A dataset with elements of the space {'type': 'Discreet', 'n'",
        ),
        (
            {"dovetail": {"infos": ["version", "moods"]}},
            "d/data/metadata.json says that every step has 'moods', which this Dovetail does not",
        ),
        ({"total_episodes": -1}, "The dataset d is empty: it has no episode."),
        (
            {"data_format": "dovetail-parquet", "dovetail": {"files": {}}},
            "d/data has no table with a row, but its metadata.json says 2 episodes: take both",
        ),
    ],
)
def test_metadata_that_cannot_be_are_a_sentence(
    change: dict[str, Any], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = make("d", [2, 4]) / "data" / "metadata.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | change))
    assert main(["data", "info", "d"]) == 2
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1


def test_a_table_of_other_columns_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """Such as a file of another dataset that has as many bytes."""
    told(capsys, f"export {make('d', [2, 4])} --format parquet --out t")
    place = Path("t/data/metadata.json")
    record = json.loads(place.read_text())
    record["dovetail"]["infos"] = ["version", "log_probability"]
    place.write_text(json.dumps(record))
    assert main(["data", "info", "t", "--check"]) == 2
    assert "t/data/part-00000.parquet is damaged (" in capsys.readouterr().err
    record["dovetail"]["infos"] = ["version"]
    record["observation_space"] = json.dumps(to_json(spaces.Box(0, 1, (3,), np.float32)))
    place.write_text(json.dumps(record))
    assert main(["data", "info", "t", "--check"]) == 2
    assert "t/data/part-00000.parquet is damaged (" in capsys.readouterr().err


def test_what_takes_long_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make("d", [2, 4])
    told(capsys, "merge d --out quick")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(command, "QUIET_SECONDS", 0.0)
    assert main(["data", "merge", "d", "--out", "slow"]) == 0
    assert capsys.readouterr().err.startswith("episodes written: 0 of 2\n")
