"""The order of the house: who may import whom, and what every file must have."""

import ast
from pathlib import Path

import pytest

import samestep

PACKAGE = Path(samestep.__file__).parent
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")
MAX_LINES = 450

# From the ground up. A module may import our own modules only from layers before its own, so two of
# one layer know nothing of each other.
LAYERS = [
    (
        "ground",
        "errors adapters devices holders intercept segments lending snapshot progress tune",
    ),
    ("what a container is, and how it is copied again", "tree pattern reach"),
    ("what cutting and joining share", "rows dims"),
    ("bytes from rank to rank", "gloo wires"),
    (
        "one idea each",
        "pace plan join reduce rng context workers lookahead comm follow graphs links timing "
        "wrapper randomness plain sealed recording",
    ),
    ("how shards meet, how ranks do", "group rendezvous"),
    (
        "ideas made of these",
        "collectives split merge norm slices parcel position handover copies homing rerun",
    ),
    ("the shards of a call and the ranks that have them", "spread"),
    ("a batch as a loader yields it", "batches"),
    ("the module as a slot sees it", "replica"),
    ("all of its replicas, and one that runs twice", "replicas recompute"),
    ("what a call leaves behind in the module", "changes"),
    ("how that is written to the source", "state"),
    ("what calls so far have taught about the module", "habits"),
    ("runs the shards", "engine"),
    ("how a call is run", "runner"),
    ("one pass through the shards' graphs", "backward"),
    ("one graph of all shards", "stitch"),
    ("what shards returned, in the caller's graph", "tie"),
    ("what the ranks' shards returned and wrote", "sharing"),
    ("a shard's backward right after its forward", "eager"),
    ("a shard's call, captured and replayed", "capture"),
    ("one call on all shards", "step"),
    ("the verbs, and what was asked for", "functional options regroup"),
    ("what several ranks add to a call", "ranks mirror rounds"),
    ("every call", "runtime"),
    ("which number of replicas is fastest", "auto"),
    ("the wrapper, and batches that are not cut", "module whole"),
    ("a rank's process and how it ended", "starter endings"),
    ("where the ranks write", "output"),
    ("around the step", "loader checkpoint infer"),
    ("a step, seen from outside", "observe"),
    ("what a proof is made of", "findings drawing mixing remedies"),
    ("one call, run both ways", "trials"),
    ("a measurement, shown", "report"),
    ("proof", "proof launch tutorial"),
    ("measurement of a model", "bench"),
    ("the command line", "cli"),
    ("python -m", "__main__"),
]
LAYER_OF = {name: number for number, (_, names) in enumerate(LAYERS) for name in names.split()}


def find_imports(source):
    """The modules of this package that a source imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "samestep" if node.level else node.module
            base = f"{base}.{node.module}" if node.level and node.module else base
            # `from samestep import tutorial` and `from samestep.tutorial import run`
            names = [base] if base != "samestep" else [f"{base}.{a.name}" for a in node.names]
        else:
            continue
        for name in names:
            if name == "samestep" or name.startswith("samestep."):
                found.add(name.partition(".")[2].partition(".")[0] or "__init__")
    return found


def find_upward_imports(module, source):
    """Imports from the module's own layer, a higher one, or from the package's front door."""
    own = LAYER_OF[module]
    return {name for name in find_imports(source) if not LAYER_OF.get(name, len(LAYERS)) < own}


def read(module):
    return (PACKAGE / f"{module}.py").read_text()


def test_every_module_has_a_layer():
    assert set(MODULES) == set(LAYER_OF)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_lower_layers(module):
    assert find_upward_imports(module, read(module)) == set()


@pytest.mark.parametrize("module", [*MODULES, "__init__"])
def test_a_module_opens_with_a_docstring_and_names_what_is_public(module):
    tree = ast.parse(read(module))
    assert ast.get_docstring(tree)
    targets = [
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]
    assert "__all__" in targets


@pytest.mark.parametrize("module", [*MODULES, "__init__"])
def test_a_file_stays_short(module):
    assert len(read(module).splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from samestep.tutorial import run", {"tutorial"}),
        ("from samestep import tutorial", {"tutorial"}),
        ("from . import tutorial", {"tutorial"}),
        ("from .tutorial import run", {"tutorial"}),
        ("import samestep.tutorial as t", {"tutorial"}),
        ("def late():\n    from samestep.cli import main", {"cli"}),
        ("import samestep", {"__init__"}),
        ("from samestep import DataParallel", {"DataParallel"}),
        ("from samestep.devices import Slot", set()),
        ("import torch, samesteps", set()),
    ],
)
def test_the_check_sees_every_form_of_an_upward_import(source, found):
    assert find_upward_imports("split", source) == found


@pytest.mark.parametrize("module", MODULES)
def test_numpy_is_used_only_where_it_is_there(module):
    # Tensor.numpy() raises without numpy, which torch does not need and we do not ask for.
    source = (PACKAGE / f"{module}.py").read_text()
    assert ".numpy()" not in source.replace("words.numpy()", "")  # of numpy's own generator
    assert not find_numpy(ast.parse(source))


def find_numpy(tree):
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return [name for name in names if name.partition(".")[0] == "numpy"]


# Functions of torch that make a tensor on the default device, which is the user's to choose.
_MAKERS = {"arange", "as_tensor", "empty", "empty_strided", "full", "ones", "rand", "randint",
           "randn", "randperm", "tensor", "zeros"}  # fmt: skip
_AS_A_SCRIPT = {"bench", "tutorial"}  # they make models and batches as a script would


@pytest.mark.parametrize("module", sorted({*MODULES} - _AS_A_SCRIPT))
def test_what_is_made_is_made_on_a_device_that_is_said(module):
    for node in ast.walk(ast.parse(read(module))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in _MAKERS:
                said = {keyword.arg for keyword in node.keywords}
                assert "device" in said, f"{module}.py:{node.lineno}: torch.{node.func.attr}()"
