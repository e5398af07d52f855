"""One tensor of the source module and what it is in a replica.

What it holds: :class:`Link`, and the few ways in which a replica's tensor is made and compared.
Must not: know modules or slots.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # a torch that names them otherwise: then it takes longer
    TensorGuards = None  # type: ignore[assignment, misc]

from samestep.devices import move_tensor
from samestep.snapshot import WHOLE, Cell
from samestep.tree import iter_leaves

__all__ = [
    "Carried",
    "Link",
    "Rows",
    "Stamps",
    "as_leaf",
    "copy_all",
    "copy_to",
    "get_address",
    "get_addresses",
    "get_version",
    "is_far",
    "num_bytes",
    "send_flat",
    "send_rows",
    "write",
]


# (dim, first row, number of rows), as ``Tensor.narrow`` takes them
Rows = tuple[int, int, int]


@dataclass(slots=True, eq=False, repr=False)
class Link:
    """One source tensor and what it is in a replica."""

    source: Tensor
    copy: Tensor
    path: str
    is_alias: bool  # of the source's memory
    is_private: bool  # may be written by the forward
    is_suspect: bool = False  # may be written without a new version: only values can tell
    is_watched: bool = False  # whether gradients that reach the copy alone are brought home
    rows: Rows | None = None  # which rows of the source the copy holds; None: all of it
    flat: Any = None  # the memory that the copy shares with others; None: it has its own
    is_unversioned: bool = False  # torch itself writes it without raising its version
    owner: nn.Module | None = None  # the replica's module that holds a tensor with clocks
    #: Tensors whose versions stand for those of source and copy as well.
    clocks: tuple[Tensor, Tensor] | None = None

    @property
    def is_parted(self) -> bool:
        """Whether an alias got other memory than the source (by ``parameter.data = ...``)."""
        return get_address(self.copy) != get_address(self.source)

    def view(self) -> Tensor:
        """What of the source the copy holds, outside of any graph."""
        source = self.source.detach()
        return source if self.rows is None else source.narrow(*self.rows)


class Carried:
    """Places on the module where steps leave state with one entry per row, for the next to read.

    One device would find the whole batch's state there; a shard must find its own rows of it, also
    where the user has put another tensor in its place meanwhile (``model.h = model.h.detach()``).
    """

    def __init__(self) -> None:
        #: By cell and key: the cell, the key, and the dim of the rows for each leaf of the value.
        self.places: dict[tuple[int, Any], tuple[Cell, Any, list[int | None]]] = {}

    def note(self, cell: Cell, key: Any, tensors: Sequence[tuple[Tensor, int]]) -> None:
        """Remember which tensors of the entry ``key`` of ``cell`` have rows, and on which dim."""
        self.places.pop((id(cell), key), None)
        if tensors:
            dims = {id(tensor): dim for tensor, dim in tensors}
            leaves = _get_leaves(cell, key)
            self.places[id(cell), key] = (cell, key, [dims.get(id(leaf)) for leaf in leaves])

    def plan(self, sizes: Sequence[int]) -> list[dict[int, Rows]]:
        """Say, per shard, which rows of which tensor (by id) it gets in a call with these sizes.

        Where the number of rows is not this batch's, a shard gets the whole tensor, as one device
        would; or none of it, if it could take that for its own rows by mistake.
        """
        tensors = list(self._find())
        plans: list[dict[int, Rows]] = []
        start = 0
        for size in sizes:
            plan: dict[int, Rows] = {}
            for tensor, dim in tensors:
                if tensor.size(dim) == sum(sizes):
                    plan[id(tensor)] = (dim, start, size)
                elif tensor.size(dim) in sizes:
                    plan[id(tensor)] = (dim, 0, 0)
            plans.append(plan)
            start += size
        return plans

    def _find(self) -> Iterator[tuple[Tensor, int]]:
        for cell, key, dims in self.places.values():
            leaves = _get_leaves(cell, key)
            if len(leaves) != len(dims):
                continue
            for leaf, dim in zip(leaves, dims, strict=True):
                if isinstance(leaf, Tensor) and dim is not None and leaf.dim() > dim:
                    yield leaf, dim


def _get_leaves(cell: Cell, key: Any) -> list[Any]:
    value = list(cell) if key is WHOLE else cell.get(key)
    return [leaf for _, leaf in iter_leaves(value)]


def as_leaf(data: Tensor, source: Tensor) -> Tensor:
    """A leaf over ``data`` that looks like ``source``: its class, and whether it needs a
    gradient."""
    if not isinstance(source, nn.Parameter):
        return data.requires_grad_(source.requires_grad)
    # Not nn.Parameter(data): a subclass may have a constructor of its own.
    if not source.is_inference():
        return Tensor._make_subclass(type(source), data, source.requires_grad)
    with torch.inference_mode():
        return Tensor._make_subclass(type(source), data, source.requires_grad)


def copy_to(data: Tensor, device: torch.device) -> Tensor:
    """Copy to a device, also where the data are there already."""
    copied = move_tensor(data, device)
    return copied.clone() if copied is data else copied


def write(target: Tensor, value: Tensor, *, keep_version: bool) -> None:
    """Give ``target`` the values of ``value``.

    Args:
        target: a leaf, or a tensor without a graph.
        value: of the same shape.
        keep_version: for what torch itself would have written without a new version: a graph that
            saved ``target`` must not take this for a change of the user's.
    """
    keeping = (
        _unsafe_preserve_version_counter(target)
        if keep_version and not target.is_inference()
        else contextlib.nullcontext()
    )
    with torch.no_grad(), keeping:
        target.copy_(value)


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target; between devices, all of one dtype at a time.

    A transfer has a price of its own, whatever its size: 3,000 small tensors would pay it 3,000
    times. So they are put end to end on the one device, sent, and taken apart on the other.
    """
    groups: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        is_plain = target.layout == source.layout == torch.strided
        key = (is_plain, source.device, target.device, target.dtype if is_plain else None)
        groups.setdefault(key, []).append((target, source.detach()))
    for (is_plain, here, there, _), pairs in groups.items():
        if not is_plain:
            for target, source in pairs:
                target.copy_(source)
            continue
        values = [source for _, source in pairs]
        if is_far(here, there) and len(pairs) > 1:
            values = send_flat(values, there)
        torch._foreach_copy_([target for target, _ in pairs], values)


def is_far(here: torch.device, there: torch.device) -> bool:
    """Whether what goes from one device to the other is transferred."""
    return here != there


def send_flat(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Bring tensors of one device and dtype to another device, as one transfer.

    Returns:
        Tensors of the same shapes, in memory that they share.
    """
    moved = send_rows([tensor.reshape(-1) for tensor in tensors], device)
    sizes = [tensor.numel() for tensor in tensors]
    return [
        part.view(tensor.shape)
        for part, tensor in zip(torch.split_with_sizes(moved, sizes), tensors, strict=True)
    ]


def send_rows(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """Put one-dimensional tensors of one dtype end to end, and bring them to another device."""
    here = rows[0].device
    is_pinned = here.type == "cpu" and device.type not in ("cpu", "meta")
    # From pinned memory the transfer runs beside the host's next work. torch's allocator keeps the
    # memory until the transfer has ended.
    size = sum(map(len, rows))
    flat = torch.empty(size, dtype=rows[0].dtype, device=here, pin_memory=is_pinned)
    torch.cat(list(rows), out=flat)
    return move_tensor(flat, device, non_blocking=True)


class Stamps:
    """What would show that the memory of one of many tensors was exchanged, or ``requires_grad``
    switched. Asked at every call, so it is read in C loops.

    torch's own guards, which its compiler asks before it runs a graph, compare everything but the
    address of many tensors in one call, at a third of the price. They count the mode of the calling
    thread (inference mode, autocast) among what they compare, so a mode has guards of its own.

    Args:
        tensors: the ones to look at, as they are now.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._plain = list(filter(_is_plain, tensors))
        self._others = [tensor for tensor in tensors if not _is_plain(tensor)]
        self._complex = [tensor for tensor in self._plain if tensor.is_complex()]
        self._seen = self._look()
        self._guards: list[Any] = []  # one per mode, the latest first

    def find_changed(self) -> list[Tensor]:
        """Return the tensors that are not what they were."""
        try:
            if self._is_alike():
                return []
            now = self._look()
        except RuntimeError:  # one is not of a plain kind any more
            return self._plain + self._others
        if now == self._seen:
            self._guard()
            return []
        asked = [self._plain, self._others, *[self._plain] * 4, self._complex]
        found: dict[int, Tensor] = {}
        for tensors, *answers in zip(asked, self._seen, now, strict=True):
            changed = map(operator.ne, *answers)
            found |= {id(tensor): tensor for tensor in compress(tensors, changed)}
        return list(found.values())

    def _look(self) -> list[list[Any]]:
        return [
            list(map(Tensor.data_ptr, self._plain)),
            [_ask(tensor) for tensor in self._others],
            list(map(_get_shape, self._plain)),
            list(map(Tensor.stride, self._plain)),
            list(map(_needs_gradient, self._plain)),
            list(map(_get_dtype, self._plain)),
            list(map(Tensor.is_conj, self._complex)),
        ]

    def _is_alike(self) -> bool:
        """A short look: whether it is certain that nothing changed."""
        for guard in self._guards:
            if guard.check(*self._plain):
                return list(map(Tensor.data_ptr, self._plain)) == self._seen[0] and (
                    not self._others or [_ask(tensor) for tensor in self._others] == self._seen[1]
                )
        return False

    def _guard(self) -> None:
        """Remember how torch compares the tensors in this mode; they are what they were."""
        if TensorGuards is not None and self._plain:
            guard = TensorGuards(
                *self._plain,
                # torch's stubs say that these are flat
                dynamic_dims_sizes=[list(shape) for shape in self._seen[2]],  # type: ignore[misc]
                dynamic_dims_strides=[list(s) for s in self._seen[3]],  # type: ignore[misc]
            )
            self._guards = [guard, *self._guards[: _NUM_MODES - 1]]


def num_bytes(tensor: Tensor) -> int:
    """The size of the values."""
    return tensor.numel() * tensor.element_size()


def get_version(tensor: Tensor) -> int:
    """Return the in-place version; -1 if torch keeps none."""
    return -1 if tensor.is_inference() else tensor._version


def get_address(tensor: Tensor) -> int:
    """Return where the values lie; 0 for layouts without one place."""
    if tensor.layout == torch.sparse_coo:
        return tensor._values().data_ptr()
    return tensor.data_ptr() if _is_plain(tensor) else 0


def get_addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return where the values of many tensors lie."""
    try:
        return list(map(Tensor.data_ptr, tensors))
    except RuntimeError:  # one has no one place
        return list(map(get_address, tensors))


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_NUM_MODES = 4  # grad and inference mode, with and without autocast
_get_shape = operator.attrgetter("shape")
_get_dtype = operator.attrgetter("dtype")
_needs_gradient = operator.attrgetter("requires_grad")


def _ask(tensor: Tensor) -> tuple[int, int, bool]:
    return get_address(tensor), get_version(tensor), tensor.requires_grad


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested
