"""One row makes a back end: its ids, its line in lists, its sentences, and training in it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from small import QUIET, ppo

import dovetail
from dovetail.envs import backends, check_jax_env, names, resolve
from dovetail.envs.interface import Discrete
from dovetail.envs.registry import BACK_ENDS, BackEnd, load, looked_up
from dovetail.strategies.fused import Fused

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
TOYS = BackEnd(
    make="toy_backend:make",
    names="toy_backend:names",
    about="toys, compiled with the algorithm",
    package="jax",
    title="Toys",
    traced=True,
    bare=True,
)


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setitem(BACK_ENDS, "toys", TOYS)


def test_a_row_is_all_that_a_back_end_needs(toys: None, tmp_path: Path) -> None:
    assert ("toys", TOYS.about, True) in backends()
    assert names("toys") == ["Coin-v0", "Die-v0"]
    assert resolve("toys:Die-v0").spec.action == Discrete(6)
    assert resolve("Coin-v0").spec.id == "toys:Coin-v0"  # a bare name finds it
    check_jax_env(resolve("toys:Coin-v0").jax, steps=20)  # type: ignore[arg-type]
    settings = replace(QUIET, folder=str(tmp_path))
    run = dovetail.train(
        ppo(num_envs=4), "toys:Coin-v0", Fused(), total_steps=64, settings=settings
    )
    assert run.summary["env_steps"] == 64 and run.config["env"] == "toys:Coin-v0"


def test_a_row_has_its_sentences(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for env, said in (
        ("toys:Coyn-v0", "no environment 'Coyn-v0' in the toys: did you mean 'Coin-v0'"),
        ("Coyn-v0", "no environment 'Coyn-v0': did you mean 'Coin-v0'"),
        ("toyz:Coin-v0", "no back end or module 'toyz' .* did you mean 'toys'"),
    ):
        with pytest.raises(dovetail.UserError, match=said):
            resolve(env)
    absent = replace(TOYS, package="toys_that_are_not_there", extra="toys")
    monkeypatch.setitem(BACK_ENDS, "toys", absent)
    assert names("toys") == [] and ("toys", TOYS.about, False) in backends()
    with pytest.raises(dovetail.UserError, match=r"needs Toys, which .* 'dovetail\[toys\]'"):
        resolve("toys:Coin-v0")
    with pytest.raises(dovetail.UserError, match="no environment 'Coin-v0'"):
        resolve("Coin-v0")


def test_bare_names_are_looked_up_in_the_order_of_the_table() -> None:
    assert looked_up(traced=False) == ["gymnasium", "dovetail", "gymnax"]
    assert looked_up(traced=True) == ["dovetail", "gymnax", "gymnasium"]


@pytest.mark.parametrize("name", BACK_ENDS)
def test_every_function_of_a_row_is_there(name: str) -> None:
    row = BACK_ENDS[name]
    for reference in filter(None, (row.make, row.names, row.has, row.single)):
        assert callable(load(reference))


def test_the_page_has_every_row() -> None:
    table = PAGE.read_text().partition("## Back ends")[2].partition("A name without")[0]
    listed = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", table, re.MULTILINE)
    assert [name for name, _ in listed] == list(BACK_ENDS)
    for name, install in listed:
        extra = BACK_ENDS[name].extra
        assert f"'dovetail[{extra}]'" in install if extra else install.startswith("included")
