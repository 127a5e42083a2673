"""The pages that `make docs` builds: each is in the navigation, and the reference is complete."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from page_links import broken
from pages import ROOT

import dovetail
from dovetail.loading import load_object


class Loader(yaml.SafeLoader):
    """Reads a configuration whose values may name Python objects, without making them."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, name, node: name)
CONFIG: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "pages"
    command = [sys.executable, str(ROOT / "tools" / "site.py"), str(folder)]
    subprocess.run(command, check=True, timeout=60)
    return folder


def leaves(nav: Any) -> list[str]:
    """The pages of a navigation, in its order."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in leaves(part)]


def test_every_page_is_in_the_navigation_once(site: Path) -> None:
    pages = sorted(page.relative_to(site).as_posix() for page in site.rglob("*.md"))
    assert sorted(leaves(CONFIG["nav"])) == pages


def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    assert [line for page in site.rglob("*.md") for line in broken(page, site)] == []


def entries(site: Path, page: str) -> dict[str, str]:
    """What a page of the reference shows: the name for users → the path of its definition."""
    text = (site / "api" / page).read_text(encoding="utf-8")
    found = re.findall(r"^::: (\S+)\n    options:\n      heading: (\S+)$", text, re.MULTILINE)
    return {name: path for path, name in found}


def test_the_reference_has_everything_public(site: Path) -> None:
    modules = {page.stem for page in (site / "api").glob("*.md")} - {"index"}
    names = {name.removeprefix("dovetail.") for name in entries(site, "index.md")}
    assert names | modules == set(dovetail.__all__)
    assert names & modules == set()


@pytest.mark.parametrize("page", ["index", "algorithms", "data", "envs", "strategies"])
def test_an_entry_shows_what_its_name_means(site: Path, page: str) -> None:
    public = dovetail if page == "index" else importlib.import_module(f"dovetail.{page}")
    shown = entries(site, f"{page}.md")
    if public is not dovetail:
        assert set(shown) == {f"dovetail.{page}.{name}" for name in public.__all__}
    for name, path in shown.items():
        place, _, attribute = path.rpartition(".")
        meant = getattr(public, name.rpartition(".")[2])
        assert load_object(f"{place}:{attribute}", "object") is meant
        module = ROOT.joinpath(*path.split(".")).with_suffix(".py")
        assert not module.exists(), f"{path} is a module too, and the site would show that"


@pytest.mark.parametrize("module", ["functions", "networks"])
def test_the_reference_has_every_file_of_a_module(site: Path, module: str) -> None:
    files = (ROOT / "dovetail" / module).glob("*.py")
    names = {f"dovetail.{module}.{file.stem}" for file in files if file.stem != "__init__"}
    assert set(entries(site, f"{module}.md")) == names
