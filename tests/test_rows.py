"""Counting, cutting and joining rows of every kind of value."""

import pytest
import torch
from batches import assert_same
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

from samestep.rows import count_rows, cut_rows, describe_value, has_item_per_row, join_rows

lengths_and_size = st.integers(1, 9).flatmap(
    lambda n: st.tuples(st.lists(st.integers(1, 5), min_size=n, max_size=n), st.integers(1, n))
)


def make_rows(lengths, **options):
    return [torch.randn(length, 2, **options) for length in lengths]


# --------------------------------------------------------------------------------------------------
# Packed sequences
# --------------------------------------------------------------------------------------------------


@given(lengths_and_size)
def test_pieces_of_a_packed_sequence_are_the_packed_pieces(case):
    lengths, size = case
    rows = make_rows(lengths)
    sizes = [len(piece) for piece in torch.empty(len(rows)).split(size)]
    pieces = cut_rows(pack_sequence(rows, enforce_sorted=False), 0, sizes)
    start = 0
    for piece, num_rows in zip(pieces, sizes, strict=True):
        assert_same(piece, pack_sequence(rows[start : start + num_rows], enforce_sorted=False))
        start += num_rows
    assert_same(join_rows(pieces, 0), pack_sequence(rows, enforce_sorted=False))


def test_a_sorted_packed_sequence_stays_without_indices():
    packed = pack_sequence(make_rows([4, 3, 3, 1]))
    pieces = cut_rows(packed, 0, [2, 2])
    assert [piece.sorted_indices for piece in pieces] == [None, None]
    assert_same(join_rows(pieces, 0), packed)


def test_sorted_pieces_that_are_not_sorted_together_get_indices():
    rows = make_rows([2, 1, 4, 3])
    joined = join_rows([pack_sequence(rows[:2]), pack_sequence(rows[2:])], 0)
    assert_same(joined, pack_sequence(rows, enforce_sorted=False))


def test_a_packed_sequence_is_differentiable_through_cut_and_join():
    padded = torch.randn(3, 4, 2, requires_grad=True, dtype=torch.float64)

    def through(padded):
        packed = pack_padded_sequence(padded, [2, 4, 3], batch_first=True, enforce_sorted=False)
        return join_rows(cut_rows(packed, 0, [1, 2]), 0).data.sin()

    torch.autograd.gradcheck(through, padded)


def test_a_recurrent_net_on_pieces_gives_the_rows_of_the_whole():
    net = torch.nn.LSTM(2, 3)
    packed = pack_sequence(make_rows([2, 5, 1, 3]), enforce_sorted=False)
    whole, (h, c) = net(packed)
    outcomes = [net(piece) for piece in cut_rows(packed, 0, [3, 1])]
    joined = join_rows([out for out, _ in outcomes], 0)
    assert isinstance(joined, PackedSequence)
    assert_same(joined.unsorted_indices, whole.unsorted_indices)
    torch.testing.assert_close(joined.data, whole.data)
    torch.testing.assert_close(torch.cat([state[0] for _, state in outcomes], 1), h)
    torch.testing.assert_close(torch.cat([state[1] for _, state in outcomes], 1), c)


# --------------------------------------------------------------------------------------------------
# Sparse tensors
# --------------------------------------------------------------------------------------------------


def make_sparse(*shape, dense_dims=0):
    value = torch.randn(*shape).relu()
    return value.to_sparse(len(shape) - dense_dims)


@pytest.mark.parametrize(("dim", "dense_dims"), [(0, 0), (1, 0), (-1, 0), (0, 1), (1, 1), (2, 1)])
def test_a_sparse_tensor_is_cut_on_any_dim_and_stays_coalesced(dim, dense_dims):
    value = make_sparse(6, 6, 6, dense_dims=dense_dims)
    pieces = cut_rows(value, dim, [1, 2, 3])
    for piece, dense in zip(pieces, value.to_dense().split([1, 2, 3], dim), strict=True):
        assert torch.equal(piece.to_dense(), dense)
        assert piece.is_coalesced()
    joined = join_rows(pieces, dim)
    assert joined.is_coalesced()
    assert torch.equal(joined.indices(), value.indices())
    assert torch.equal(joined.values(), value.values())


def test_sparse_pieces_with_other_places_are_joined_on_a_dense_dim():
    pieces = [make_sparse(4, 3, dense_dims=1) for _ in range(3)]
    expected = torch.cat([piece.to_dense() for piece in pieces], 1)
    assert torch.equal(join_rows(pieces, 1).to_dense(), expected)


def test_a_sparse_tensor_that_is_not_coalesced_keeps_its_entries():
    places = torch.tensor([[0, 0, 1, 0], [1, 1, 2, 0]])
    value = torch.sparse_coo_tensor(places, torch.arange(4.0), (4, 3), check_invariants=False)
    pieces = cut_rows(value, 0, [1, 3])
    assert [piece._nnz() for piece in pieces] == [3, 1]
    joined = join_rows(pieces, 0)
    assert not joined.is_coalesced()
    assert torch.equal(joined.to_dense(), value.to_dense())


@pytest.mark.parametrize("coalesce", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_sparse_tensor_is_differentiable_through_cut_and_join(coalesce, dim):
    places = torch.tensor([[0, 1, 1], [1, 2, 2]])
    value = torch.sparse_coo_tensor(places, torch.randn(3), (2, 3), check_invariants=False)
    value = (value.coalesce() if coalesce else value).requires_grad_()
    weight = torch.randn(2, 3)
    joined = join_rows(cut_rows(value, dim, [1, value.shape[dim] - 1]), dim)
    (gradient,) = torch.autograd.grad((joined.to_dense() * weight).sum(), value)
    expected = weight.sparse_mask(value.detach().coalesce()).to_dense()
    assert torch.equal(gradient.to_dense(), expected)


# --------------------------------------------------------------------------------------------------
# Nested tensors
# --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_cut_by_components_and_differentiable(layout):
    rows = make_rows([2, 4, 1], requires_grad=True)
    value = torch.nested.as_nested_tensor(rows, layout=layout)
    assert count_rows(value, 0) == 3
    assert count_rows(value, 1) is None
    assert describe_value(value) == "nested float32 of 3"
    pieces = cut_rows(value, 0, [2, 1])
    assert [piece.size(0) for piece in pieces] == [2, 1]
    joined = join_rows(pieces, 0)
    assert joined.layout == layout
    for row, component in zip(rows, joined.unbind(), strict=True):
        assert torch.equal(row, component)
    gradients = torch.autograd.grad(joined.unbind()[1].sum(), rows, allow_unused=True)
    assert torch.equal(gradients[1], torch.ones(4, 2))


# --------------------------------------------------------------------------------------------------
# Lists
# --------------------------------------------------------------------------------------------------

two = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("items", "answer"),
    [
        (["a", "b"], True),
        ([{"id": 1}, {"id": 2}], True),
        ([torch.ones(2), torch.ones(3)], True),
        ([torch.tensor(1), torch.tensor(2)], True),
        ([{"x": two, "n": torch.tensor(1)}, {"x": two, "n": torch.tensor(1)}], True),
        ([two, two], False),
        ([two, torch.tensor(1)], False),
        ([(two, two), {"x": two}], False),
        ([two, "a"], False),
        ([torch.ones(3), "a"], False),
        ([torch.ones(3), None], True),
    ],
)
def test_a_list_as_long_as_the_batch_holds_rows_or_columns(items, answer):
    assert has_item_per_row(items, 2, 0) is answer


def test_packed_rows_are_cut_and_joined_under_any_default_device():
    packed = pack_sequence([torch.randn(n, 2) for n in (2, 4, 3)], enforce_sorted=False)
    with torch.device("meta"):
        pieces = cut_rows(packed, 0, [2, 1])
        joined = join_rows(pieces, 0)
    assert torch.equal(joined.data, packed.data)
    assert torch.equal(joined.batch_sizes, packed.batch_sizes)
