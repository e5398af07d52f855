"""Which test proves what: the registry that docs/conformance.md is checked against.

A test says by a decorator what it is about: :func:`report` for a failure of torch.nn.DataParallel
that somebody reported in public, :func:`beyond` for a case of the same kind that nobody did, and
:func:`wish` for what users asked for and did not get.
"""

import dataclasses
import importlib
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Entry:
    """One test and what it is about."""

    kind: str  # "K01", or "FR"
    label: str  # "P01", "FR1", or "+" for a case beyond the reports
    issues: tuple[str, ...]  # "pytorch/pytorch#40457"
    test: str  # "test_k01_real_modules.py::test_..."


ENTRIES: list[Entry] = []


def report(label, *issues):
    """Mark a test as the proof that a reported failure does not happen here."""
    return _register(label, issues)


def beyond(kind):
    """Mark a test as a case of ``kind`` that is in no report."""
    return _register("+", (), kind)


def wish(label, *issues):
    """Mark a test as the proof that something asked for is there."""
    return _register(label, issues, "FR")


def _register(label, issues, kind=None):
    def decorate(test):
        stem = Path(test.__code__.co_filename).stem
        found = kind or stem.split("_")[1].upper()
        entry = Entry(found, label, issues, f"{stem}.py::{test.__name__}")
        if entry not in ENTRIES:  # a file may be imported under two names
            ENTRIES.append(entry)
        return test

    return decorate


def load_all():
    """Import every file of this folder that has tests; return all entries."""
    for path in sorted(FOLDER.glob("test_*.py")):
        if path.stem != "test_table":
            importlib.import_module(path.stem)
    return list(ENTRIES)


# What no test on a CPU can show; docs/conformance.md says what the code does about each.
ACCELERATOR_ONLY = {
    "P73": ("K11", ("allenai/allennlp#2793", "pytorch/examples#248")),
    "P87": ("K13", ("ROCm/pytorch#1053",)),
    "P113": ("K17", ("pytorch/pytorch#7138", "pytorch/pytorch#2610")),
    "P119": ("K18", ("pytorch/pytorch#1499",)),
    "P126": ("K20", ("pytorch/pytorch#1637", "pytorch/pytorch#24081", "pytorch/pytorch#52142")),
    "P127": ("K20", ("pytorch/pytorch#84803", "pytorch/pytorch#156392")),
    "P128": ("K20", ("pytorch/pytorch#109709",)),
}
