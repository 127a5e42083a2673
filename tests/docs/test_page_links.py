"""Every link of the pages leads somewhere: files, images and anchors. And the checker notices."""

from pathlib import Path

import pytest
from page_links import Link, anchors, broken, links, slug
from pages import FILES, ROOT

PAGES = [
    *FILES.values(),
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(broken(page, ROOT)) == []


def test_the_pages_have_links() -> None:
    found = [link for page in PAGES for link in links(page.read_text(encoding="utf-8"))]
    assert len(found) > 150
    assert sum("#" in link.target for link in found) > 30


# The checker.


@pytest.mark.parametrize(
    "written, sentence",
    [
        ("[x](none.md)", "page.md:1: none.md: there is no none.md"),
        ("![x](images/none.svg)", "page.md:1: images/none.svg: there is no images/none.svg"),
        ("\n[x](#none)", "page.md:2: #none: page.md has no heading with this anchor"),
        ("[x](other.md#a)", "page.md:1: other.md#a: other.md has no heading with this anchor"),
        ("[x](../../x.md)", "page.md:1: ../../x.md leads out of the repository"),
        ("[x](/other.md)", "page.md:1: /other.md leads out of the repository"),
        ("[x](code.py#f)", "page.md:1: code.py#f: only pages have anchors"),
        ("[x][y]\n\n[y]: none.md", "page.md:3: none.md: there is no none.md"),
        ('<img src="none.png">', "page.md:1: none.png: there is no none.png"),
        ("[two\nlines](none.md)", "page.md:2: none.md: there is no none.md"),
    ],
)
def test_a_broken_link_is_found(tmp_path: Path, written: str, sentence: str) -> None:
    (tmp_path / "other.md").write_text("# Other\n\n```\n# A\n```\n")
    (tmp_path / "code.py").write_text("")
    page = tmp_path / "page.md"
    page.write_text(written)
    assert list(broken(page, tmp_path)) == [sentence]


@pytest.mark.parametrize(
    "written",
    [
        "[x](other.md) [y](other.md#two-words) [z](#here)\n## Here",
        '[x](other.md "with a title") [y](code.py)',
        "[x](https://example.org/none.md#none) [y](mailto:a@example.org)",
        "`[x](none.md)` and\n```sh\n[x](none.md)\n```",
        "[x](other.md#two-words-1) [y](other.md#own)",
    ],
)
def test_a_good_link_is_left_alone(tmp_path: Path, written: str) -> None:
    (tmp_path / "other.md").write_text('# Two words\n\n# Two words\n\n<a id="own"></a>\n')
    (tmp_path / "code.py").write_text("")
    page = tmp_path / "page.md"
    page.write_text(written)
    assert list(broken(page, tmp_path)) == []


@pytest.mark.parametrize(
    "heading, anchor",
    [
        ("Two words", "two-words"),
        ("W&B and MLflow", "wb-and-mlflow"),
        ("`--until`, and more", "--until-and-more"),
        ("TD(λ): a – b", "tdλ-a--b"),
        ("snake_case [with](a.md) a link", "snake_case-with-a-link"),
    ],
)
def test_the_anchor_of_a_heading(heading: str, anchor: str) -> None:
    assert slug(heading) == anchor
    assert anchors(f"# {heading}\n") == {anchor}


def test_links_have_their_lines() -> None:
    assert links("a\n[b](c.md)\n\n```\n[d](e.md)\n```\n![f](g.svg)") == [
        Link("c.md", 2),
        Link("g.svg", 7),
    ]
