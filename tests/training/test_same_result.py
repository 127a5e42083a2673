"""Changing only the strategy changes nothing in the result, on the command line too."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from dovetail.cli.main import main
from dovetail.run.folder import Run
from dovetail.strategies import STRATEGIES

SHORT = (
    "--env dovetail:CartPole-v1 --unroll-length 8 --hidden-sizes 8 --total-steps 256 --episodes 2 "
    "--evaluate-every 0 --no-video --quiet"
)
ADVICE = "--num-envs 64 would take more steps per second, and changes the result."


def exported(name: str, words: str) -> np.ndarray:
    """The exported weights of a training by command, as one vector."""
    assert main([*f"train {name} {SHORT} {words}".split(), "--run", "run"]) == 0
    (file,) = Path("run/policy/last").glob("*.safetensors")
    weights = load_file(file)
    Path("run").rename(f"run {words}")
    return np.concatenate([np.ravel(weights[key]) for key in sorted(weights)])


@pytest.mark.slow
def test_every_synchronous_strategy_exports_the_same_weights() -> None:
    """A2C tolerates no staleness, so every strategy that can run it is synchronous."""
    expected = exported("a2c", "")
    for strategy in STRATEGIES:
        if strategy != "parameter-server":
            found = exported("a2c", f"--strategy {strategy}")
            np.testing.assert_allclose(found, expected, atol=3e-6, err_msg=strategy)
    assert Run.open("run ").summary["updates"] == 256 / (8 * 8)


@pytest.mark.slow
def test_the_parameter_server_exports_them_too() -> None:
    expected = exported("a3c", "--strategy local")
    found = exported("a3c", "--strategy parameter-server --synchronous")
    np.testing.assert_allclose(found, expected, atol=3e-6)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--strategy fused", True),
        ("--strategy fused --num-envs 4", False),
        ("--strategy local", False),
    ],
)
def test_more_environments_are_advised_where_they_are_faster(
    words: str, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"train a2c --env dovetail:Chain-v0 {words} --unroll-length 4 --hidden-sizes 4"
    line += " --total-steps 32 --episodes 1 --evaluate-every 0 --no-video --run run"
    assert main(line.split()) == 0
    assert capsys.readouterr().err.count(ADVICE) == told
