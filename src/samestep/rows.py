"""Rows of single values: what counts, cuts and joins them, kind by kind.

Holds, for every kind of value that carries rows without being a container (dense, sparse and nested
tensors, packed sequences, numpy arrays, registered batch types), the cut and the join side by side,
because each must undo the other. It exists because torch has one cut, for dense tensors only.

Guarantees: ``join_rows(cut_rows(x))`` equals x bit for bit; both are differentiable; cuts of dense
tensors and arrays are views.

Must not: decide what is cut or how pieces that disagree are joined.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from samestep.tree import BatchType, find_batch_type, is_atom, iter_leaves

__all__ = [
    "count_rows",
    "count_rows_inside",
    "cut_rows",
    "describe_value",
    "has_item_per_row",
    "has_shape",
    "holds_rows",
    "is_array",
    "is_tensor_like",
    "join_rows",
]


def is_array(value: Any) -> bool:
    """Is it a numpy array? numpy is not imported for the answer."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_tensor_like(value: Any) -> bool:
    """Can it say how many rows a batch has: a tensor, packed sequence or registered batch?"""
    return isinstance(value, (Tensor, PackedSequence)) or find_batch_type(value) is not None


def holds_rows(value: Any) -> bool:
    """Is it one of the kinds that this module counts, cuts and joins?"""
    return type(value) is Tensor or is_tensor_like(value) or is_array(value)


def has_shape(value: Any) -> bool:
    """Are its rows one of several dims (dense and sparse tensors, arrays), not its only length?"""
    if type(value) is not Tensor:
        if find_batch_type(value) is not None or isinstance(value, PackedSequence):
            return False
        if not isinstance(value, Tensor):
            return True
    return not value.is_nested


def count_rows(value: Any, dim: int) -> int | None:
    """Return how many rows a value of one of our kinds has along ``dim``; None for no such dim.

    Packed sequences and registered batches have one length, whatever ``dim`` is.
    """
    if type(value) is not Tensor:
        batch_type = find_batch_type(value)
        if batch_type is not None:
            return batch_type.rows(value)
        if isinstance(value, PackedSequence):
            return int(value.batch_sizes[0])
    if isinstance(value, Tensor) and value.is_nested:
        return value.size(0) if dim in (0, -value.dim()) else None
    shape = value.shape
    return int(shape[dim]) if -len(shape) <= dim < len(shape) else None


def count_rows_inside(value: Any, dim: int) -> set[int | None]:
    """Return the numbers of rows that occur along ``dim`` in a container; empty: no tensors."""
    if isinstance(value, list) and all(map(is_atom, value)):
        return set()  # long lists of names or numbers are common
    leaves = iter_leaves(value, is_leaf=holds_rows)
    return {count_rows(leaf, dim) for _, leaf in leaves if holds_rows(leaf)}


def has_item_per_row(value: list[Any], num_rows: int, dim: int) -> bool:
    """Is each of the ``num_rows`` items of this list one row, not a column of the batch?

    Without tensors inside it is. It holds columns if every tensor within has ``num_rows`` rows
    itself, or if items with tensors are of several types (rows of one batch are alike, but for
    None). Beside other tensors a 0-dim one does not count: it is a row among its like only.
    """
    counts = count_rows_inside(value, dim)
    if not counts:
        return True
    types = {Tensor if isinstance(item, Tensor) else type(item) for item in value}
    types.discard(type(None))
    if len(types) > 1:
        return False
    if len(counts) > 1 and types == {Tensor}:
        counts.discard(None)
    return counts != {num_rows}


def cut_rows(value: Any, dim: int, sizes: Sequence[int]) -> Sequence[Any]:
    """Cut a value of one of our kinds into consecutive pieces of ``sizes`` rows.

    Raises:
        ValueError: it cannot be cut; the text says why.
    """
    if type(value) is not Tensor:
        batch_type = find_batch_type(value)
        if batch_type is not None:
            return _cut_registered(value, batch_type, sizes)
        if isinstance(value, PackedSequence):
            return _cut_packed(value, sizes)
        if not isinstance(value, Tensor):
            return _cut_array(value, dim, sizes)
    if value.is_nested:
        return _cut_nested(value, sizes)
    if value.layout is torch.strided:
        return _cut_dense(value, dim, sizes)
    if value.layout is torch.sparse_coo:
        return _cut_sparse(value, dim % value.dim(), sizes)
    raise ValueError(f"its layout is {value.layout}; x.to_sparse_coo() could be cut")


def join_rows(values: Sequence[Any], dim: int) -> Any:
    """Join pieces of one kind along ``dim``; the inverse of :func:`cut_rows`."""
    first = values[0]
    batch_type = find_batch_type(first)
    if batch_type is not None:
        return batch_type.merge(list(values))
    if isinstance(first, PackedSequence):
        return _join_packed(values)
    if not isinstance(first, Tensor):
        return sys.modules["numpy"].concatenate(list(values), axis=dim)
    if first.is_nested:
        return _build_nested([piece for value in values for piece in value.unbind()], first.layout)
    if first.layout is torch.sparse_coo:
        return _join_sparse(values, dim % first.dim())
    return torch.cat(list(values), dim)


def describe_value(value: Any) -> str:
    """Say in a few words what a value is: ``float32 [30, 5]``, ``list of 30``, ``str 'abc'``."""
    batch_type = find_batch_type(value)
    if batch_type is not None:
        return f"{type(value).__name__} of {batch_type.rows(value)}"
    if isinstance(value, PackedSequence):
        return f"PackedSequence of {count_rows(value, 0)}"
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.is_nested:
            return f"nested {dtype} of {value.size(0)}"
        layout = "" if value.layout is torch.strided else f"{str(value.layout).split('.')[-1]} "
        return f"{layout}{dtype} {list(value.shape)}"
    if is_array(value):
        return f"numpy {value.dtype} {list(value.shape)}"
    if value is None:
        return "None"
    name = type(value).__name__
    if isinstance(value, (int, float, complex, str, bytes)):
        text = repr(value)
        return f"{name} {text if len(text) <= 40 else text[:37] + '...'}"
    try:
        return f"{name} of {len(value)}"
    except TypeError:
        return name


def _cut_registered(value: Any, batch_type: BatchType, sizes: Sequence[int]) -> list[Any]:
    pieces = list(batch_type.split(value, list(sizes)))
    if len(pieces) != len(sizes):
        raise ValueError(
            f"the split registered for {batch_type.cls.__name__} returned {len(pieces)} objects "
            f"for {len(sizes)} shards (sizes: {list(sizes)})"
        )
    return pieces


# --------------------------------------------------------------------------------------------------
# Dense tensors and arrays
# --------------------------------------------------------------------------------------------------


def _cut_dense(value: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
    if value.requires_grad and torch.is_grad_enabled():
        # One node for all shards. Its outputs refuse writes in place, as shards of one graph must.
        return list(value.split_with_sizes(list(sizes), dim))
    # Views made one by one can be written in place by an operation that records a graph.
    pieces = []
    start = 0
    if dim == 0:
        for size in sizes:
            pieces.append(value[start : start + size])
            start += size
        return pieces
    for size in sizes:
        pieces.append(value.narrow(dim, start, size))
        start += size
    return pieces


def _cut_array(value: Any, dim: int, sizes: Sequence[int]) -> list[Any]:
    before = (slice(None),) * (dim % value.ndim)
    pieces = []
    start = 0
    for size in sizes:
        pieces.append(value[(*before, slice(start, start + size))])
        start += size
    return pieces


# --------------------------------------------------------------------------------------------------
# Sparse COO tensors
# --------------------------------------------------------------------------------------------------


def _sparse_parts(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (tensor, indices, values), values inside the graph.

    Only a coalesced tensor hands out its values differentiably, so one that needs a gradient is
    coalesced first; any other keeps its entries as they are.
    """
    if value.requires_grad and torch.is_grad_enabled() and not value.is_coalesced():
        value = value.coalesce()
    if value.is_coalesced():
        return value, value.indices(), value.values()
    return value, value._indices(), value._values()


def _cut_sparse(value: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
    value, indices, entries = _sparse_parts(value)
    num_sparse = value.sparse_dim()
    pieces = []
    start = 0
    for size in sizes:
        shape = [*value.shape[:dim], size, *value.shape[dim + 1 :]]
        if dim < num_sparse:
            inside = (indices[dim] >= start) & (indices[dim] < start + size)
            kept = inside.nonzero().squeeze(1)
            piece_indices = indices.index_select(1, kept)
            piece_indices[dim] -= start
            piece_entries = entries.index_select(0, kept)
        else:
            piece_indices = indices.clone()
            piece_entries = entries.narrow(dim - num_sparse + 1, start, size)
        pieces.append(_build_sparse(piece_indices, piece_entries, shape, value.is_coalesced()))
        start += size
    return pieces


def _join_sparse(values: Sequence[Tensor], dim: int) -> Tensor:
    num_sparse = values[0].sparse_dim()
    if dim >= num_sparse:
        return _join_sparse_on_dense_dim(values, dim)
    all_indices, all_entries = [], []
    start = 0
    coalesced = all(value.is_coalesced() for value in values)
    for value in values:
        _, indices, entries = _sparse_parts(value)
        offset = torch.zeros(num_sparse, 1, dtype=indices.dtype, device=indices.device)
        offset[dim] = start
        all_indices.append(indices + offset)
        all_entries.append(entries)
        start += value.shape[dim]
    shape = [*values[0].shape[:dim], start, *values[0].shape[dim + 1 :]]
    # Rows of later pieces sort behind those of earlier ones only on the first dim.
    sorted_already = coalesced and dim == 0
    joined = _build_sparse(torch.cat(all_indices, 1), torch.cat(all_entries), shape, sorted_already)
    return joined.coalesce() if coalesced and not sorted_already else joined


def _join_sparse_on_dense_dim(values: Sequence[Tensor], dim: int) -> Tensor:
    """Join along a dim that is stored inside the entries: the union of all pieces' places."""
    parts = [_sparse_parts(value) for value in values]
    first, indices, _ = parts[0]
    sizes = [value.shape[dim] for value in values]
    shape = [*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :]]
    in_entry = dim - first.sparse_dim() + 1
    coalesced = all(part[0].is_coalesced() for part in parts)
    if all(torch.equal(part[1], indices) for part in parts):
        return _build_sparse(indices, torch.cat([p[2] for p in parts], in_entry), shape, coalesced)
    start = 0
    padded = []
    for (_, _, entries), size in zip(parts, sizes, strict=True):
        # (left, right) of the entry's dims, last dim first, as torch's pad wants them
        widths = [0, 0] * (entries.dim() - 1 - in_entry) + [start, shape[dim] - start - size]
        padded.append(torch.nn.functional.pad(entries, widths))
        start += size
    all_indices = torch.cat([part[1] for part in parts], 1)
    return _build_sparse(all_indices, torch.cat(padded), shape, False).coalesce()


def _build_sparse(indices: Tensor, entries: Tensor, shape: list[int], coalesced: bool) -> Tensor:
    return torch.sparse_coo_tensor(
        indices, entries, shape, is_coalesced=coalesced, check_invariants=False
    )


# --------------------------------------------------------------------------------------------------
# Nested tensors
# --------------------------------------------------------------------------------------------------


def _cut_nested(value: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    components = value.unbind()
    pieces = []
    start = 0
    for size in sizes:
        pieces.append(_build_nested(list(components[start : start + size]), value.layout))
        start += size
    return pieces


def _build_nested(components: list[Tensor], layout: torch.layout) -> Tensor:
    try:
        return torch.nested.as_nested_tensor(components, layout=layout)
    except RuntimeError as error:
        raise ValueError(
            f"a nested tensor cannot be rebuilt from its components: {error}"
        ) from error


# --------------------------------------------------------------------------------------------------
# Packed sequences
# --------------------------------------------------------------------------------------------------
#
#   data:         a0 b0 c0 | a1 b1 | a2        sequences a (3), b (2), c (1), longest first
#   batch_sizes:  3          2       1         how many sequences are still going at each time
#
# Sequence p of the sorted order lies at offset(t) + p for every time t with batch_sizes[t] > p.


def _cut_packed(value: PackedSequence, sizes: Sequence[int]) -> list[PackedSequence]:
    batch_sizes = value.batch_sizes
    offsets = batch_sizes.cumsum(0) - batch_sizes
    places = value.unsorted_indices
    if places is None:
        places = torch.arange(int(batch_sizes[0]), device="cpu")
    pieces = []
    start = 0
    for size in sizes:
        mine, order = places[start : start + size].cpu().sort()
        going = mine[None, :] < batch_sizes[:, None]
        index = (offsets[:, None] + mine[None, :])[going]
        data = value.data.index_select(0, index.to(value.data.device))
        counts = going.sum(1)
        keep_order = None if value.sorted_indices is None else order
        pieces.append(_build_packed(data, counts[counts > 0], keep_order))
        start += size
    return pieces


def _join_packed(values: Sequence[PackedSequence]) -> PackedSequence:
    lengths = torch.cat([_row_lengths(value) for value in values])
    order: Tensor | None
    ordered, order = lengths.sort(descending=True)  # ties as torch's own packing leaves them
    if torch.equal(lengths, ordered) and all(value.sorted_indices is None for value in values):
        order = None
    times = torch.arange(int(ordered[0]), device="cpu")
    going = ordered[None, :] > times[:, None]
    # Where each step of each row lies in the pieces' data put end to end: [times, rows].
    sources = []
    base = 0
    for value in values:
        offsets = value.batch_sizes.cumsum(0) - value.batch_sizes
        places = value.unsorted_indices
        places = (
            torch.arange(int(value.batch_sizes[0]), device="cpu")
            if places is None
            else places.cpu()
        )
        source = torch.zeros(len(times), len(places), dtype=torch.int64, device="cpu")
        source[: len(offsets)] = base + offsets[:, None] + places[None, :]
        sources.append(source)
        base += len(value.data)
    source = torch.cat(sources, 1)
    if order is not None:
        source = source[:, order]
    data = torch.cat([value.data for value in values])
    index = source[going].to(data.device)
    return _build_packed(data.index_select(0, index), going.sum(1), order)


def _row_lengths(value: PackedSequence) -> Tensor:
    """Return the length of each sequence, in the order of the rows."""
    places = torch.arange(int(value.batch_sizes[0]), device="cpu")
    lengths = (value.batch_sizes[:, None] > places[None, :]).sum(0)
    return lengths if value.unsorted_indices is None else lengths[value.unsorted_indices.cpu()]


def _build_packed(data: Tensor, batch_sizes: Tensor, order: Tensor | None) -> PackedSequence:
    if order is None:
        return PackedSequence(data, batch_sizes)
    order = order.to(data.device)
    return PackedSequence(data, batch_sizes, order, order.argsort())
