"""The page on numerics names tests that exist and shows numbers that were measured."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "numerics.md").read_text()
FOLDER = ROOT / "benchmarks" / "numerics"
CLAIMED = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)


def load_script(folder=FOLDER):
    """The benchmark as a module."""
    spec = importlib.util.spec_from_file_location(f"{folder.name}_run", folder / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def find_claims():
    """The rows of the table of claims, as lists of cells."""
    section = re.search(r"^## Claims\n(.*?)^## ", PAGE, flags=re.MULTILINE | re.DOTALL)[1]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [row for row in rows if not set(row[0]) <= set("- ")][1:]


@pytest.mark.parametrize(("file", "name"), CLAIMED)
def test_a_test_that_is_named_exists(file, name):
    source = (ROOT / "tests" / file).read_text()
    assert re.search(rf"^def {name}\(", source, flags=re.MULTILINE)


def test_every_claim_names_a_test():
    claims = find_claims()
    assert len(claims) > 10
    assert [row[0] for row in claims if not re.search(r"`[\w/]+\.py::\w+`", row[-1])] == []


@pytest.mark.parametrize("path", sorted((FOLDER / "results").glob("*.json")), ids=lambda p: p.stem)
def test_the_numbers_on_the_page_are_the_measured_ones(path):
    results = json.loads(path.read_text())
    lines = load_script().format_tables(results)
    shown = PAGE.splitlines()
    assert [line for line in lines if line and line not in shown] == []
    assert f"{results['changed by pieces']:.1%}" in PAGE


def test_the_numbers_beside_ddp_are_the_measured_ones():
    folder = ROOT / "benchmarks" / "ragged"
    (path,) = (folder / "results").glob("*.json")
    rows = load_script(folder).format_rows(json.loads(path.read_text())["deviations"])
    assert len(rows) == 6
    assert [row for row in rows if row not in PAGE.splitlines()] == []


def test_results_say_where_they_were_measured():
    found = sorted((FOLDER / "results").glob("*.json"))
    assert found
    for path in found:
        assert {"torch", "python", "machine", "rows"} <= set(
            json.loads(path.read_text())["environment"]
        )


def test_every_repeated_run_had_the_same_bits():
    for path in (FOLDER / "results").glob("*.json"):
        for by_dtype in json.loads(path.read_text())["cases"].values():
            for samples in by_dtype.values():
                wrapped = [value for key, value in samples.items() if key.startswith("K=")]
                assert wrapped
                assert all(v["same bits again"] and v["same bits in one thread"] for v in wrapped)


@pytest.mark.slow
def test_the_script_runs_and_finds_rounding_only(tmp_path):
    path = tmp_path / "results.json"
    command = [sys.executable, FOLDER / "run.py", "--models", "mlp", "--replicas", "3"]
    subprocess.run([*command, "--steps", "2", "--json", path], check=True, capture_output=True)
    found = json.loads(path.read_text())["cases"]["mlp"]["float64"]["K=3"]
    assert found["gradients"] < 1e-13
    assert found["same bits again"]
    assert found["same bits in one thread"]
