"""A user's own files on a cluster; and what is refused, with one sentence."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from nodes import Nodes, OnCluster, processes_of
from small import LENGTH, ppo
from waiting import eventually

import dovetail
from dovetail.algorithms import IMPALA
from dovetail.cli.main import main
from dovetail.errors import UserError
from dovetail.hosts.deployment import Deployment, ProcessShare
from dovetail.loading import load_object
from dovetail.strategies import ActorLearner, Local

COMMAND = [sys.executable, "-c", "from dovetail.cli.main import main; raise SystemExit(main())"]
MINE = """
from dataclasses import dataclass

from beside import SPEED
from dovetail.algorithms import A2C


@dataclass(frozen=True)
class Mine(A2C):
    '''A2C with a speed from a file beside it.'''

    learning_rate: float = SPEED
"""
WORLD = """
import gymnasium


def corridor():
    from beside import SPEED

    assert SPEED
    return gymnasium.make("CartPole-v1")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's folder: an algorithm, an environment, and what both import."""
    (tmp_path / "beside.py").write_text("SPEED = 3e-3\n")
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "world.py").write_text(WORLD)
    return tmp_path


def test_a_users_own_files_reach_the_workers(nodes: Nodes, project: Path) -> None:
    algorithm = load_object(f"{project / 'mine.py'}:Mine", "algorithm")(LENGTH, hidden_sizes=(8,))
    strategy = ActorLearner(actors=2, staleness=0)
    env = f"{project / 'world.py'}:corridor"
    with OnCluster(algorithm, env, strategy, Deployment(nodes.address)) as running:
        assert running.advance(2).finite


def test_a_module_that_workers_cannot_import_is_named(nodes: Nodes, project: Path) -> None:
    (project / "mine.py").write_text(MINE.replace("from beside", "from only_the_driver_has"))
    (project / "elsewhere").mkdir()
    (project / "elsewhere" / "only_the_driver_has.py").write_text("SPEED = 1e-3\n")
    sys.path.insert(0, str(project / "elsewhere"))
    try:
        algorithm = load_object(f"{project / 'mine.py'}:Mine", "algorithm")()
    finally:
        sys.path.remove(str(project / "elsewhere"))
    with pytest.raises(UserError, match="No module named 'only_the_driver_has'"):
        OnCluster(algorithm, "CartPole-v1", Local(), Deployment(nodes.address))


def test_other_versions_on_a_node_are_refused(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "optax-99.0.dist-info").mkdir()
    (tmp_path / "optax-99.0.dist-info" / "METADATA").write_text("Name: optax\nVersion: 99.0\n")
    other = nodes.add(resources={"other": 1}, env_vars={"PYTHONPATH": str(tmp_path)})
    try:
        where = Deployment(nodes.address, learner=ProcessShare(resources={"other": 1}))
        with pytest.raises(UserError, match=r"Node .* has optax 99.0, but the driver has \d"):
            OnCluster(ppo(), "CartPole-v1", Local(), where)
    finally:
        nodes.remove(other)


def test_more_than_the_cluster_has_is_refused_at_once(nodes: Nodes) -> None:
    began = time.monotonic()
    with pytest.raises(UserError, match=r"no room for actor-\d.*need 65 CPUs.*2 CPUs on"):
        dovetail.train(
            IMPALA(num_envs=64), "CartPole-v1", ActorLearner(actors=64), cluster=nodes.address
        )
    assert time.monotonic() - began < 20


def test_a_node_that_is_not_there_is_refused(nodes: Nodes, tmp_path: Path) -> None:
    file = tmp_path / "deploy.toml"
    file.write_text(f'cluster = "{nodes.address}"\n[actor]\nnodes = ["mars"]\n')
    with pytest.raises(UserError, match="The cluster has no node 'mars'"):
        dovetail.train(IMPALA(), "CartPole-v1", ActorLearner(), cluster=Deployment.load(file))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[actor]\ncpu = 1", r"\[actor\] has no key 'cpu': did you mean 'cpus'"),
        ("clutser = 'auto'", "has no key 'clutser': did you mean 'cluster'"),
        ("[actor]\ndevices = 2", r"\[actor\] has no key 'devices'"),
        ("[learner]\ndevices = 0", r"\[learner\] devices is 0"),
        ("[learner]\ncpus = 'two'", r"\[learner\] cpus is 'two'"),
        ("[actor]\nper_node = 0", r"\[actor\] per_node is 0"),
        ("[actor]\nnodes = 'a'", r"\[actor\] nodes is 'a'"),
        ("[actor]\nresources = {a = 0}", r"\[actor\] resources is"),
        ("actor = 3", "actor is 3; write it as a table"),
        ("cluster = 3", "cluster is 3"),
        ("cluster =", "cannot be read"),
    ],
)
def test_a_deployment_file_with_a_mistake_is_refused(
    tmp_path: Path, text: str, sentence: str
) -> None:
    file = tmp_path / "deploy.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=sentence):
        Deployment.load(file)


@pytest.mark.parametrize(
    ("cluster", "sentence"),
    [
        ("127.0.0.1:1", "Nobody answers at 127.0.0.1:1"),
        ("192.0.2.77:6379", "Nobody answers at 192.0.2.77:6379"),
        ("mars", "'mars' is no address of a cluster"),
    ],
)
def test_an_address_where_nobody_is_is_refused(
    cluster: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    words = ["train", "ppo", "--env", "CartPole-v1", "--cluster", cluster]
    assert main(words) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert sentence in told
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("token", ["wrong" * 8, None])
def test_a_wrong_or_missing_token_is_refused(
    nodes: Nodes, token: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if token is None:
        monkeypatch.delenv("RAY_AUTH_TOKEN")
    else:
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    words = ["train", "ppo", "--env", "CartPole-v1", "--cluster", nodes.address]
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "token" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_cluster_without_authentication_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(UserError, match="RAY_AUTH_MODE is 'disabled'"):
        dovetail.train(ppo(), "CartPole-v1", Local(), cluster="auto")


def test_what_cannot_be_sent_is_refused(nodes: Nodes) -> None:
    lock = __import__("threading").Lock()

    def make() -> object:
        import gymnasium

        with lock:
            return gymnasium.make("CartPole-v1")

    with pytest.raises(UserError, match="cannot be sent to other processes"):
        OnCluster(ppo(), make, Local(), Deployment(nodes.address))


def test_a_local_cluster_needs_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    words = [
        "train",
        "ppo",
        "--env",
        "CartPole-v1",
        "--strategy",
        "actor-learner",
        "--total-steps",
        "500",
    ]
    words += ["--unroll-length", "8", "--hidden-sizes", "8", "--cluster", "local", "--no-video"]
    words += ["--episodes", "2", "--json", "--run", str(tmp_path / "run")]
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert '"strategy": "actor-learner"' in done.stdout.splitlines()[-1]
    assert "object store" in (tmp_path / "run" / "plan.txt").read_text()
    assert eventually(lambda: not processes_of("ray::LearnerProcess"))
