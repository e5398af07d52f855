"""Plans, compared literally, and what cutting by them gives."""

import re
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from batches import Items, Output, Pair, Plain
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from samestep import tree
from samestep.errors import SplitError
from samestep.split import (
    LeafPlan,
    SplitPlan,
    check_in_dims,
    cut,
    explain_plan,
    plan_sizes,
    plan_split,
)

x, y = torch.randn(30, 5), torch.arange(30)


def explain(*args, num_slots=3, **options):
    kwargs = options.pop("kwargs", {})
    return explain_plan(plan_split(args, kwargs, num_slots=num_slots, **options))


def cut_args(*args, num_slots=3, **options):
    """The shards' positional arguments, transposed: per argument, one piece per shard."""
    plan = plan_split(args, {}, num_slots=num_slots, **options)
    return list(zip(*(shard for shard, _ in cut(plan, args, {})), strict=True))


def actions(*args, **options):
    """What happens to each leaf, without descriptions."""
    return [re.sub(r" .*:", "", line) for line in explain(*args, **options).splitlines()]


# --------------------------------------------------------------------------------------------------
# Sizes
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_rows", "num_slots", "split", "sizes"),
    [
        (30, 8, "chunk", (4, 4, 4, 4, 4, 4, 4, 2)),
        (10, 8, "chunk", (2, 2, 2, 2, 2)),
        (10, 8, "balanced", (2, 2, 1, 1, 1, 1, 1, 1)),
        (36, 7, "balanced", (6, 5, 5, 5, 5, 5, 5)),
        (3, 8, "balanced", (1, 1, 1)),
        (0, 3, "chunk", ()),
        (0, 2, [1, 1], ()),
        (10, 3, [1, 1, 1], (4, 3, 3)),
        (10, 3, [2, 0, 3], (4, 0, 6)),
        (1, 3, [0.1, 0.5, 0.4], (0, 1, 0)),
        (2, 3, [0.1, 0.5, 0.4], (0, 1, 1)),
        (7, 2, [0.5, 0.5], (4, 3)),
    ],
)
def test_sizes(num_rows, num_slots, split, sizes):
    assert plan_sizes(num_rows, num_slots, split) == sizes


@given(st.integers(1, 200), st.integers(1, 20))
def test_chunk_is_the_rule_of_torch_chunk(num_rows, num_slots):
    pieces = torch.empty(num_rows).chunk(num_slots)
    assert plan_sizes(num_rows, num_slots) == tuple(len(piece) for piece in pieces)


weights = st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(any)


@given(st.integers(0, 200), weights)
def test_weights_share_out_all_rows_in_proportion(num_rows, weights):
    sizes = plan_sizes(num_rows, len(weights), weights)
    assert sum(sizes) == num_rows
    for size, weight in zip(sizes, weights, strict=False):
        assert abs(size - num_rows * weight / sum(weights)) < 1 + 1e-6


@pytest.mark.parametrize(
    ("num_slots", "split", "message"),
    [
        (0, "chunk", "at least one slot (slots: 0)"),
        (2, "even", "split is 'even'; it must be 'chunk', 'balanced' or one weight per slot"),
        (2, [1, 2, 3], "one weight per slot (weights: 3, slots: 2)"),
        (2, [1, -1], "finite, not negative and not all zero (split: [1.0, -1.0])"),
        (2, [1, float("nan")], "finite, not negative"),
        (2, [0, 0], "not all zero"),
    ],
)
def test_bad_splits_are_refused(num_slots, split, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_sizes(4, num_slots, split)


# --------------------------------------------------------------------------------------------------
# Plans
# --------------------------------------------------------------------------------------------------


def test_a_plan_is_plain_data():
    plan = plan_split((x, 3), {"mask": torch.ones(6, 6, dtype=torch.bool)}, num_slots=3)
    assert plan == SplitPlan(
        30,
        (10, 10, 10),
        (0, 1, 2),
        (
            LeafPlan("args[0]", "float32 [30, 5]", "cut", 0),
            LeafPlan("args[1]", "int 3", "whole"),
            LeafPlan("kwargs['mask']", "bool [6, 6]", "whole"),
        ),
    )
    assert explain_plan(plan) == (
        "args[0] float32 [30, 5]: cut on dim 0 into 10 10 10\n"
        "args[1] int 3: whole\n"
        "kwargs['mask'] bool [6, 6]: whole"
    )


def test_rows_and_slots_of_weighted_shards():
    plan = plan_split((x,), {}, num_slots=3, split=[2, 0, 1])
    assert (plan.sizes, plan.slots, plan.num_shards) == ((20, 10), (0, 2), 2)
    assert [plan.rows(k) for k in range(2)] == [(0, 20), (20, 30)]


@pytest.mark.parametrize("args", [(), (3, "a"), (torch.tensor(1.0),), (["a", "b"],), ([], {})])
def test_without_a_batch_there_is_one_call_with_everything(args):
    plan = plan_split(args, {}, num_slots=4)
    assert (plan.num_rows, plan.sizes, plan.slots, plan.num_shards) == (None, (), (0,), 1)
    assert plan.rows(0) == (0, 0)
    assert "no rows: one call, on the first slot, with everything" in explain_plan(plan)
    [(shard, kwargs)] = cut(plan, args, {})
    assert all(one is other for one, other in zip(shard, args, strict=True))
    assert kwargs == {}


def test_without_rows_there_is_one_call_too():
    plan = plan_split((torch.ones(0, 5),), {"n": 3}, num_slots=4, split="balanced")
    assert (plan.num_rows, plan.sizes, plan.slots, plan.rows(0)) == (0, (), (0,), (0, 0))


def test_the_plans_of_equal_calls_are_one_and_differ_where_the_call_does():
    def plan(*args, **kwargs):
        return plan_split(args, kwargs, num_slots=2)

    assert plan(x, {"a": y}) is plan(x.clone(), {"a": y.clone()})
    variants = [
        plan(x, y),
        plan(x, y=y),
        plan((x, y)),
        plan([x, y, 3]),
        plan({"a": x, "b": y}),
        plan({"a": x}, {"b": y}),
        plan((x,), y),
        plan(x, y.int()),
        plan(x, True),
        plan(x, 1),
        plan(x, 1.0),
        plan(x, None),
    ]
    texts = [explain_plan(plan) for plan in variants]
    assert len(set(texts)) == len(texts)


# --------------------------------------------------------------------------------------------------
# How many rows there are
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "options", "num_rows"),
    [
        ((torch.tensor(1.0), x), {}, 30),
        (({"n": 3, "x": x},), {}, 30),
        ((np.ones((7, 2)), x), {}, 30),
        ((np.ones((7, 2)), 3), {}, 7),
        ((x,), {"dim": 1}, 5),
        ((x,), {"dim": -1}, 5),
        ((torch.ones(6, 6), x), {"in_dims": {0: None}}, 30),
        ((torch.ones(2, 30, 4), x), {"in_dims": {0: 1}}, 30),
        ((["a"] * 4, 3), {"in_dims": {0: "rows"}}, 4),
        ((["a"] * 4, ("a",) * 4), {"in_dims": "rows"}, 4),
    ],
)
def test_the_first_tensor_with_the_dim_counts(args, options, num_rows):
    assert plan_split(args, {}, num_slots=2, **options).num_rows == num_rows


images = [torch.ones(3, 8 + i, 8) for i in range(4)]
boxes = [{"boxes": torch.ones(n, 4), "label": torch.tensor(1)} for n in (5, 3, 1, 2)]


@pytest.mark.parametrize(
    ("args", "num_rows", "lines"),
    [
        # differing sizes: rows
        (([torch.ones(n, 2) for n in (5, 3, 4)],), 3, ["args[0] cut by rows into 2 1"]),
        # agreeing sizes: a container, as nothing says otherwise
        (([x, x + 1],), 30, ["args[0][0] cut on dim 0 into 15 15"] * 2),
        # agreeing sizes, and another tensor decides
        ((images, torch.ones(4, 2)), 4, ["cut by rows", "cut on dim 0"]),
        ((images, torch.ones(3, 2)), 3, ["cut on dim 0"] * 5),
        ((images, torch.ones(4, 2), torch.ones(3)), 3, [*["cut on dim 0"] * 4, "whole", "cut on"]),
        # agreeing sizes, and a ragged list of the same length decides
        ((images, boxes), 4, ["cut by rows"] * 2),
        ((boxes, images), 4, ["cut by rows"] * 2),
        # 0-dim tensors have no say beside others
        (([x, torch.tensor(2.0)],), 30, ["cut on dim 0", "whole"]),
        (([x[:2], torch.tensor(2.0)], 1), 2, ["cut on dim 0", "whole", "whole"]),
    ],
)
def test_a_list_of_tensors_is_rows_or_a_container(args, num_rows, lines):
    plan = plan_split(args, {}, num_slots=2)
    assert plan.num_rows == num_rows
    told = explain_plan(plan).splitlines()
    assert len(told) == len(lines)
    for line, part in zip(told, lines, strict=True):
        assert part.removeprefix("args[0] ").removeprefix("args[0][0] ") in line


def test_a_packed_sequence_counts_its_sequences_whatever_dim_is():
    packed = pack_sequence([torch.ones(n, 2) for n in (3, 1, 2)], enforce_sorted=False)
    assert explain(packed, torch.ones(4, 3), ["a"] * 3, dim=1).splitlines() == [
        "args[0] PackedSequence of 3: cut by rows into 1 1 1",
        "args[1] float32 [4, 3]: cut on dim 1 into 1 1 1",
        "args[2] list of 3: cut by rows into 1 1 1",
    ]


def test_in_dims_settles_an_ambiguous_list():
    assert "args[0] list of 4: cut by rows into 2 2" in explain(
        images, num_slots=2, in_dims={0: "rows"}
    )


# --------------------------------------------------------------------------------------------------
# Leaf by leaf
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.ones(30), "float32 [30]: cut on dim 0 into 10 10 10"),
        (torch.ones(7, 30), "float32 [7, 30]: whole"),
        (torch.tensor(3), "int64 []: whole"),
        (["a"] * 30, "list of 30: cut by rows into 10 10 10"),
        (["a"] * 29, "list of 29: whole"),
        (list(range(30)), "list of 30: cut by rows into 10 10 10"),
        ([{"id": 1}] * 30, "list of 30: cut by rows into 10 10 10"),
        ([torch.ones(2)] * 30, "list of 30: cut by rows into 10 10 10"),
        ([torch.tensor(1)] * 30, "list of 30: cut by rows into 10 10 10"),
        (Items(["a"] * 30), "Items of 30: cut by rows into 10 10 10"),
        (("a",) * 30, "tuple of 30: cut by rows into 10 10 10"),
        ((1,) * 30, "tuple of 30: whole"),
        (Pair("a", "b"), "Pair of 2: whole"),
        (deque(["a"] * 30), "deque of 30: whole"),
        ("x" * 30, "str 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx': whole"),
        (np.ones((30, 2)), "numpy float64 [30, 2]: cut on dim 0 into 10 10 10"),
        (np.ones(3), "numpy float64 [3]: whole"),
        ([], "list of 0: whole"),
        (None, "None: whole"),
        ({"a": 1, "b": (2, 3)}, "dict of 2: whole"),
        ({1, 2}, "set of 2: whole"),
        (torch.Size([30, 5]), "Size of 2: whole"),
        (torch.eye(30).to_sparse(), "sparse_coo float32 [30, 30]: cut on dim 0 into 10 10 10"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_the_default_rules(value, told):
    assert explain(x, value).splitlines()[1] == f"args[1] {told}"


def test_containers_are_told_leaf_by_leaf_where_they_hold_tensors():
    value = {"x": [x, (y, 3)], "mask": torch.ones(6, 6), "names": ["a"] * 30, "n": {"a": 1}}
    assert explain(value, kwargs={"o": Output(first=y, second=1)}).splitlines() == [
        "args[0]['x'][0] float32 [30, 5]: cut on dim 0 into 10 10 10",
        "args[0]['x'][1][0] int64 [30]: cut on dim 0 into 10 10 10",
        "args[0]['x'][1][1] int 3: whole",
        "args[0]['mask'] float32 [6, 6]: whole",
        "args[0]['names'] list of 30: cut by rows into 10 10 10",
        "args[0]['n'] dict of 1: whole",
        "kwargs['o']['first'] int64 [30]: cut on dim 0 into 10 10 10",
        "kwargs['o']['second'] int 1: whole",
        "kwargs['o']['third'] None: whole",
    ]


def test_a_container_in_which_nothing_is_cut_is_the_identical_object():
    extras, deep, queue = [], {"a": [torch.ones(3), {"n": 3}]}, deque([1, 2])
    for column, value in zip(
        cut_args(x, extras, deep, queue)[1:], (extras, deep, queue), strict=True
    ):
        assert all(piece is value for piece in column)


def test_rows_of_lists_tuples_and_arrays_go_with_the_rows_of_the_tensor():
    names = [f"row {i}" for i in range(30)]
    tensors, lists, tuples, arrays = cut_args(x, names, tuple(names), np.arange(30))
    for k, (start, stop) in enumerate([(0, 10), (10, 20), (20, 30)]):
        assert torch.equal(tensors[k], x[start:stop])
        assert lists[k] == names[start:stop]
        assert tuples[k] == tuple(names[start:stop])
        assert arrays[k].tolist() == list(range(start, stop))


def test_keyword_arguments_are_cut_and_each_shard_has_its_own_dict():
    plan = plan_split((), {"x": x, "n": 3}, num_slots=2)
    (args, first), (_, second) = cut(plan, (), {"x": x, "n": 3})
    assert args == ()
    assert torch.equal(torch.cat([first["x"], second["x"]]), x)
    assert (first["n"], second["n"]) == (3, 3)
    assert first is not second


def test_pieces_are_views_with_the_strides_of_the_tensor():
    value = torch.randn(6, 3, 4, 4).to(memory_format=torch.channels_last)
    (pieces,) = cut_args(value)
    for piece in pieces:
        assert piece.is_contiguous(memory_format=torch.channels_last)
        assert piece.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()


@pytest.mark.parametrize("dim", [0, 1])
def test_a_tensor_without_gradient_is_cut_into_views_that_can_be_written(dim):
    value, weight = torch.ones(4, 4), torch.full((), 2.0, requires_grad=True)
    (pieces,) = cut_args(value, num_slots=2, dim=dim)
    pieces[0].mul_(weight)
    assert value.sum().item() == 24


def test_a_tensor_in_a_graph_is_cut_by_one_node():
    value = torch.randn(6, 2, requires_grad=True)
    (pieces,) = cut_args(value)
    assert len({piece.grad_fn for piece in pieces}) == 1
    gradient = torch.randn(6, 2)
    torch.autograd.backward(pieces, gradient.split(2))
    assert torch.equal(value.grad, gradient)


def test_one_shard_gets_the_arguments_themselves():
    (shard, _) = cut(plan_split((x, y), {}, num_slots=1), (x, y), {})[0]
    assert shard[0] is x
    assert shard[1] is y


def test_dim_counts_for_every_tensor_and_may_be_negative():
    first, second = cut_args(torch.ones(2, 6), torch.ones(3, 4, 6), dim=-1)
    assert [piece.shape for piece in first] == [(2, 2)] * 3
    assert [piece.shape for piece in second] == [(3, 4, 2)] * 3


# --------------------------------------------------------------------------------------------------
# in_dims
# --------------------------------------------------------------------------------------------------

hidden = torch.zeros(2, 30, 8)
names = ("x", "h")


@pytest.mark.parametrize(
    "in_dims", [{"h": 1}, {1: 1}, [0, 1], (0, 1), {"x": 0, "h": 1}, {0: 0, "h": 1}]
)
def test_a_dim_by_name_by_position_or_in_order(in_dims):
    pieces = cut_args(x, hidden, in_dims=in_dims, parameter_names=names)
    assert [piece.shape for piece in pieces[1]] == [(2, 10, 8)] * 3
    assert [piece.shape for piece in pieces[0]] == [(10, 5)] * 3


def test_a_dim_by_name_of_a_keyword_argument():
    told = explain(x, kwargs={"h": hidden}, in_dims={1: -2}, parameter_names=names)
    assert "kwargs['h'] float32 [2, 30, 8]: cut on dim 1 into 10 10 10" in told
    told = explain(x, kwargs={"more": hidden}, in_dims={"more": 1}, parameter_names=names)
    assert "kwargs['more'] float32 [2, 30, 8]: cut on dim 1 into 10 10 10" in told


def test_none_gives_a_whole_argument():
    told = explain(x, {"a": y, "b": [y]}, in_dims=[0, None])
    assert told.splitlines()[1] == "args[1] dict of 2: whole"


def test_a_dim_for_everything():
    told = explain(torch.ones(2, 30), [torch.ones(3, 30), torch.tensor(1.0)], 3, None, in_dims=1)
    assert [line.split(": ")[1] for line in told.splitlines()] == [
        *["cut on dim 1 into 10 10 10"] * 2,
        *["whole"] * 3,
    ]


def test_specs_mirror_the_argument_and_are_silent_where_they_do_not_speak():
    batch = {"x": x, "state": (hidden, torch.ones(30)), "p": Plain(hidden, y), "z": y}
    in_dims = [{"state": [1], "p": {"first": 1}, "z": None, "absent today": 1}]
    assert explain(batch, in_dims=in_dims).splitlines() == [
        "args[0]['x'] float32 [30, 5]: cut on dim 0 into 10 10 10",
        "args[0]['state'][0] float32 [2, 30, 8]: cut on dim 1 into 10 10 10",
        "args[0]['state'][1] float32 [30]: cut on dim 0 into 10 10 10",
        "args[0]['p'].first float32 [2, 30, 8]: cut on dim 1 into 10 10 10",
        "args[0]['p'].second int64 [30]: cut on dim 0 into 10 10 10",
        "args[0]['p'].derived None: whole",
        "args[0]['z'] int64 [30]: whole",
    ]


def test_a_dim_given_for_an_absent_optional_argument_is_fine():
    assert explain(x, None, in_dims={"h": 1}, parameter_names=names).endswith("args[1] None: whole")
    assert plan_split((x,), {}, num_slots=2, in_dims={"h": 1}, parameter_names=names).num_rows == 30


def test_rows_cuts_tuples_deques_and_arrays_by_length():
    sizes, queue, array = cut_args((3, 4, 5), deque([1, 2, 3]), np.arange(3), in_dims=["rows"] * 3)
    assert sizes == ((3,), (4,), (5,))
    assert queue == (deque([1]), deque([2]), deque([3]))
    assert [piece.tolist() for piece in array] == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("args", "in_dims", "message"),
    [
        (
            (x, hidden),
            {"h": 2},
            "args[1] float32 [2, 30, 8] has 8 rows on dim 2, but the batch has 30 rows (counted on "
            "args[0] float32 [30, 5]); pass in_dims={'h': <the dim that counts rows>}, or "
            "in_dims={'h': None} to give it whole to every shard",
        ),
        ((x, y), {"h": 1}, "args[1] int64 [30] has no dim 1, but the batch has 30 rows"),
        ((torch.ones(3),), {"x": 1}, "args[0] float32 [3] has no dim 1, but nothing else has rows"),
        ((x, torch.eye(6)), 0, "args[1] float32 [6, 6] has 6 rows on dim 0, but the batch has 30"),
        ((x, ["a"] * 4), {"h": "rows"}, "args[1] list of 4 has 4 rows, but the batch has 30 rows"),
        ((x, {"a": 1}), {"h": "rows"}, "args[1] dict of 1 cannot be cut by 'rows', but"),
        ((x, y), {"h": "rows"}, "args[1] int64 [30] is a tensor, whose rows are counted by a dim"),
        ((x, 3), {"h": 0}, "args[1] int 3 has no dim 0, but the batch has 30 rows"),
        ((x, ["a", "b"]), {"h": 0}, "args[1] list of 2 holds nothing with dim 0"),
        (
            (x, {"m": torch.eye(6)}),
            {"h": {"m": 0}},
            "args[1]['m'] float32 [6, 6] has 6 rows on dim 0, but the batch has 30 rows (counted "
            "on args[0] float32 [30, 5]); pass in_dims={'h': {'m': <the dim that counts rows>}}",
        ),
    ],
)
def test_a_spec_that_does_not_fit_the_batch_is_refused(args, in_dims, message):
    with pytest.raises(SplitError, match=re.escape(message)):
        plan_split(args, {}, num_slots=3, in_dims=in_dims, parameter_names=names)


@pytest.mark.parametrize(
    ("in_dims", "message"),
    [
        (
            {"hidden": 1},
            "in_dims speaks about 'hidden', which is no parameter of this call; its parameters are "
            "'x', 'h', 'mask' and its positions 0 to 1",
        ),
        ({2: 1}, "in_dims speaks about 2, which is no parameter of this call"),
        ([0, 0, 0], "in_dims speaks about 2, which is no parameter of this call"),
        ({"h": 1, 1: 0}, "in_dims speaks twice about 'h': 'h' and 1"),
        ({"x": {"a": 1}}, "in_dims mirrors a container at args[0] float32 [30, 5], a leaf"),
        ({"h": [1, 1, 1]}, "in_dims gives a list of 3 for args[1], which has 'left', 'right'"),
        (
            {"h": {"middle": 1}},
            "in_dims speaks about 'middle' in args[1], which has 'left', 'right'",
        ),
    ],
)
def test_a_spec_for_what_the_call_does_not_have_is_refused(in_dims, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_split(
            (x, Pair(y, y)), {"mask": y}, num_slots=3, in_dims=in_dims, parameter_names=names
        )


@pytest.mark.parametrize("in_dims", [1.5, True, "row", {"x": "mean"}, [0, {"a": object()}]])
def test_a_spec_of_the_wrong_type_is_refused_at_construction(in_dims):
    with pytest.raises(TypeError, match=r"in_dims.* it must be a dim, None, 'rows', or a dict"):
        check_in_dims(in_dims)


@pytest.mark.parametrize("in_dims", [None, -1, "rows", {"x": [0, None, {"a": "rows"}], 1: 2}, ()])
def test_a_well_formed_spec_is_accepted(in_dims):
    check_in_dims(in_dims)


# --------------------------------------------------------------------------------------------------
# What cannot be cut
# --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse CSC tensor support:UserWarning")
def test_a_layout_without_a_cut_is_refused_by_name():
    rows = torch.eye(4).to_sparse_csc()
    with pytest.raises(SplitError, match=r"args\[1\] sparse_csc float32 \[4, 4\] has layout"):
        plan_split((torch.ones(4), rows), {}, num_slots=2)


def test_a_nested_tensor_on_another_dim_is_refused_by_name():
    nested = torch.nested.as_nested_tensor([torch.ones(2, 3)] * 4, layout=torch.jagged)
    with pytest.raises(SplitError, match=r"args\[1\] nested float32 of 4 can be cut on dim 0 only"):
        plan_split((torch.ones(2, 4), nested), {}, num_slots=2, dim=1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((x[:20],), r"args\[0\] was float32 \[30, 5\] and is float32 \[20, 5\]"),
        ((x, x), r"it has no args\[1\]"),
    ],
)
def test_a_plan_for_other_arguments_is_refused(args, message):
    plan = plan_split((x,), {}, num_slots=2)
    with pytest.raises(SplitError, match=f"the plan was made for other arguments: {message}"):
        cut(plan, args, {})


def test_a_container_that_holds_itself_is_an_error():
    loop = [x]
    loop.append(loop)
    with pytest.raises(ValueError, match="does it hold itself"):
        plan_split((x, loop), {}, num_slots=2)


# --------------------------------------------------------------------------------------------------
# Registered batch types
# --------------------------------------------------------------------------------------------------


class Bag:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)


@pytest.fixture
def bags(monkeypatch):
    monkeypatch.setattr(tree, "_batch_types", {})
    tree.register_batch_type(
        Bag,
        split=lambda bag, sizes: [Bag(piece) for piece in torch.tensor(bag.rows).split(sizes)],
        merge=lambda bags: Bag([row for bag in bags for row in bag.rows]),
    )


@pytest.mark.usefixtures("bags")
def test_a_registered_batch_counts_and_is_cut_by_its_own_function():
    assert explain(Bag([1, 2, 3]), ["a", "b", "c"]).splitlines() == [
        "args[0] Bag of 3: cut by rows into 1 1 1",
        "args[1] list of 3: cut by rows into 1 1 1",
    ]
    (pieces,) = cut_args(Bag([1, 2, 3]))
    assert [piece.rows.tolist() for piece in pieces] == [[1], [2], [3]]


@pytest.mark.usefixtures("bags")
def test_a_registered_split_that_returns_too_few_is_named():
    tree.register_batch_type(Bag, split=lambda bag, sizes: [bag], merge=lambda bags: bags[0])
    message = r"args\[0\] Bag of 3 cannot be cut: the split registered for Bag returned 1 objects"
    with pytest.raises(SplitError, match=message):
        cut_args(Bag([1, 2, 3]))


def test_order_of_keys_and_types_survive():
    value = OrderedDict(b=x, a=Pair(y, Plain(x)))
    (pieces,) = cut_args(value, num_slots=2)
    assert [type(piece) for piece in pieces] == [OrderedDict] * 2
    assert list(pieces[1]) == ["b", "a"]
    assert torch.equal(pieces[1]["a"].right.first, x[15:])
