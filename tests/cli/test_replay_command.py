"""`dovetail replay` hands its options to `serve_replay`."""

from typing import Any

import pytest

import dovetail
from dovetail.cli.main import main
from dovetail.errors import UserError


def test_every_option_reaches_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def serve(algorithm: Any, env: str, **options: Any) -> Any:
        given.update(options, algorithm=type(algorithm).__name__, env=env)
        raise UserError("seen")

    monkeypatch.setattr(dovetail, "serve_replay", serve)
    line = "replay dqn --env CartPole-v1 --num-envs 32 --listen 127.0.0.1:7777 --durable kept"
    assert main([*line.split(), "--samples-per-insert", "4"]) == 2
    assert given == {
        "algorithm": "DQN",
        "env": "CartPole-v1",
        "num_envs": 32,
        "listen": "127.0.0.1:7777",
        "durable": "kept",
        "samples_per_insert": 4.0,
    }


@pytest.mark.parametrize("listen", ["127.0.0.1:99999", "127.0.0.1", "127.0.0.1:x", ":7777"])
def test_an_address_that_is_none(listen: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "dqn", "--env", "CartPole-v1", "--listen", listen]) == 2
    sentence = (
        f"--listen is {listen}: give host:port, as in 127.0.0.1:7777, with a port up to 65535."
    )
    assert sentence in capsys.readouterr().err


def test_a_wrong_number_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "dqn", "--env", "CartPole-v1", "--num-envs", "0"]) == 2
    assert "--num-envs is 0: give 1 or more." in capsys.readouterr().err
