"""A real Prometheus, with the files of deploy/prometheus, scrapes a real training.

Prometheus is the program on the PATH, or that of Debian's package, which is unpacked into the
user's cache without being installed.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "deploy" / "prometheus"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dovetail-tests"
TRAIN = (
    "train impala --env CartPole-v1 --strategy actor-learner --num-envs 4 --actors 2 --processes "
    "--unroll-length 5 --hidden-sizes 8 --total-steps 1_000_000_000 --evaluate-every 1 "
    "--episodes 2 "
    "--no-video --display plain --metrics-port 0 --run trained"
)
DASHBOARD = json.loads((FILES / "grafana-dashboard.json").read_text(encoding="utf-8"))
EXPRESSIONS = [
    target["expr"].replace("$instance", ".*")
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]
RULES = yaml.safe_load((FILES / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]


class Programs(NamedTuple):
    prometheus: str
    promtool: str


class Scraped(NamedTuple):
    """A training, and the address of the Prometheus that scrapes it."""

    training: int
    url: str


def programs() -> Programs:
    """Prometheus and its tool; downloaded if need be."""
    path = os.pathsep.join([os.environ.get("PATH", ""), str(CACHE / "prometheus" / "usr" / "bin")])
    found = [shutil.which(name, path=path) for name in Programs._fields]
    if None in found and shutil.which("apt-get"):
        download()
        found = [shutil.which(name, path=path) for name in Programs._fields]
    if None in found:
        pytest.skip("there is no Prometheus on the PATH, and Debian's cannot be downloaded")
    return Programs(*(str(name) for name in found))


def download() -> None:
    """Unpacks Debian's package into the cache, unless another process does so first."""
    folder = CACHE / f"prometheus.{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    command = "apt-get download -qq prometheus && dpkg-deb -x prometheus_*.deb . && rm *.deb"
    done = subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True, timeout=300)
    with contextlib.suppress(OSError):
        if done.returncode == 0:
            folder.rename(CACHE / "prometheus")
    shutil.rmtree(folder, ignore_errors=True)


def eventually(ask: Callable[[], Any], what: str, seconds: float = 120) -> Any:
    """The first answer that is something."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if answer := ask():
            return answer
        time.sleep(0.2)
    raise AssertionError(f"no {what} within {seconds:g} s")


def ask(url: str, **parameters: str) -> Any:
    """The data of Prometheus' answer; None while it does not listen yet, or is not ready."""
    try:
        with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(parameters)}") as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return None
        raise AssertionError(error.read().decode()) from error
    except urllib.error.URLError:
        return None


def query(server: str, expression: str) -> list[Any]:
    return (ask(f"{server}/api/v1/query", query=expression) or {}).get("result", [])


def configured(folder: Path, target: str) -> Path:
    """Copies of our files that scrape `target` every second, and wait for nothing."""
    shutil.copytree(FILES, folder)
    config, alerts = folder / "prometheus.yml", folder / "alerts.yml"
    text = config.read_text(encoding="utf-8").replace("127.0.0.1:9400", target)
    config.write_text(re.sub(r"interval: \d+s", "interval: 1s", text), encoding="utf-8")
    text = alerts.read_text(encoding="utf-8")
    alerts.write_text(re.sub(r"for: \d+s", "for: 0s", text), encoding="utf-8")
    return config


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def end(process: subprocess.Popen[bytes], by: signal.Signals) -> None:
    if process.poll() is None:
        process.send_signal(by)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture
def scraped(tmp_path: Path) -> Generator[Scraped]:
    """A training with environments in processes, scraped every second."""
    found, folder = programs(), tmp_path
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = folder / "told.txt"
    command = [sys.executable, "-m", "dovetail", *TRAIN.split()]
    with told.open("wb") as out:
        training = subprocess.Popen(command, cwd=folder, env=environment, stderr=out)
    try:
        pattern = r"Metrics for Prometheus: http://(\S+)/metrics"
        target = eventually(lambda: re.search(pattern, told.read_text()), "address")[1]
        listen = f"127.0.0.1:{free_port()}"
        command = [
            found.prometheus,
            f"--config.file={configured(folder / 'config', target)}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={listen}",
        ]
        with (folder / "prometheus.txt").open("wb") as out:
            server = subprocess.Popen(command, cwd=folder, stderr=out, stdout=out)
        try:
            yield Scraped(training.pid, f"http://{listen}")
        finally:
            end(server, signal.SIGTERM)
    finally:
        end(training, signal.SIGINT)


def children(pid: int) -> list[int]:
    """The processes of environments that a training started."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return found


def test_the_tool_finds_no_fault() -> None:
    tool = programs().promtool
    for what in (["config", "prometheus.yml"], ["rules", "alerts.yml"]):
        done = subprocess.run([tool, "check", *what], cwd=FILES, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.slow
def test_panels_show_something_and_a_dead_worker_raises_its_alert(scraped: Scraped) -> None:
    for expression in EXPRESSIONS:
        eventually(lambda text=expression: query(scraped.url, text), f"data for {expression}")
    for rule in RULES:
        assert query(scraped.url, rule["expr"]) == []
    groups = eventually(lambda: ask(f"{scraped.url}/api/v1/rules"), "rules")["groups"]
    named = [rule["name"] for group in groups for rule in group["rules"]]
    assert named == [rule["alert"] for rule in RULES]

    os.kill(eventually(lambda: children(scraped.training), "process")[0], signal.SIGKILL)

    def firing() -> list[str]:
        alerts = ask(f"{scraped.url}/api/v1/alerts")["alerts"]
        return [alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"]

    assert eventually(firing, "alert") == ["DovetailWorkerDied"]
    groups = ask(f"{scraped.url}/api/v1/rules")["groups"]
    assert [rule["health"] for group in groups for rule in group["rules"]] == ["ok"] * len(RULES)
