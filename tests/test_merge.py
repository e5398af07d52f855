"""Merging: the rules, every refusal, and that it undoes cutting."""

import re
from collections import OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from batches import CONTAINERS, Output, Pair, Plain, Registered, assert_same, trees
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from samestep import tree
from samestep.errors import MergeError
from samestep.merge import check_out_dims, merge
from samestep.reduce import naive_sum
from samestep.split import cut, plan_split

ones = torch.ones


def scalars(*values):
    return [torch.tensor(value) for value in values]


def shapes(value):
    return list(value.shape)


# --------------------------------------------------------------------------------------------------
# Merging undoes cutting
# --------------------------------------------------------------------------------------------------

splits = st.sampled_from(["chunk", "balanced", "weights"])


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 17).flatmap(lambda n: st.tuples(st.just(n), trees(n))),
    st.integers(1, 8),
    splits,
    st.data(),
)
def test_merging_what_was_cut_gives_it_back(case, num_slots, split, data):
    num_rows, batch = case
    if split == "weights":
        weight = st.integers(0, 5)
        split = data.draw(st.lists(weight, min_size=num_slots, max_size=num_slots).filter(any))
    call = (torch.randn(num_rows, 2), batch), {"again": batch}  # the first tensor says what B is
    plan = plan_split(*call, num_slots=num_slots, split=split)
    shards = cut(plan, *call)
    assert plan.num_rows == num_rows
    assert len(shards) == plan.num_shards
    assert_same(merge(shards, plan.sizes or (0,)), call)


@pytest.mark.parametrize("num_slots", [2, 3, 8])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_gradients_through_cut_and_merge_are_those_of_the_whole(kind, num_slots):
    one = torch.randn(7, 3, requires_grad=True)
    two = torch.randn(7, requires_grad=True)
    batch = CONTAINERS[kind](one, [two])
    plan = plan_split((batch,), {}, num_slots=num_slots)
    merged = merge([args[0] for args, _ in cut(plan, (batch,), {})], plan.sizes)
    leaves = [x for _, x in tree.iter_leaves(merged) if isinstance(x, torch.Tensor)]
    weights = [torch.randn_like(leaf) for leaf in leaves]
    got = torch.autograd.grad(leaves, [one, two], weights)
    assert all(torch.equal(g, w) for g, w in zip(got, weights, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_merged_loss_has_the_value_and_gradient_of_the_whole_batch(reduction):
    x = torch.randn(7, 3, requires_grad=True, dtype=torch.float64)
    loss = getattr(x.sin(), reduction)()
    plan = plan_split((x,), {}, num_slots=3)
    losses = [getattr(args[0].sin(), reduction)() for args, _ in cut(plan, (x,), {})]
    merged = merge(losses, plan.sizes, reduction=reduction)
    torch.testing.assert_close(merged, loss)
    gradients = [torch.autograd.grad(value, x)[0] for value in (merged, loss)]
    torch.testing.assert_close(*gradients)


# --------------------------------------------------------------------------------------------------
# Tensors
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "rows", "options", "shape"),
    [
        # 1. rows on dim
        ([(4, 5), (4, 5), (2, 5)], (4, 4, 2), {}, [10, 5]),
        ([(4, 4), (4, 4)], (4, 4), {}, [8, 4]),
        ([(5, 4), (5, 2)], (4, 2), {"dim": 1}, [5, 6]),
        ([(5, 4), (5, 2)], (4, 2), {"dim": -1}, [5, 6]),
        # 2. rows on the one other dim that can have them
        ([(2, 4, 8), (2, 3, 8)], (4, 3), {}, [2, 7, 8]),
        ([(2, 4, 8), (2, 4, 8)], (4, 4), {}, [2, 8, 8]),
        ([(4,), (3,)], (4, 3), {"dim": 1}, [7]),
        ([(7, 3, 3), (7, 2, 3)], (3, 2), {}, [7, 5, 3]),
        # 3. another number of things per row
        ([(9, 4), (7, 4)], (4, 4), {}, [16, 4]),
        ([(9, 4), (0, 4)], (2, 1), {}, [9, 4]),
    ],
)
def test_the_dim_that_has_the_rows(parts, rows, options, shape):
    values = [torch.randn(part) for part in parts]
    assert shapes(merge(values, rows, **options)) == shape
    arrays = merge([value.numpy() for value in values], rows, **options)
    assert isinstance(arrays, np.ndarray)
    assert shapes(arrays) == shape


def test_rows_come_back_in_order_on_the_found_dim():
    whole = torch.arange(42).view(2, 7, 3)
    assert torch.equal(merge(list(whole.split([4, 3], 1)), (4, 3)), whole)


def test_scalars_are_weighted_by_rows_or_added():
    losses = scalars(1.0, 2.0, 4.0)
    assert merge(losses, (2, 1, 1)).item() == 2.0
    assert merge(losses, (2, 1, 1), reduction="sum").item() == 7.0
    assert merge([1j * loss for loss in losses], (2, 1, 1)).item() == 2j
    assert merge([np.array(1.0), np.array(4.0)], (2, 1)) == 2.0


def test_the_caller_owns_the_order_of_additions():
    seen = []

    def total(tensors):
        seen.append([tensor.item() for tensor in tensors])
        return naive_sum(tensors[::-1])

    merge(scalars(1.0, 2.0), (1, 3), total=total)
    assert seen == [[0.25, 1.5]]
    merge([{"a": loss} for loss in scalars(1.0, 2.0)], (1, 3), out_dims="sum", total=total)
    assert seen[1] == [1.0, 2.0]


def test_equal_integers_and_flags_are_kept():
    assert merge(scalars(3, 3), (2, 1)).item() == 3
    assert merge(scalars(True, True), (2, 1)).dtype == torch.bool


def test_what_all_shards_stand_for_is_asked_first():
    weight = nn.Parameter(ones(4, 2))
    asked = []

    def whole(values):
        asked.append(values)
        return weight if values[0].shape == weight.shape else None

    aliases = [weight.detach().view_as(weight) for _ in range(2)]
    outputs = [{"w": aliases[k], "y": ones(2 - k, 5)} for k in range(2)]
    merged = merge(outputs, (2, 1), whole=whole)
    assert merged["w"] is weight
    assert shapes(merged["y"]) == [3, 5]
    assert len(asked) == 2
    assert merge(outputs, (2, 1), whole=whole, out_dims={"w": 0})["w"].shape == (8, 2)


@pytest.mark.parametrize("value", [ones(2, 3), [1, 2], {"a": ones(2)}, "text", {1, 2}, object()])
def test_what_is_the_identical_object_in_all_shards_is_itself(value):
    assert merge([value, value], (2, 2)) is value
    assert merge([{"in": value}, {"in": value}], (2, 2))["in"] is value


@pytest.mark.parametrize("output", [ones(3), {"a": [ones(2), None]}, Pair(1, ones(()))])
def test_one_shard_is_returned_itself(output):
    assert merge([output], (3,)) is output
    assert merge([output], (3,), device="cpu") is output
    assert merge([output], (0,), out_dims="mean") is output


def test_tensors_land_on_the_device_asked_for():
    outputs = [{"y": ones(2, 3), "loss": torch.tensor(1.0), "n": ["a", ones(3)]} for _ in range(2)]
    merged = merge(outputs, (2, 2), device="meta")
    tensors = [x for _, x in tree.iter_leaves(merged) if isinstance(x, torch.Tensor)]
    assert [x.device.type for x in tensors] == ["meta"] * 3
    assert shapes(merge([ones(2, 3), ones(1, 3)], (2, 1), device="meta")) == [3, 3]
    assert merge([ones(2)], (2,), device="meta").device.type == "meta"
    mixed = [ones(2, 3).to("meta"), ones(1, 3)]
    assert merge(mixed, (2, 1)).device.type == "meta"


# --------------------------------------------------------------------------------------------------
# Containers and objects
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_container_keeps_its_type(kind):
    make = CONTAINERS[kind]
    merged = merge([make(ones(2, 1), [ones(2), "x"]), make(ones(1, 1), [ones(1), "x"])], (2, 1))
    assert_same(merged, make(ones(3, 1), [ones(3), "x"]))


def test_the_return_types_of_torch_are_kept():
    x = torch.randn(5, 4)
    merged = merge([torch.max(part, 1) for part in x.split([3, 2])], (3, 2))
    assert type(merged) is torch.return_types.max
    assert_same(merged.values, x.max(1).values)


def test_keys_in_another_order_are_matched_and_the_first_order_is_kept():
    one, two = OrderedDict(a=ones(2), b=1), OrderedDict(b=1, a=ones(1))
    merged = merge([one, two], (2, 1))
    assert list(merged) == ["a", "b"]
    assert shapes(merged["a"]) == [3]


@pytest.mark.parametrize(
    ("outputs", "rows", "merged"),
    [
        ([["a", "b"], ["c"]], (2, 1), ["a", "b", "c"]),
        ([("a", "b"), ("c",)], (2, 1), ("a", "b", "c")),
        ([[{"id": 1}] * 2, [{"id": 1}]], (2, 1), [{"id": 1}] * 3),
        ([[1, 2], [1, 2]], (3, 3), [1, 2]),
        ([(2, 3), (2, 3)], (2, 2), (2, 3)),
        ([[], []], (2, 1), []),
        ([deque([1]), deque([1])], (1, 1), deque([1])),
        ([None, None], (2, 1), None),
        (["a", "a"], (2, 1), "a"),
        ([float("nan"), float("nan")], (2, 1), None),
        ([{1, 2}, {2, 1}], (2, 1), {1, 2}),
        ([torch.float32, torch.float32], (2, 1), torch.float32),
    ],
)
def test_lists_of_rows_are_put_end_to_end_and_equal_objects_kept(outputs, rows, merged):
    got = merge(outputs, rows)
    assert got != got if merged is None and got is not None else got == merged
    assert type(got) is type(outputs[0])


def test_detections_are_put_end_to_end():
    images = [[{"boxes": ones(n, 4)} for n in counts] for counts in ((5, 3), (2,))]
    assert [shapes(one["boxes"]) for one in merge(images, (2, 1))] == [[5, 4], [3, 4], [2, 4]]


def test_a_list_of_columns_merges_element_by_element():
    outputs = [[ones(2, 5), ones(2, 7), torch.tensor(1.0)] for _ in range(2)]
    merged = merge(outputs, (2, 2))
    assert [shapes(x) for x in merged] == [[4, 5], [4, 7], []]
    merged = merge([[ones(2, 5), torch.tensor(k)] for k in (1.0, 2.0)], (2, 2))
    assert [shapes(x) for x in merged] == [[4, 5], []]


def test_packed_nested_and_sparse_outputs():
    rows = [torch.randn(n, 2) for n in (2, 3, 1)]
    packed = [pack_sequence(part, enforce_sorted=False) for part in (rows[:2], rows[2:])]
    assert_same(merge(packed, (2, 1)), pack_sequence(rows, enforce_sorted=False))
    nested = [torch.nested.as_nested_tensor(p, layout=torch.jagged) for p in (rows[:2], rows[2:])]
    assert [shapes(part) for part in merge(nested, (2, 1)).unbind()] == [[2, 2], [3, 2], [1, 2]]
    dense = torch.eye(5)
    merged = merge([part.to_sparse() for part in dense.split([3, 2])], (3, 2))
    assert torch.equal(merged.to_dense(), dense)


def test_a_registered_batch_is_merged_by_its_own_function(monkeypatch):
    class Bag(list):
        pass

    monkeypatch.setattr(tree, "_batch_types", {})
    tree.register_batch_type(
        Bag, split=lambda b, s: [], merge=lambda bags: Bag(row for bag in bags for row in bag)
    )
    merged = merge([{"bag": Bag([1])}, {"bag": Bag([2])}], (1, 1))
    assert type(merged["bag"]) is Bag
    assert merged["bag"] == [1, 2]


# --------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------

Named = namedtuple("Named", "a b")
DIM_ADVICE = "<the dim that counts rows>}, or 'mean', 'sum', 'first', 'list'"


@pytest.mark.parametrize(
    ("outputs", "rows", "message"),
    [
        (
            [{"boxes": [ones(2, 4), 1]}, {"boxes": [ones(1, 5), 1]}],
            (2, 1),
            "output['boxes'][0] has its rows on dim 0, but its other dims differ: "
            "shard 0 (2 rows): float32 [2, 4]; shard 1 (1 rows): float32 [1, 5]; "
            "pass out_dims={'boxes/0': " + DIM_ADVICE,
        ),
        (
            [ones(7, 3, 3), ones(7, 3, 3)],
            (3, 3),
            "output may have its rows on any of the dims [1, 2]: shard 0 (3 rows): float32 "
            "[7, 3, 3]; shard 1 (3 rows): float32 [7, 3, 3]; pass out_dims=<the dim",
        ),
        (
            [ones(9, 4), ones(7, 5)],
            (2, 1),
            "output has no dim that counts rows, and its dims beside dim 0 differ: shard 0",
        ),
        ([ones(9), ones(7)], (2, 1), None),
        ([(ones(9),), (ones(7),)], (2, 1), None),
        ([ones(2), ones(1, 1)], (2, 1), "output has different numbers of dims"),
        ([ones(2), torch.eye(1).to_sparse()], (2, 1), "output has different layouts"),
        (
            [Named(*scalars(1, 3)), Named(*scalars(1, 4))],
            (2, 1),
            "output.b differs between shards: shard 0 (2 rows): int64 [] 3; shard 1 (1 rows): "
            "int64 [] 4; pass out_dims={'b': 'mean'} (weighted by rows), 'sum', 'first' or 'list'",
        ),
        (
            [3, 4],
            (2, 1),
            "output differs between shards: shard 0 (2 rows): int 3; shard 1 (1 rows): int 4; pass "
            "out_dims='mean' (weighted by rows), 'sum', 'first' or 'list'",
        ),
        (["a", "b"], (2, 1), "output differs between shards: shard 0 (2 rows): str 'a'; shard 1"),
        (
            [{"h": None}, {"h": ones(1)}],
            (2, 1),
            "output['h'] is None in some shards only: shard 0 (2 rows): None; shard 1 (1 rows): "
            "float32 [1]; pass out_dims={'h': 'list'} for one value per shard, or 'first'",
        ),
        ([ones(2), None], (2, 1), "output is None in some shards only"),
        ([[1], (1,)], (3, 3), "output is of different types: shard 0 (3 rows): list of 1; shard 1"),
        ([1, True], (3, 3), "output is of different types: shard 0 (3 rows): int 1; shard 1"),
        ([ones(2), 1.0], (2, 1), "output is of different types"),
        ([[1, 2], [1]], (3, 3), "output has different lengths: shard 0 (3 rows): list of 2"),
        (
            [{"a": 1}, {"a": 1, "b": 2}],
            (2, 1),
            "output has 'b' in shard 1 but not in shard 0: shard 0 (2 rows): dict of 1; shard 1",
        ),
        ([{"a": 1}, {"a": 1}, {}], (2, 1, 1), "output has 'a' in shard 0 but not in shard 2"),
        ([object(), object()], (2, 1), "output differs between shards: shard 0 (2 rows): object;"),
        ([{1}, {2}], (2, 1), "output differs between shards: shard 0 (2 rows): set of 1"),
        (
            [np.array(1), np.array(2)],
            (2, 1),
            "output differs between shards: shard 0 (2 rows): num",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_path_values_and_remedy(outputs, rows, message):
    if message is None:
        merge(outputs, rows)
        return
    with pytest.raises(MergeError, match=re.escape(message)):
        merge(outputs, rows)


def test_no_dim_is_a_refusal_of_its_own():
    with pytest.raises(MergeError, match="output has no dim 1, and no other that counts rows"):
        merge([ones(7), ones(7)], (2, 1), dim=1)


def test_a_pytree_type_built_differently_is_refused(monkeypatch):
    class Graph:
        def __init__(self, x, kind):
            self.x, self.kind = x, kind

    torch.utils._pytree.register_pytree_node(
        Graph, lambda g: ([g.x], g.kind), lambda c, kind: Graph(c[0], kind)
    )
    assert merge([Graph(ones(2), "a"), Graph(ones(1), "a")], (2, 1)).kind == "a"
    with pytest.raises(MergeError, match="output was built with 'a' and 'b'"):
        merge([Graph(ones(2), "a"), Graph(ones(1), "b")], (2, 1))


@pytest.mark.parametrize(
    ("outputs", "rows", "options", "message"),
    [
        ([1], (1, 2), {}, r"one output per shard \(outputs: 1, shards: 2\)"),
        ([], (), {}, "one output per shard"),
        ([1], (1,), {"reduction": "max"}, "reduction is 'max'; it must be 'mean' or 'sum'"),
    ],
)
def test_wrong_arguments_are_refused(outputs, rows, options, message):
    with pytest.raises(ValueError, match=message):
        merge(outputs, rows, **options)


def test_a_container_that_holds_itself_is_an_error():
    loops = [[1], [1]]
    for loop in loops:
        loop.append(loop)
    with pytest.raises(ValueError, match="does it hold itself"):
        merge(loops, (3, 3))


# --------------------------------------------------------------------------------------------------
# out_dims
# --------------------------------------------------------------------------------------------------


def two_shards():
    return [
        {
            "aux": {"loss": torch.tensor(float(k)), "n": k},
            "hidden": [ones(2, 3), ones(3, 2)],
            "y": k,
        }
        for k in (1, 3)
    ]


def test_out_dims_by_path_and_as_a_prefix_mean_the_same():
    for out_dims in (
        {"aux/loss": "sum", "aux/n": "mean", "hidden/0": 1, "y": "list"},
        {"aux": {"loss": "sum", "n": "mean"}, "hidden": [1], "y": "list"},
        {"aux/loss": "sum", "aux": {"n": "mean"}, "hidden": {0: 1}, "y": "list"},
        {"aux": {"loss": "sum", "n": "mean"}, "hidden": {"0": 1}, "y": "list"},
    ):
        merged = merge(two_shards(), (3, 3), out_dims=out_dims)
        assert merged["aux"]["loss"].item() == 4
        assert merged["aux"]["n"] == 2.0
        assert shapes(merged["hidden"][0]) == [2, 6]
        assert shapes(merged["hidden"][1]) == [6, 2]
        assert merged["y"] == [1, 3]


def test_a_word_or_dim_for_a_container_means_what_is_in_it():
    outputs = [{"a": ones(2, 3), "b": (k, "text"), "c": torch.tensor(k)} for k in (1.0, 3.0)]
    merged = merge(outputs, (3, 1), out_dims="mean")
    assert (shapes(merged["a"]), merged["b"], merged["c"].item()) == ([2, 3], (1.5, "text"), 1.5)
    merged = merge(outputs, (3, 1), out_dims="sum")
    assert (merged["a"].sum().item(), merged["b"]) == (12, (4, "text"))
    assert merge(outputs, (3, 1), out_dims="first") is outputs[0]
    assert merge(outputs, (3, 1), out_dims="list") == outputs
    merged = merge([{"a": o["a"], "c": o["c"]} for o in outputs], (3, 1), out_dims=1)
    assert (shapes(merged["a"]), merged["c"].item()) == ([2, 6], 1.5)
    merged = merge(
        [Output(first=ones(3, 1)), Output(first=ones(1, 1))], (3, 1), out_dims={"first": 0}
    )
    assert shapes(merged.first) == [4, 1]
    merged = merge([Plain(ones(2, 3)), Plain(ones(2, 1))], (3, 1), out_dims={"first": -1})
    assert shapes(merged.first) == [2, 4]


def test_out_dims_hold_for_one_shard_too():
    assert merge([3], (2,), out_dims="list") == [3]
    with pytest.raises(ValueError, match="out_dims speaks about 'lost'"):
        merge(two_shards()[:1], (2,), out_dims={"lost": "sum"})


@pytest.mark.parametrize(
    ("out_dims", "message"),
    [
        (
            {"aux/lost": "sum"},
            "out_dims speaks about 'lost' in output['aux'], which has 'loss', 'n'",
        ),
        (
            {"lost": "sum"},
            "out_dims speaks about 'lost' in output, which has 'aux/loss', 'aux/n', 'hidden/0', "
            "'hidden/1', 'y'",
        ),
        ([0, 0], "out_dims speaks about a list of 2 in output, which has 'aux/loss'"),
        ({"hidden": [0, 0, 0]}, "out_dims speaks about a list of 3"),
        ({"hidden/2": 0}, "out_dims speaks about '2' in output['hidden'], which has '0', '1'"),
        (
            {"y": {"a": 0}},
            "out_dims mirrors a container at output['y'], where the output has a value of type int",
        ),
        (
            {"hidden/0/x": 0},
            "out_dims mirrors a container at output['hidden'][0], where the output has a",
        ),
        ({"aux": "sum", "aux/loss": "mean"}, "out_dims speaks twice about 'aux/loss'"),
    ],
)
def test_a_path_that_the_output_does_not_have_is_refused(out_dims, message):
    alike = [two_shards()[0], two_shards()[0]]
    with pytest.raises(ValueError, match=re.escape(message)):
        merge(alike, (3, 3), out_dims=out_dims)


@pytest.mark.parametrize(
    ("outputs", "out_dims", "message"),
    [
        ([ones(2), ones(1)], 1, "output has no dim 1: shard 0 (2 rows): float32 [2]"),
        ([{"a": ones(())}, {"a": ones(())}], {"a": 0}, "output['a'] has no dim 0"),
        ([ones(2, 3), ones(1, 4)], 0, "output cannot be joined on dim 0, its other dims differ"),
        ([ones(2), ones(1)], "mean", "output cannot be merged by 'mean', its shapes differ: shard"),
        (["a", "a "], "sum", "output is a str, which 'sum' cannot merge"),
        ([Registered("a", 1), Registered("b", 1)], "sum", "output[0] differs between shards"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused(outputs, out_dims, message):
    with pytest.raises(MergeError, match=re.escape(message)):
        merge(outputs, (2, 1), out_dims=out_dims)


@pytest.mark.parametrize("out_dims", [1.5, True, "max", {"a": "rows"}, [0, {"a": object()}]])
def test_out_dims_of_the_wrong_type_are_refused_at_construction(out_dims):
    with pytest.raises(
        TypeError, match=r"out_dims.* it must be a dim, None, 'mean', 'sum', 'first'"
    ):
        check_out_dims(out_dims)


@pytest.mark.parametrize("out_dims", [None, -1, "list", {"a/b": "sum", "c": [0, None, {"d": 1}]}])
def test_well_formed_out_dims_are_accepted(out_dims):
    check_out_dims(out_dims)


# --------------------------------------------------------------------------------------------------
# State
# --------------------------------------------------------------------------------------------------


def test_strict_merges_equal_tensors_and_never_puts_unknown_ones_end_to_end():
    nan = torch.tensor([1.0, float("nan"), 3.0])
    assert merge([nan, nan.clone()], (2, 1), strict=True) is nan
    assert shapes(merge([nan, nan.clone()], (2, 1))) == [6]
    for values in ([ones(9), ones(7)], [ones(9), ones(9) * 2], [ones(9), -ones(9)]):
        with pytest.raises(MergeError, match="output has no dim that counts rows: shard 0"):
            merge(values, (2, 1), strict=True)


def test_strict_still_joins_rows_and_averages_scalars():
    assert shapes(merge([ones(2, 5), ones(1, 5)], (2, 1), strict=True)) == [3, 5]
    assert shapes(merge([ones(5, 2), ones(5, 1)], (2, 1), strict=True)) == [5, 3]
    assert merge(scalars(1.0, 4.0), (2, 1), strict=True).item() == 2.0
    third = torch.tensor(0.1)
    assert torch.equal(merge([third, third.clone()], (2, 1), strict=True), third)


def test_strict_averages_equal_scalars_that_are_in_a_graph():
    losses = [torch.tensor(1.0, requires_grad=True) for _ in range(2)]
    merge([loss * 2 for loss in losses], (3, 1), strict=True).backward()
    assert [loss.grad.item() for loss in losses] == [1.5, 0.5]


def test_a_default_dict_output_keeps_its_factory():
    merged = merge([defaultdict(list, a=ones(2)), defaultdict(list, a=ones(1))], (2, 1))
    assert merged["new"] == []
    assert shapes(merged["a"]) == [3]


def test_rows_of_one_shard_only_are_not_copied():
    rows, none = torch.randn(4, 3), torch.randn(0, 3)
    assert merge([none, rows, none], [0, 4, 0]) is rows
    assert merge([none, none], [0, 0]).shape == (0, 3)
