"""The example learns under both strategies, and the pages show what is true of it."""

import importlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import DOCS, ROOT, blocks, lines

import dovetail as dt
from dovetail.algorithms import ALGORITHMS
from dovetail.loading import load_object

FILE = ROOT / "examples" / "actor_critic.py"
EXAMPLE = FILE.read_text(encoding="utf-8")
APEX = (ROOT / "dovetail" / "algorithms" / "apex.py").read_text(encoding="utf-8")
PAGE = DOCS["write-your-own-algorithm.md"]
ActorCritic: Any = load_object(f"{FILE}:ActorCritic", "algorithm")


def trajectory(**fields: Any) -> dt.Trajectory:
    empty: dict[str, Any] = dict.fromkeys(dt.Trajectory._fields, ())
    return dt.Trajectory(**{**empty, **fields})


# The page.


def test_the_page_shows_the_whole_file() -> None:
    shown = [block for block in blocks(PAGE, "python") if block.strip("\n") in EXAMPLE]
    assert lines("".join(shown)) == lines(EXAMPLE)


def test_the_page_shows_the_loop_of_a_replay() -> None:
    (loop,) = [block for block in blocks(PAGE, "python") if block.strip("\n") in APEX]
    assert "rl.insert(" in loop and loop.strip("\n") in APEX.partition("def iteration(")[2]


@pytest.mark.slow
def test_the_page_runs_and_the_example_learns_under_both_strategies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = EXAMPLE, APEX
    programs = [b for b in blocks(PAGE, "python") if not any(b.strip("\n") in s for s in shown)]
    assert len(programs) == 4
    monkeypatch.syspath_prepend(FILE.parent)
    names: dict[str, Any] = {"__name__": importlib.import_module("actor_critic").__name__}
    for program in programs:
        exec(program, names)  # the later ones go on with the names of the earlier
    returns = {
        summary["strategy"]: summary["final_return"]
        for summary in map(
            json.loads, (p.read_text() for p in tmp_path.glob("runs/*/summary.json"))
        )
    }
    assert set(returns) == {"local", "fused"}
    assert min(returns.values()) > 150, returns
    assert np.isfinite(names["found"].metrics["loss"])


def test_the_defaults_in_the_table() -> None:
    table = DOCS["algorithms.md"].partition("| option |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", table, flags=re.MULTILINE)
    assert [row[0] for row in rows] == ["unroll_length", "learning_rate", "normalize_advantages"]
    for option, *written in rows:
        for name, text in zip(("ppo", "a2c", "reinforce"), written, strict=True):
            default = getattr(load_object(ALGORITHMS[name], "algorithm")(), option)
            assert text == str(default) or float(text) == default, (name, option)


# The example's equations.


def test_returns_go_on_beyond_a_cut_and_end_where_the_episode_does() -> None:
    column = lambda *x: jnp.array(x, jnp.float32)[:, None]  # noqa: E731
    flags = lambda *x: jnp.array(x, bool)[:, None]  # noqa: E731
    batch = trajectory(
        reward=column(1, 2, 4, 8, 16),
        terminated=flags(0, 1, 0, 0, 0),
        truncated=flags(0, 0, 0, 1, 0),
        bootstrap=column(0, 0, 0, 10, 6),
    )
    returns = replace(ActorCritic(), gamma=0.5).returns(batch)
    # 16 + 3; 8 + 5, cut; 4 + 13 / 2; 2, the end; 1 + 2 / 2.
    assert returns[:, 0].tolist() == [2.0, 2.0, 10.5, 13.0, 19.0]


def test_a_last_row_that_terminated_has_nothing_beyond() -> None:
    one = jnp.ones((1, 1))
    batch = trajectory(reward=one, terminated=one > 0, truncated=one < 0, bootstrap=7.0 * one)
    assert ActorCritic().returns(batch).tolist() == [[1.0]]


def test_invalid_steps_do_not_count_in_the_loss() -> None:
    task = dt.Task(dt.envs.resolve("dovetail:CartPole-v1").spec, num_envs=2, steps=8)
    algorithm = ActorCritic(hidden=4).bind(task)
    params = algorithm.init(jax.random.key(0)).params
    batch = trajectory(
        observation=jnp.ones((2, 2, 4)),
        action=jnp.zeros((2, 2), jnp.int32),
        reward=jnp.ones((2, 2)),
        terminated=jnp.ones((2, 2), bool),
        truncated=jnp.zeros((2, 2), bool),
        bootstrap=jnp.zeros((2, 2)),
        valid=jnp.ones((2, 2), bool),
    )
    halved = batch._replace(valid=batch.valid.at[:, 1].set(False))
    whole, half = algorithm.loss(params, batch), algorithm.loss(params, halved)
    np.testing.assert_allclose(half, whole / 2, rtol=1e-6)


# The mistakes that the page shows, made for real.


@dataclass(frozen=True)
class Mistaken(ActorCritic):
    """The example, with one of the page's mistakes in its loop."""

    mistake: str = ""

    def iteration(self, rl: dt.RL, state: Any) -> Any:
        if self.mistake == "scan":
            return jax.lax.scan(lambda state, _: self.once(rl, state), state, length=2)
        new, metrics = self.once(rl, state)
        if self.mistake == "dtype":
            new = new._replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), new.params))
        return new, metrics

    def once(self, rl: dt.RL, state: Any) -> Any:
        params = state.params if self.mistake == "no broadcast" else rl.broadcast(state.params)
        made = rl.unroll(self.act, params, self.unroll_length, bootstrap=self.value)
        batch = made if self.mistake == "no gather" else rl.gather(made)
        state, metrics = self.learn(rl, state, batch)
        if self.mistake == "actor's metric":
            metrics["reward"] = made.reward.mean()
        if self.mistake == "shape":
            metrics["reward"] = batch.reward
        return state, metrics


@pytest.mark.parametrize(
    "mistake", ["no gather", "no broadcast", "scan", "actor's metric", "shape", "dtype"]
)
def test_the_page_has_the_sentence_for(mistake: str) -> None:
    with pytest.raises(dt.UserError) as raised:
        dt.trace(Mistaken(mistake=mistake), "CartPole-v1")
    position, sentence = re.fullmatch(r"(.*\.py:\d+(?::\d+)?: )?(.*)", str(raised.value)).groups()
    assert sentence.replace("Mistaken", "ActorCritic") in PAGE
    if mistake in ("no gather", "no broadcast", "scan"):
        file = "actor_critic.py" if mistake == "no gather" else Path(__file__).name
        assert file in position


def test_the_page_has_the_sentence_for_another_action_space() -> None:
    with pytest.raises(dt.UserError) as raised:
        dt.trace(ActorCritic(), "Pendulum-v1")
    assert str(raised.value) in PAGE
