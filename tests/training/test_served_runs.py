"""Runs whose replay servers keep: resumed, shared, and ended by what goes wrong with a server."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import QUIET
from survival import LOST, RESUMES, survives

import dovetail
from dovetail import ServedReplay, UserError, serve_replay
from dovetail.algorithms import DQN, PPO
from dovetail.cli.main import main
from dovetail.replay import ReplayClient, ReplayServer
from dovetail.replay.service.address import Address
from dovetail.strategies import ActorLearner, Local
from dovetail.training.replay_servers import Servers, limiter_of, served_form

CHAIN = "dovetail:Chain-v0"
ENVS = 4
ALGORITHM = DQN(4, 2, 4, num_envs=ENVS, buffer_size=4096, learning_starts=8, hidden_sizes=(8,))


def quiet(folder: Path) -> dovetail.Settings:
    return replace(QUIET, folder=str(folder))


LOCAL = Local()


def train(folder: Path, replay: Any, steps: int = 160, strategy: Any = LOCAL) -> Any:
    return dovetail.train(
        ALGORITHM, CHAIN, strategy, total_steps=steps, replay=replay, settings=quiet(folder)
    )


@pytest.fixture
def shared() -> Generator[tuple[ReplayServer, str]]:
    """A server for two trainings, over TCP."""
    server, address = serve_replay(ALGORITHM, CHAIN, 3 * ENVS, listen="127.0.0.1:0")
    with server:
        yield server, address


def counts(server: ReplayServer) -> dict[str, int]:
    with server.client() as client:
        return client.counts()


@survives(
    "the run ends with a durable replay", "any", "replay servers", RESUMES + ", with its replay"
)
def test_a_durable_replay_is_found_by_the_resumed_run(tmp_path: Path) -> None:
    kept = ServedReplay(shards=2, durable=True)
    run = train(tmp_path / "run", kept)
    form = served_form(ALGORITHM, dovetail.envs.resolve(CHAIN).spec, ENVS, 2)
    form_of_two = form.table, form.example, 2
    sizes: list[int] = []
    for _ in range(2):
        for shard in range(2):
            folder = tmp_path / "run" / "replay" / f"shard-{shard}-of-2"
            with ReplayServer(*form_of_two, limiter_of(None), durable=folder) as server:
                sizes.append(counts(server)["inserted"])
        if len(sizes) == 2:
            dovetail.resume(run, total_steps=320)
    assert sum(sizes[:2]) > 100
    assert sum(sizes[2:]) - sum(sizes[:2]) > 100
    assert run.summary["env_steps"] == 320
    assert "key" not in json.dumps(run.config["replay"])


@survives(
    "the run ends without --durable",
    "any",
    "replay servers",
    LOST + ": the replay; the rest resumes",
)
def test_a_resumed_run_says_that_its_replay_is_lost(tmp_path: Path, capsys: Any) -> None:
    run = train(tmp_path / "run", "servers")
    config = json.loads((run.path / "config.json").read_text())
    config["settings"]["display"] = "plain"
    (run.path / "config.json").write_text(json.dumps(config))
    dovetail.resume(run, total_steps=200)
    assert "The replay begins empty" in capsys.readouterr().err


def test_two_trainings_and_an_outside_writer_share_a_replay(
    tmp_path: Path, shared: tuple[ReplayServer, str]
) -> None:
    server, address = shared
    with ReplayClient(Address.from_text(address), _example()) as writer:
        first = writer.claim(2, wanted=10)
        rows = {name: np.zeros((5, 2, *x.shape), x.dtype) for name, x in _row().items()}
        writer.insert(type(_example())(**rows), envs=(first, first + 2))
        threads = [
            threading.Thread(target=_train_apart, args=(tmp_path / name, address))
            for name in ("one", "two")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        writer.flush()
    steps = [dovetail.Run.open(tmp_path / name).summary["env_steps"] for name in ("one", "two")]
    assert steps == [160, 160]
    assert counts(server)["inserted"] > 2 * 140 + 8
    assert server.runs  # it is nobody's but ours


def _train_apart(folder: Path, address: str) -> None:
    """In a process of its own, as two trainings are."""
    words = [*("train", "dqn", "--env", CHAIN, "--strategy", "local", "--num-envs", str(ENVS))]
    words += ["--unroll-length", "4", "--gradient-steps", "2", "--batch-size", "4"]
    words += [
        "--buffer-size",
        "4096",
        "--learning-starts",
        "8",
        "--hidden-sizes",
        "8",
        "--total-steps",
        "160",
    ]
    words += ["--replay", address, "--run", str(folder), "--no-video", "--evaluate-every", "0"]
    subprocess.run([sys.executable, "-m", "dovetail", *words, "--quiet"], check=True, timeout=100)


def _example() -> Any:
    return served_form(ALGORITHM, dovetail.envs.resolve(CHAIN).spec, ENVS).example


def _row() -> dict[str, Any]:
    return _example()._asdict()


@survives("a replay server dies", "any", "replay servers", RESUMES)
def test_a_server_that_dies_ends_the_run_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    start = Servers.__init__

    def started(self: Servers, *args: Any) -> None:
        start(self, *args)
        begun.append(Address.from_text(self.addresses[0]).pid)
        threading.Timer(4.0, os.kill, (begun[0], signal.SIGKILL)).start()

    monkeypatch.setattr(Servers, "__init__", started)
    strategy = ActorLearner(actors=2, staleness=0)
    with pytest.raises(UserError, match=r"The replay server \(process \d+\) .*start another"):
        train(tmp_path / "run", "servers", 10_000_000, strategy)
    with pytest.raises(ProcessLookupError):
        os.kill(begun[0], 0)


def bad_addresses(address: str, folder: Path) -> dict[str, tuple[Any, str]]:
    """What is asked for, and the sentence."""
    wrong = folder / "wrong"
    wrong.write_text("aa" * 32)
    plain = address.partition("?")[0]
    return {
        "nobody": (f"tcp://127.0.0.1:1?key={wrong}", "127.0.0.1:1. does not answer"),
        "wrong key": (f"{plain}?key={wrong}", "does not know the client's key"),
        "no key": (plain, "names no key: write"),
        "no file": (f"{plain}?key={folder}/none", "cannot be read from"),
        "no address": ("somewhere", "'somewhere' is no address of a replay"),
        "no server": (f"unix:{folder}", "cannot be read from"),
    }


@pytest.mark.parametrize(
    "case", ["nobody", "wrong key", "no key", "no file", "no address", "no server"]
)
def test_a_bad_address_is_refused_before_there_is_a_run(
    case: str, tmp_path: Path, shared: tuple[ReplayServer, str]
) -> None:
    replay, sentence = bad_addresses(shared[1], tmp_path)[case]
    with pytest.raises(UserError, match=sentence):
        train(tmp_path / "run", replay)
    assert not (tmp_path / "run").exists()


OTHERS: dict[str, tuple[Any, Any, str]] = {
    "sampler": (
        DQN(4, 2, 4, prioritized=True),
        CHAIN,
        "another table than this",
    ),
    "rows": (ALGORITHM, "CartPole-v1", "but those of the replay server"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_table_is_refused(case: str, shared: tuple[ReplayServer, str]) -> None:
    algorithm, env, sentence = OTHERS[case]
    with pytest.raises(UserError, match=sentence):
        dovetail.train(algorithm, env, Local(), replay=shared[1], settings=QUIET)


def test_too_many_environments_are_refused(shared: tuple[ReplayServer, str]) -> None:
    with pytest.raises(UserError, match="has room for 12 environments, but this training has 16"):
        dovetail.train(
            replace(ALGORITHM, num_envs=16), CHAIN, Local(), replay=shared[1], settings=QUIET
        )


def test_an_algorithm_without_a_replay_is_refused() -> None:
    with pytest.raises(UserError, match="but PPO has none: leave it out"):
        dovetail.train(PPO(), CHAIN, replay="servers", settings=QUIET)


WORDS = {
    "shards alone": (["--replay-shards", "2"], "add --replay servers"),
    "durable address": (["--replay", "unix:/nowhere", "--durable"], "cannot be read"),
    "no shards": (["--replay", "servers", "--replay-shards", "0"], "give 1 or more"),
    "no rate": (["--replay", "servers", "--samples-per-insert", "-1"], "give more than 0"),
    "too many shards": (["--replay", "servers", "--replay-shards", "3"], "among 3 shards"),
}


@pytest.mark.parametrize("case", WORDS)
def test_bad_words_are_one_sentence(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, sentence = WORDS[case]
    code = main(["train", "dqn", "--env", CHAIN, "--strategy", "local", "--quiet", *words])
    told = capsys.readouterr().err
    assert code == 2
    assert sentence in told
    assert len(told.strip().splitlines()) == 1


def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    words = ["replay", "dqn", "--env", CHAIN, "--num-envs", "4", "--json"]
    words += ["--durable", str(tmp_path / "kept"), "--listen", "127.0.0.1:0"]
    addresses: list[str] = []
    for _ in range(2):
        command = [sys.executable, "-m", "dovetail", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            addresses.append(Address.from_text(said["address"]).key)
            process.terminate()
            assert process.wait(30) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(said["pid"], 0)
    assert addresses[0] == addresses[1]
    assert (tmp_path / "kept" / "key").stat().st_mode & 0o777 == 0o600
