"""What the documents say is true: code runs, output is real, links lead somewhere."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import samestep
from samestep import tutorial

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted({module.name for module in pkgutil.iter_modules(samestep.__path__)} - {"__main__"})

cpu_only = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="the pages show what a machine without one prints"
)


def find_blocks(page, language):
    """The fenced blocks of one language, with the line where each begins."""
    text = page.read_text()
    pattern = rf"^```{language}\n(.*?)^```$"
    for match in re.finditer(pattern, text, flags=re.MULTILINE | re.DOTALL):
        yield text[: match.start(1)].count("\n"), match.group(1)


def run_blocks(page):
    """Run a page's Python from top to bottom as one script, as a reader would."""
    namespace = {"__name__": "page"}
    for line, block in find_blocks(page, "python"):
        code = compile("\n" * line + block, str(page), "exec")
        exec(code, namespace)
    return namespace


def page_id(path):
    return path.relative_to(ROOT).as_posix()


@cpu_only
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(find_blocks(page, "python"))], ids=page_id
)
def test_the_code_of_a_page_runs(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run_blocks(page)


def test_the_first_page_has_code_that_is_run():
    assert list(find_blocks(ROOT / "README.md", "python"))


def test_code_that_is_wrong_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nassert 1 + 1 == 2\n```\n\n```python\nassert 1 == 2\n```\n")
    with pytest.raises(AssertionError):
        run_blocks(page)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_are_right(name):
    module = importlib.import_module(f"samestep.{name}")
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


@cpu_only
def test_the_tutorial_output_on_the_first_page_is_real():
    shown = [
        block.splitlines()
        for _, block in find_blocks(ROOT / "README.md", "text")
        if "In Model" in block
    ]
    assert len(shown) == 1
    printed = []
    tutorial.run(2, echo=printed.append)
    printed = [line.expandtabs(4) for line in printed]
    assert Counter(shown[0]) == Counter(printed)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files_that_exist(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"dangling link: {target}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_targets_that_are_named_exist(page):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)`", page.read_text()))
    named |= set(re.findall(r"^make ([a-z]+)", page.read_text(), flags=re.MULTILINE))
    assert named <= targets


def find_rows(title):
    """The cells of the table in a section of the guide, without its two header lines."""
    text = (ROOT / "docs" / "guide.md").read_text()
    section = re.search(rf"^## {title}\n(.*?)(?=^## )", text, flags=re.MULTILINE | re.DOTALL)[1]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_the_guide_has_every_argument_in_order_with_its_default():
    rows = find_rows("Every argument")
    parameters = inspect.signature(samestep.DataParallel).parameters.values()
    assert [row[0].strip("`") for row in rows] == [parameter.name for parameter in parameters]
    for (_, shown, text), parameter in zip(rows, parameters, strict=True):
        assert text
        if parameter.default is parameter.empty:
            assert shown == "required"
        else:
            assert ast.literal_eval(shown.strip("`")) == parameter.default


def test_the_guide_has_every_method_and_attribute():
    own = set(dir(samestep.DataParallel)) - set(dir(nn.Module))
    own = {name for name in own if not name.startswith("_")} | {"module"}
    rows = find_rows("Methods and attributes")
    assert sorted(re.match(r"`(\w+)", row[0])[1] for row in rows) == sorted(own)
    assert all(row[1] for row in rows)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_to_a_heading_lead_to_one(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        text = (page.parent / target if target else page).read_text()
        headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
        known = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}
        assert anchor in known | set(re.findall(r'<a id="([^"]+)">', text)), anchor


def test_the_contents_of_the_guide_are_its_sections():
    text = (ROOT / "docs" / "guide.md").read_text()
    contents = re.findall(r"^- \[(.*?)\]\(#", text, flags=re.MULTILINE)
    assert contents == re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
