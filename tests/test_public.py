"""What users may rely on: a change of a name or an argument is a decision, not an accident."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import samestep

NAMES = {
    "all_gather",
    "all_reduce",
    "is_main",
    "DataParallel",
    "DrawWarning",
    "MergeError",
    "RankError",
    "ReplicaError",
    "Shard",
    "Slot",
    "SplitError",
    "StateWarning",
    "check",
    "current_shard",
    "data_parallel",
    "gather",
    "load",
    "map_batches",
    "parallel_apply",
    "register_batch_type",
    "replicate",
    "save",
    "scatter",
    "split_loader",
    "tune_cpu",
}

SIGNATURES = {
    "DataParallel": (
        "module, device_ids=None, output_device=None, dim=0, *, replicas=None, split='chunk', "
        "in_dims=None, out_dims=None, reduction='mean', buffers='merge', sync_batch_norm=False, "
        "recompute=False, eager_backward=False, cuda_graphs=False, threads_per_replica=1, "
        "workers=None, batch='global', process_group=None"
    ),
    "DataParallel.forward": "self, *args, **kwargs",
    "DataParallel.call": "self, method, *args, **kwargs",
    "DataParallel.explain": "self, *args, **kwargs",
    "DataParallel.refresh": "self, force=False",
    "DataParallel.stats": "self",
    "Shard": "index, num_shards, start, stop, num_rows, device",
    "Slot": "index, device",
    "check": "model, *inputs, loss=None, replicas=(1, 2, 3, 4, 7, 8), kwargs=None, **options",
    "all_gather": "tensor, dim=0",
    "all_reduce": "tensor, op='sum'",
    "current_shard": "",
    "is_main": "",
    "data_parallel": (
        "module, inputs, device_ids=None, output_device=None, dim=0, module_kwargs=None"
    ),
    "gather": (
        "outputs, target_device, dim=0, *, rows=None, weights=None, out_dims=None, reduction='mean'"
    ),
    "load": (
        "path, *, model=None, optimizer=None, scheduler=None, scaler=None, loader=None, "
        "missing_ok=False, process_group=None, **more"
    ),
    "map_batches": (
        "model, loader, *, ordered=True, progress=False, batch_size=None, call=None, "
        "max_in_flight=None, device_ids=None, replicas=None, output_device=None"
    ),
    "parallel_apply": "modules, inputs, kwargs_tup=None, devices=None",
    "register_batch_type": "cls, *, split, merge, rows=None",
    "save": (
        "path, *, model=None, optimizer=None, scheduler=None, scaler=None, loader=None, step=None, "
        "background=False, process_group=None, **more"
    ),
    "tune_cpu": "*, memory=True, num_threads=None",
    "split_loader": "loader, model=None, *, replicas=None, split='chunk', process_group=None",
}

# Arguments that torch.nn.parallel has, in its order; what we add comes after them, by keyword.
AS_IN_TORCH = {
    "DataParallel": (nn.DataParallel, 0),
    "data_parallel": (nn.parallel.data_parallel, 0),
    "gather": (nn.parallel.gather, 0),
    "parallel_apply": (nn.parallel.parallel_apply, 0),
    "replicate": (nn.parallel.replicate, 0),
    "scatter": (nn.parallel.scatter, 0),
}

ATTRIBUTES = {"call", "choice", "explain", "num_replicas", "refresh", "slots", "stats"}


def find(path):
    found = samestep
    for name in path.split("."):
        found = getattr(found, name)
    return found


def write_out(function):
    """The signature without annotations."""
    parameters = inspect.signature(function).parameters.values()
    plain = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
    return str(inspect.Signature(plain))[1:-1]


def test_these_are_the_public_names():
    assert set(samestep.__all__) == NAMES
    assert len(samestep.__all__) == len(NAMES)
    assert all(hasattr(samestep, name) for name in NAMES)


@pytest.mark.parametrize("path", SIGNATURES)
def test_these_are_the_signatures(path):
    assert write_out(find(path)) == SIGNATURES[path]


@pytest.mark.parametrize("name", AS_IN_TORCH)
def test_the_arguments_of_torchs_own_come_first_and_mean_the_same(name):
    theirs = list(inspect.signature(AS_IN_TORCH[name][0]).parameters.values())
    ours = list(inspect.signature(find(name)).parameters.values())
    assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
    assert [p.default for p in ours[: len(theirs)]] == [p.default for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


def test_these_are_the_wrappers_own_attributes():
    own = set(dir(samestep.DataParallel)) - set(dir(nn.Module))
    assert {name for name in own if not name.startswith("_")} == ATTRIBUTES


def test_everything_public_is_described():
    for name in NAMES:
        assert inspect.getdoc(find(name))
    for name in ATTRIBUTES:
        assert inspect.getdoc(getattr(samestep.DataParallel, name))


@pytest.mark.parametrize("name", ["MergeError", "ReplicaError", "SplitError"])
def test_errors_are_value_errors(name):
    assert issubclass(find(name), ValueError)


@pytest.mark.parametrize("name", ["DrawWarning", "StateWarning"])
def test_warnings_are_user_warnings(name):
    assert issubclass(find(name), UserWarning)


def test_no_module_takes_the_place_of_something_public():
    modules = {path.stem for path in Path(samestep.__file__).parent.glob("*.py")}
    assert not modules & NAMES


@pytest.mark.slow
def test_a_script_that_trains_imports_nothing_around_the_step():
    code = """if True:
        import sys, samestep
        around = {"auto", "checkpoint", "infer", "launch", "loader", "observe", "proof", "cli"}
        around |= {"timing", "tune", "capture", "recording"}
        around |= {"batches", "eager", "parcel", "recompute", "slices"}  # for few wrappers
        assert not around & {name.rpartition(".")[2] for name in sys.modules if "samestep" in name}
        assert callable(samestep.check) and "check" in dir(samestep)
        import samestep.proof
        assert callable(samestep.check)
    """
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


@pytest.mark.slow
def test_importing_starts_nothing_and_changes_nothing():
    code = """if True:
        import threading, torch
        def look():
            return threading.active_count(), torch.get_num_threads(), torch.random.default_generator
        before, state = look(), torch.get_rng_state()
        import samestep
        assert before == look(), (before, look())
        assert torch.equal(state, torch.get_rng_state())
    """
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)
