"""The learning curves in docs/algorithms.md: `python benchmarks/curves.py [picture …]`.

Trains every algorithm of a picture, each for a minute or two at most on two cores, into
runs/curves/, and lets `dovetail plot` draw them side by side into docs/images/curves/. A run that
is there already is drawn again, not trained again. The offline ones learn from data of mixed
quality that is recorded first, as in tests/algorithms/test_offline_learning.py.
"""

import argparse
import re
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import dovetail as dt  # noqa: E402
from dovetail import algorithms as a  # noqa: E402
from dovetail.strategies import Fused  # noqa: E402

RUNS, PICTURES = ROOT / "runs" / "curves", ROOT / "docs" / "images" / "curves"
CARTPOLE, PENDULUM = "dovetail:CartPole-v1", "gymnax:Pendulum-v1"
SMALL: dict[str, Any] = {"hidden_sizes": (64, 64), "batch_size": 128, "learning_rate": 1e-3}
OFFLINE: dict[str, Any] = SMALL | {"gradient_steps": 100}


@dataclass(frozen=True)
class Picture:
    env: str
    steps: int
    algorithms: dict[str, Any]
    """By their names on the command line."""
    envs: int = 16
    data: dict[str, int] = field(default_factory=dict[str, int])
    """How many good and bad episodes are recorded; nothing is, unless given."""

    @property
    def column(self) -> str:
        """What is drawn: where nobody acts, only evaluations have returns."""
        return "eval_return" if self.data else "episode_return"


PICTURES_OF = {
    "on-policy": Picture(
        CARTPOLE, 150_000, {"ppo": a.PPO(), "a2c": a.A2C(), "reinforce": a.REINFORCE()}
    ),
    "actors-ahead": Picture(
        CARTPOLE, 150_000, {"impala": a.IMPALA(), "appo": a.APPO(), "a3c": a.A3C()}
    ),
    "values": Picture(
        CARTPOLE,
        40_000,
        {
            "dqn": a.DQN(),
            "qr-dqn": a.QRDQN(),
            "apex": a.ApeX(),
            "sac-discrete": a.SACDiscrete(gradient_steps=8, hidden_sizes=(64, 64)),
        },
    ),
    "memory": Picture("dovetail:MemoryCue-v0", 40_000, {"r2d2": a.R2D2()}),
    "control": Picture(
        PENDULUM,
        12_000,
        {"ddpg": a.DDPG(), "d4pg": a.D4PG(), "td3": a.TD3(), "sac": a.SAC()},
        envs=4,
    ),
    "offline-continuous": Picture(
        PENDULUM,
        20_000,
        {
            "bc": a.BC(**OFFLINE),
            "td3-bc": a.TD3BC(**OFFLINE, gamma=0.97, tau=0.02, alpha=40.0),
            "cql": a.CQL(**OFFLINE, samples=3),
            "iql": a.IQL(**OFFLINE, normalize_observations=True),
            "awac": a.AWAC(**OFFLINE),
        },
        data={"good": 100, "bad": 100},
    ),
    "offline-discrete": Picture(
        CARTPOLE,
        20_000,
        {
            "bc": a.BC(**OFFLINE),
            "discrete-cql": a.DiscreteCQL(**OFFLINE),
            "iql": a.IQL(**OFFLINE),
            "awac": a.AWAC(**OFFLINE),
        },
        data={"good": 12, "bad": 800},
    ),
}


def trained(name: str, picture: Picture) -> list[Path]:
    """The folders of a picture's runs."""
    more: dict[str, Any] = {"total_steps": picture.steps}
    if picture.data:
        more["data"] = recorded(RUNS / name / "data", picture)
    folders = {algorithm: RUNS / name / algorithm for algorithm in picture.algorithms}
    for algorithm, folder in folders.items():
        if (folder / "summary.json").exists():
            continue
        shutil.rmtree(folder, ignore_errors=True)  # half a run
        evaluate_every = 0.1 if picture.data else 0.0
        settings = dt.Settings(
            folder=str(folder), evaluate_every=evaluate_every, episodes=20, video=False
        )
        chosen = replace(picture.algorithms[algorithm], num_envs=picture.envs)
        dt.train(chosen, picture.env, Fused(), **more, settings=settings)
    return list(folders.values())


def recorded(folder: Path, picture: Picture) -> Path:
    from behavior import mixed

    if not (folder / "both" / "data" / "metadata.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        mixed(folder, picture.env, **picture.data)
    return folder / "both"


def lighten(drawn: Path) -> None:
    """Rounds the points of a picture's lines to a hundredth of a point: half as many bytes."""
    point = re.compile(r"(\d+\.\d\d)\d+")
    lines = drawn.read_text(encoding="utf-8").splitlines()
    rounded = [point.sub(r"\1", x) if x.startswith(("L ", "M ")) else x for x in lines]
    drawn.write_text("\n".join(x.rstrip() for x in rounded) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pictures", nargs="*", metavar="picture", help=", ".join(PICTURES_OF))
    names = parser.parse_args().pictures or list(PICTURES_OF)
    for name in names:
        if name not in PICTURES_OF:
            parser.error(f"there is no {name!r}: choose from {', '.join(PICTURES_OF)}")
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in names:
        picture = PICTURES_OF[name]
        runs = [str(folder) for folder in trained(name, picture)]
        drawn = dt.plot(runs, PICTURES / f"{name}.svg", y=picture.column)
        lighten(drawn)
        print(drawn)


if __name__ == "__main__":
    main()
