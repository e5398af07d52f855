"""The wrapper: what its options mean, what is refused, and when there is nothing to be done."""

import threading
from collections import defaultdict

import pytest
import torch
from helpers import assert_alike
from models import make_model, normal
from torch import nn

from samestep import DataParallel, SplitError, current_shard, data_parallel


class Echo(nn.Module):
    """Returns what it got; counts its calls in a list that all replicas share."""

    def __init__(self, seen=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.see = (lambda *_: None) if seen is None else (lambda value: seen.append(value))

    def forward(self, *args, **kwargs):
        self.see((args, kwargs))
        return args, kwargs


class Scale(nn.Module):
    """One parameter; works on any batch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.weight

    def double_it(self, x, *, plus=0):
        return x * self.weight * 2 + plus


@pytest.fixture
def three(monkeypatch):
    monkeypatch.setenv("SAMESTEP_REPLICAS", "3")


# --------------------------------------------------------------------------------------------------
# One slot
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"replicas": 1}, {"device_ids": ["cpu"]}])
def test_one_slot_adds_nothing(options, monkeypatch):
    monkeypatch.delenv("SAMESTEP_REPLICAS", raising=False)

    def refuse(*_, **__):
        raise AssertionError("called for one slot")

    for name in ("scatter", "run_shards", "gather", "plan_split"):
        monkeypatch.setattr(f"samestep.runtime.{name}", refuse)
    module = Echo()
    model = DataParallel(module, **options)
    x, table = torch.randn(7, 3), defaultdict(list, a=[torch.ones(2)])
    before = torch.get_rng_state()
    args, kwargs = model(x, table, key=x)
    assert args[0] is x
    assert args[1] is table
    assert kwargs["key"] is x
    assert torch.equal(torch.get_rng_state(), before)
    assert model.num_replicas == 1
    assert model.stats().num_builds == 0


def test_one_slot_calls_the_module_itself_in_the_callers_thread():
    seen = []
    module = Scale()
    module.register_forward_hook(lambda m, args, out: seen.append((m, threading.get_ident())))
    out = DataParallel(module)(torch.ones(3))
    assert seen == [(module, threading.get_ident())]
    assert out.grad_fn.name() == "MulBackward0"
    assert module.calls == 1


def test_one_slot_keeps_the_intra_op_threads_of_the_caller():
    class Count(nn.Module):
        def forward(self, x):
            return torch.get_num_threads()

    before = torch.get_num_threads()
    assert DataParallel(Count(), threads_per_replica=before + 1)(torch.ones(1)) == before


# --------------------------------------------------------------------------------------------------
# Few rows, no rows
# --------------------------------------------------------------------------------------------------


def test_one_row_runs_on_one_slot():
    seen = []
    model = DataParallel(Echo(seen), replicas=3)
    (out,), _ = model(torch.ones(1, 2))
    assert len(seen) == 1
    assert torch.equal(out, torch.ones(1, 2))


def test_no_rows_is_one_call_with_everything():
    seen = []
    model = DataParallel(Echo(seen), replicas=3)
    (out, names), _ = model(torch.ones(0, 2), ["a"])
    assert out.shape == (0, 2)
    assert len(seen) == 1
    assert names == ["a"]


def test_no_tensor_at_all_is_one_call_with_everything():
    seen = []
    model = DataParallel(Echo(seen), replicas=3)
    args, kwargs = model(3, "text", flag=None)
    assert (args, kwargs) == ((3, "text"), {"flag": None})
    assert len(seen) == 1
    assert model() == ((), {})


def test_no_rows_leaves_the_module_as_a_plain_call_does():
    model = DataParallel(Scale(), replicas=3)
    model(torch.ones(0, 2)).sum().backward()
    assert model.weight.grad == 0
    assert model.calls == 1


def test_keywords_alone_carry_the_batch():
    seen = []
    model = DataParallel(Echo(seen), replicas=3)
    _, out = model(x=torch.arange(7), y=torch.arange(14).view(7, 2), flag=True)
    assert [
        kwargs["x"].tolist() for _, kwargs in sorted(seen, key=lambda s: int(s[1]["x"][0]))
    ] == [
        [0, 1, 2],
        [3, 4, 5],
        [6],
    ]
    assert_alike(out, {"x": torch.arange(7), "y": torch.arange(14).view(7, 2), "flag": True})


def test_a_default_dict_goes_in_and_out_as_one():
    seen = []
    model = DataParallel(Echo(seen), replicas=2)
    (out,), _ = model(defaultdict(list, x=torch.arange(4)))
    assert type(out) is defaultdict
    assert out.default_factory is list
    assert out["new"] == []
    assert torch.equal(out["x"], torch.arange(4))
    assert all(args[0].default_factory is list for args, _ in seen)


def test_fewer_rows_than_slots_use_fewer_slots():
    seen = []
    model = DataParallel(Echo(seen), replicas=8)
    model(torch.ones(10, 1))
    assert [len(args[0]) for args, _ in seen] == [2] * 5
    assert model.stats().num_builds == 5


# --------------------------------------------------------------------------------------------------
# Options
# --------------------------------------------------------------------------------------------------


def shapes_seen(num_rows, shape, **options):
    seen = []
    model = DataParallel(Echo(seen), **options)
    (out,), _ = model(torch.arange(num_rows * 6.0).view(shape))
    assert torch.equal(out, torch.arange(num_rows * 6.0).view(shape))
    return sorted((list(args[0].shape) for args, _ in seen), reverse=True)


@pytest.mark.parametrize(
    ("split", "sizes"),
    [
        ("chunk", [4, 4, 2]),
        ("balanced", [4, 3, 3]),
        ([1, 1, 2], [5, 3, 2]),
        ((0, 1, 1), [5, 5]),
        ([1, 0, 0], [10]),
    ],
)
def test_the_split_is_the_one_asked_for(split, sizes):
    found = shapes_seen(10, (10, 6), replicas=3, split=split)
    assert found == [[size, 6] for size in sizes]


@pytest.mark.parametrize("dim", [1, -1])
def test_rows_may_be_on_another_dim(dim):
    assert shapes_seen(7, (6, 7), replicas=3, dim=dim) == [[6, 3], [6, 3], [6, 1]]


def test_dim_one_gives_the_plain_gradients():
    plain, x = make_model("mlp"), normal(2, 7, 3)
    expected = torch.autograd.grad(plain(x).pow(2).sum(), [x, *plain.parameters()])
    model = DataParallel(plain, replicas=3, dim=1)
    assert_alike(torch.autograd.grad(model(x).pow(2).sum(), [x, *plain.parameters()]), expected)


def test_the_environment_gives_replicas_to_those_who_name_none(three):
    assert DataParallel(Scale()).num_replicas == 3
    assert DataParallel(Scale(), replicas=2).num_replicas == 2
    assert DataParallel(Scale(), ["cpu"]).num_replicas == 1
    assert shapes_seen(7, (7, 6)) == [[3, 6], [3, 6], [1, 6]]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("num_replicas", [2, 3, 8])
def test_a_loss_of_the_module_is_that_of_the_batch(num_replicas, reduction):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(3, 1, dtype=torch.float64)

        def forward(self, x):
            return getattr(self.body(x).pow(2), reduction)()

    plain, x = Loss(), normal(7, 3)
    expected = plain(x)
    model = DataParallel(plain, replicas=num_replicas, reduction=reduction)
    loss = model(x)
    assert_alike(loss, expected)
    wanted = [x, *plain.parameters()]
    assert_alike(torch.autograd.grad(loss, wanted), torch.autograd.grad(expected, wanted))


def test_out_dims_rule_the_outputs():
    class Many(nn.Module):
        def forward(self, x):
            k = current_shard().index
            return {"sum": x.sum(), "first": k, "list": k, "turned": x.T, "plain": x}

    out_dims = {"sum": "sum", "first": "first", "list": "list", "turned": 1}
    x = torch.arange(14.0).view(7, 2)
    out = DataParallel(Many(), replicas=3, out_dims=out_dims)(x)
    assert_alike(out, {"sum": x.sum(), "first": 0, "list": [0, 1, 2], "turned": x.T, "plain": x})


def test_in_dims_rule_the_arguments():
    class Two(nn.Module):
        def forward(self, x, table, names=None):
            assert len(table) == 7
            return x.sum(0), len(names)

    model = DataParallel(Two(), replicas=3, in_dims={"x": 1, "table": None}, out_dims=[0, "list"])
    out, counts = model(torch.ones(2, 7), torch.ones(7, 3), names=["n"] * 7)
    assert torch.equal(out, torch.full((7,), 2.0))
    assert counts == [3, 3, 1]


def test_an_output_device_is_where_outputs_land():
    model = DataParallel(Scale(), replicas=2, output_device="meta")
    with torch.no_grad():
        assert model(torch.ones(4)).device.type == "meta"
    assert (
        DataParallel(Scale(), replicas=2, output_device="cpu")(torch.ones(4)).device.type == "cpu"
    )


def test_another_method_runs_in_parallel():
    model = DataParallel(Scale(), replicas=3)
    out = model.call("double_it", torch.arange(7.0), plus=1)
    assert_alike(out, 4 * torch.arange(7.0) + 1 + model.weight * 0)
    assert DataParallel(Scale()).call("double_it", torch.ones(2)).tolist() == [4, 4]
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        model.call("missing", torch.ones(3))


def test_an_explanation_runs_nothing():
    seen = []
    model = DataParallel(Echo(seen), replicas=3)
    text = model.explain(torch.randn(10, 5), 3, mask=torch.ones(6, 6), names=["a"] * 10)
    assert text.splitlines() == [
        "args[0] float32 [10, 5]: cut on dim 0 into 4 4 2",
        "args[1] int 3: whole",
        "kwargs['mask'] float32 [6, 6]: whole",
        "kwargs['names'] list of 10: cut by rows into 4 4 2",
    ]
    assert seen == []


def test_arguments_that_cannot_be_cut_are_refused_before_anything_runs():
    seen = []
    model = DataParallel(Echo(seen), replicas=3, in_dims={0: 0, 1: 0})
    with pytest.raises(SplitError, match=r"args\[1\]"):
        model(torch.ones(7, 2), torch.ones(5, 2))
    assert seen == []


def test_the_function_form_is_the_same_step():
    plain, x = make_model("mlp"), normal(7, 3)
    assert_alike(data_parallel(plain, x, ["cpu"] * 3), plain(x))
    assert_alike(data_parallel(plain, (x,), ["cpu"] * 3, None, 0, {}), plain(x))
    turned = data_parallel(nn.Identity(), torch.ones(2, 7), ["cpu"] * 3, dim=1)
    assert turned.shape == (2, 7)


def test_threads_that_call_at_once_take_turns():
    model, failures = DataParallel(Scale(), replicas=3), []

    def work():
        for n in range(1, 20):
            out = model(torch.full((n,), float(n)))
            if not torch.equal(out, torch.full((n,), 2.0 * n)):
                failures.append(out)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert model.calls == 4 * 19


def test_a_refresh_sees_what_torch_does_not_count():
    model = DataParallel(Scale(), replicas=3)
    model.module.register_buffer("b", torch.ones(1))
    model(torch.ones(3))
    model.module.b.data.add_(1)
    model.refresh(force=True)
    assert all(
        replica.module.b.item() == 2
        for replica in model._samestep_runtime.replicas._replicas.values()
    )


# --------------------------------------------------------------------------------------------------
# What is refused
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"replicas": 0}, ValueError, "replicas must be at least 1, got 0"),
        ({"replicas": True}, TypeError, r"replicas must be an int or 'auto', got True \(bool\)"),
        ({"replicas": 2.0}, TypeError, r"replicas must be an int or 'auto', got 2.0 \(float\)"),
        ({"device_ids": []}, ValueError, "device_ids is empty"),
        ({"device_ids": ["abacus"]}, ValueError, "device_ids holds 'abacus', which torch does not"),
        ({"device_ids": "cpu"}, TypeError, "must be a sequence of devices"),
        ({"device_ids": ["cpu"] * 3, "replicas": 2}, ValueError, "replicas=2 is smaller than"),
        ({"output_device": "abacus"}, ValueError, "output_device holds 'abacus'"),
        ({"output_device": 1.5}, TypeError, r"output_device holds 1.5 \(float\)"),
        ({"dim": 1.0}, TypeError, "dim must be an int, got 1.0"),
        ({"dim": True}, TypeError, "dim must be an int, got True"),
        ({"dim": None}, TypeError, "dim must be an int, got None"),
        ({"split": "even"}, ValueError, "split is 'even'; it must be 'chunk', 'balanced' or one"),
        ({"split": [1, 2]}, ValueError, r"one weight per slot \(weights: 2, slots: 3\)"),
        ({"split": []}, ValueError, r"\(weights: 0, slots: 3\)"),
        (
            {"split": [1, -1, 1]},
            ValueError,
            "weights must be finite, not negative and not all zero",
        ),
        ({"split": [1, float("nan"), 1]}, ValueError, "weights must be finite"),
        ({"split": [1, float("inf"), 1]}, ValueError, "weights must be finite"),
        ({"split": [0, 0, 0]}, ValueError, "not all zero"),
        ({"split": ["a", 1, 1]}, (TypeError, ValueError), "split"),
        ({"split": None}, TypeError, "split"),
        ({"split": 3}, TypeError, "split"),
        ({"in_dims": "columns"}, TypeError, "in_dims is 'columns'; it must be a dim, None, 'rows'"),
        ({"in_dims": {"x": 1.5}}, TypeError, r"in_dims\['x'\] is 1.5; it must be a dim"),
        ({"in_dims": {"x": [0, True]}}, TypeError, r"in_dims\['x'\]\[1\] is True"),
        ({"out_dims": "median"}, TypeError, "out_dims is 'median'; it must be a dim, None, 'mean'"),
        ({"out_dims": [0, object]}, TypeError, r"out_dims\[1\] is <class 'object'>"),
        ({"reduction": "max"}, ValueError, "reduction is 'max'; it must be 'mean' or 'sum'"),
        ({"reduction": None}, ValueError, "reduction is None; it must be 'mean' or 'sum'"),
        ({"buffers": "median"}, ValueError, "buffers holds 'median'; the rules are merge"),
        ({"buffers": {"x": "median"}}, ValueError, "buffers holds 'median'"),
        ({"buffers": 1}, TypeError, "buffers must be a rule or a dict of rules by name, got 1"),
        ({"sync_batch_norm": 1}, TypeError, "sync_batch_norm must be True or False, got 1"),
        ({"threads_per_replica": 0}, ValueError, "threads_per_replica must be at least 1, got 0"),
        ({"threads_per_replica": -2}, ValueError, "threads_per_replica must be at least 1, got -2"),
        ({"threads_per_replica": 1.0}, TypeError, "threads_per_replica must be an int, got 1.0"),
        ({"threads_per_replica": True}, TypeError, "threads_per_replica must be an int, got True"),
        ({"colour": "red"}, TypeError, "unexpected keyword argument 'colour'"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, dict) else "",
)
def test_a_bad_argument_is_refused_at_construction(options, error, message):
    given = {"replicas": 3, **options}
    if "device_ids" in options and "replicas" not in options:
        del given["replicas"]
    with pytest.raises(error, match=message):
        DataParallel(Scale(), **given)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize("ids", [[0], [0, 1], ["cuda:0"], [torch.device("cuda", 1)]], ids=repr)
def test_accelerators_that_are_not_there_are_refused(ids):
    with pytest.raises(ValueError, match=r"no accelerator|not on this machine") as info:
        DataParallel(Scale(), ids)
    assert "replicas=2" in str(info.value)


@pytest.mark.parametrize("module", [None, torch.sin, nn.Linear, {"a": 1}], ids=repr)
def test_only_modules_can_be_wrapped(module):
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module, got"):
        DataParallel(module, replicas=2)


@pytest.mark.parametrize("name", ["nothing", 5, "0"])
def test_an_in_dim_for_a_parameter_that_is_not_there_is_refused_by_the_call(name):
    model = DataParallel(Scale(), replicas=2, in_dims={name: 0})
    with pytest.raises(ValueError, match=r"which is no parameter of this call.*'x'"):
        model(torch.ones(4))


def test_an_out_dim_for_an_output_that_is_not_there_is_refused_by_the_call():
    class Named(nn.Module):
        def forward(self, x):
            return {"a": x, "b": {"c": x}}

    model = DataParallel(Named(), replicas=2, out_dims={"b/d": "mean"})
    with pytest.raises(ValueError, match=r"speaks about 'd' in output\['b'\]"):
        model(torch.ones(4))
