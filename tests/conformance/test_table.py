"""docs/conformance.md and the tests of this folder say the same, in both directions."""

import re
from pathlib import Path

import reports
from test_refusals import REFUSALS

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
SECTION = re.compile(r"^## (?:(K\d\d)\.|(Asked for)|(What is refused))", re.MULTILINE)


def read_rows():
    """Every row of every table: (kind, cells)."""
    kind = None
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            match = SECTION.match(line)
            kind = None if match is None else match[1] or ("FR" if match[2] else "refused")
        elif kind is not None and line.startswith("|") and not line.startswith(("| ---", "| |")):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if cells[0] != "what":
                yield kind, cells


ROWS = list(read_rows())
TABLE = {(kind, cells[0]): cells for kind, cells in ROWS if kind != "refused"}
ENTRIES = reports.load_all()
KINDS = [f"K{number:02}" for number in range(1, 24)]


def issues_in(cell):
    """The issues that a cell links to; the text of each link must name its target."""
    found = set()
    for text, repository, number in re.findall(
        r"\[([^\]]+)\]\(https://github\.com/([^)]+)/issues/(\d+)\)", cell
    ):
        assert text == f"{repository.split('/')[1]}#{number}"
        found.add(f"{repository}#{number}")
    return found


def test_no_row_is_there_twice():
    assert len(TABLE) == sum(kind != "refused" for kind, _ in ROWS)


def test_every_test_is_in_the_row_of_its_report():
    for entry in ENTRIES:
        name = entry.test.split("::")[1]
        cells = TABLE[entry.kind, entry.label]
        assert f"`{name}`" in cells[4], f"{name} is not in the row {entry.kind} {entry.label}"


def test_every_row_has_exactly_its_tests_and_issues():
    for (kind, label), cells in TABLE.items():
        entries = [entry for entry in ENTRIES if (entry.kind, entry.label) == (kind, label)]
        if label in reports.ACCELERATOR_ONLY:
            assert not entries, f"{label} has a test after all"
            home, issues = reports.ACCELERATOR_ONLY[label]
            assert (kind, cells[4]) == (home, "needs an accelerator")
            assert issues_in(cells[1]) == set(issues)
            continue
        named = re.findall(r"`(test_\w+)`", cells[4])
        assert named == [entry.test.split("::")[1] for entry in entries], label
        assert entries, f"the row {kind} {label} has no test"
        assert issues_in(cells[1]) == {issue for entry in entries for issue in entry.issues}, label


def test_what_needs_an_accelerator_is_listed():
    for label, (kind, _) in reports.ACCELERATOR_ONLY.items():
        assert (kind, label) in TABLE


def test_every_row_says_what_happens_here():
    for (kind, label), cells in TABLE.items():
        assert len(cells) == 5, f"{kind} {label} has {len(cells)} cells"
        assert all(len(cell) > 3 for cell in (cells[3], cells[4])), f"{kind} {label}"


def test_every_kind_has_its_file_and_two_cases_of_our_own():
    for kind in KINDS:
        own = {entry.test for entry in ENTRIES if (entry.kind, entry.label) == (kind, "+")}
        assert len(own) >= 2, kind
        files = {entry.test.split("::")[0] for entry in ENTRIES if entry.kind == kind}
        assert len(files) == 1, kind
        assert f"(../tests/conformance/{files.pop()})" in PAGE.read_text()


def test_every_test_of_a_kind_is_registered():
    registered = {entry.test for entry in ENTRIES}
    for path in Path(__file__).parent.glob("test_k*.py"):
        for name in re.findall(r"^def (test_\w+)", path.read_text(), flags=re.MULTILINE):
            assert f"{path.name}::{name}" in registered, f"{name} does not say what it is about"


def test_every_refusal_is_in_the_table_with_its_message_and_no_other():
    shown = [cells for kind, cells in ROWS if kind == "refused"]
    tested = [[r.what, r.error.__name__, f"`{r.message}`"] for r in REFUSALS]
    assert shown == tested
