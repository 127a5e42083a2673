"""Files that come from elsewhere are data: what they name runs only if the user says so."""

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from small import QUIET, a2c

import dovetail
from dovetail.cli.main import main
from dovetail.errors import UserError
from dovetail.strategies.fused import Fused
from dovetail.training import trust
from dovetail.training.dataset import RecordedData

CODE = """
from pathlib import Path
Path({marker!r}).touch()
from dovetail.algorithms import A2C

class Mine(A2C):
    pass
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, not to be changed."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    settings = dataclasses.replace(QUIET, folder=str(folder))
    dovetail.train(a2c(num_envs=4), "dovetail:Chain-v0", Fused(), total_steps=64, settings=settings)
    return folder


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """It exists once foreign.py has run; nobody has named that file before."""
    (tmp_path / "foreign.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    return tmp_path / "ran"


@pytest.fixture(params=["algorithm", "strategy", "env", "options", "module"])
def foreign(request: pytest.FixtureRequest, trained: Path, tmp_path: Path, marker: Path) -> Path:
    """A run whose config names the foreign file."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    config = json.loads((run / "config.json").read_text())
    code = f"{tmp_path / 'foreign.py'}:Mine"
    if request.param == "options":
        config["options"]["activation"] = code
    elif request.param == "module":
        config["env"] = "antigravity:Mine-v0"
    else:
        config[request.param] = code
    (run / "config.json").write_text(json.dumps(config))
    return run


def test_a_run_from_elsewhere_runs_no_code(
    foreign: Path, marker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["eval"], ["watch"], ["train", "--resume"]):
        assert main([*words, str(foreign)]) == 2
        told = capsys.readouterr().err.splitlines()[-1]
        assert "names code of its own" in told and told.endswith("trust=True) if it may run.")
    assert not marker.exists()


def test_trusted_code_is_remembered_until_it_changes(trained: Path, tmp_path: Path) -> None:
    marker, code = tmp_path / "ran", tmp_path / "theirs.py"
    code.write_text(CODE.format(marker=str(marker)))
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    for name in ("config.json", "checkpoints"):
        for file in [run / name] if name.endswith("json") else run.rglob("meta.json"):
            record = json.loads(file.read_text())
            record.get("meta", record)["algorithm"] = f"{code}:Mine"
            if "digest" in record:
                from dovetail.run.checkpoint import digest_of

                record.pop("digest")
                record["digest"] = digest_of(record)
            file.write_text(json.dumps(record))
    assert dovetail.evaluate_run(run, episodes=2, trust=True).returns.shape == (2,)
    assert marker.exists()
    dovetail.evaluate_run(run, episodes=2)
    code.write_text(code.read_text() + "\n# more\n")
    with pytest.raises(UserError, match="which has changed since you trusted it"):
        dovetail.evaluate_run(run, episodes=2)
    dovetail.evaluate_run(run, episodes=2, trust=True)


def test_what_the_user_named_may_change(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text("x = 1")
    assert trust.untrusted([f"{code}:x"]) is not None
    trust.remember([f"{code}:x"])
    code.write_text("x = 2")
    assert trust.untrusted([f"{code}:x"]) is None
    assert trust.untrusted([f"{tmp_path / 'other.py'}:x"]) is not None
    folder = Path(os.environ["XDG_STATE_HOME"]) / "dovetail" / "trusted"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_relative_name_means_the_file_it_would_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust.remember(["mine.py:x"])
    assert trust.untrusted(["mine.py:x"]) is None
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert trust.untrusted(["mine.py:x"]) is not None


def test_wrappers_may_be_code() -> None:
    env = "CartPole-v1?wrap=time-limit:200,mine.py:Mine:3,frame-stack:4,their.module:Theirs"
    assert trust.code_of_env(env) == ["mine.py:Mine", "their.module:Theirs"]


@pytest.mark.parametrize(
    "env", ["CartPole-v1", "dovetail:Chain-v0", "ALE/Pong-v5", "CartPole-v1?sutton_barto_reward=1"]
)
def test_environments_of_installed_packages_are_no_code(env: str) -> None:
    assert trust.code_of_env(env) == []


def test_a_dataset_runs_no_code(trained: Path, tmp_path: Path, marker: Path) -> None:
    dovetail.evaluate_run(trained, episodes=2, record=tmp_path / "data")
    file = tmp_path / "data" / "data" / "metadata.json"
    code = f"{tmp_path / 'foreign.py'}:Mine"
    file.write_text(file.read_text().replace("dovetail:Chain-v0", code))
    data = RecordedData(tmp_path / "data", 10)
    _, why = data.environment()
    data.close()
    assert why is not None and "names code of its own" in why and not marker.exists()


def test_a_dataset_without_spaces_makes_no_environment_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "data" / "data").mkdir(parents=True)
    spec = {"id": "Evil-v0", "entry_point": "antigravity:fly", "kwargs": {}}
    record = {"data_format": "hdf5", "env_spec": json.dumps(spec)}
    record |= {"total_episodes": 1, "total_steps": 1}
    (tmp_path / "data" / "data" / "metadata.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="Evil-v0 is not registered"):
        RecordedData(tmp_path / "data", 10)
    assert "antigravity" not in sys.modules
