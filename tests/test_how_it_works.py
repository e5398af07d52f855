"""The pages about the inside go with the code: the layers, the tour, the tree, what is not there.

``python tests/test_how_it_works.py`` prints the picture of the layers as it ought to be.
"""

import inspect
import re
from pathlib import Path

import pytest
from test_house import LAYERS, MODULES

import samestep
from samestep.reduce import TreeSum

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "how-it-works.md").read_text()
DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))


def draw_layers():
    """The picture: the highest layer first, and only modules that exist."""
    lines = []
    for title, names in reversed(LAYERS):
        there = [name for name in names.split() if name in MODULES]
        if there:
            lines.append(f" {title:<47} {'  '.join(there)}")
    return "\n".join(lines) + "\n"


def find_section(title):
    """The text below a heading."""
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert match, f"no section {title!r}"
    return match[1]


def test_the_picture_of_the_layers_is_the_table():
    shown = re.search(r"^```text\n(.*?)^```$", find_section("The layers"), re.M | re.S)
    assert shown, "the section has no picture"
    assert shown[1] == draw_layers()


def test_the_tour_visits_every_file_once():
    visited = re.findall(r"\(\.\./src/samestep/(\w+)\.py\)", find_section("A tour by file"))
    assert sorted(visited) == sorted(MODULES)


def test_the_tree_for_seven_shards_is_the_one_drawn():
    total = TreeSum(7, lambda left, right: f"({left}+{right})")
    for shard in (6, 0, 3, 1, 5, 2, 4):
        total.add(shard, str(shard))
    assert f"`{total.result()}`" in PAGE


def test_what_is_called_missing_is_missing():
    names = re.findall(r"`(\w+)`", find_section("Not yet"))
    options = inspect.signature(samestep.DataParallel).parameters
    assert names
    assert [name for name in names if hasattr(samestep, name) or name in options] == []


@pytest.mark.parametrize("anchor", re.findall(r"\]\(#([^)]+)\)", PAGE))
def test_links_within_the_page_lead_to_a_heading(anchor):
    headings = re.findall(r"^#+ (.*)$", PAGE, flags=re.MULTILINE)
    known = {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}
    assert anchor in known | set(re.findall(r'<a id="([^"]+)">', PAGE))


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_is_short_complete_and_listed(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 40
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == ["Context", "Choice", "Refused"]
    number = path.stem.partition("-")[0]
    assert text.startswith(f"# {number} ")
    assert f"]({path.name})" in (DOCS / "decisions" / "README.md").read_text()


def test_decisions_are_numbered_without_gaps():
    numbers = [int(path.stem.partition("-")[0]) for path in DECISIONS]
    assert numbers == list(range(1, len(numbers) + 1))


if __name__ == "__main__":
    print(draw_layers(), end="")
