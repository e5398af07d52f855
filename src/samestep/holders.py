"""Whether anybody else can see a tensor's memory.

What it holds: :func:`find_sole`, and :func:`storage_of`, by which memory is told from other memory.
Why: adding one gradient to another in place spares new memory, of which the system must first give
every page; but a gradient may be a tensor that somebody keeps (a custom backward's buffer, two
parameters' common gradient, what a hook put into a list). torch asks the same question before it
takes a gradient over as ``.grad`` without copying it.

How: all references are counted, to the Python object, to the tensor, to its storage, and to the
tensor that it is a view of, and compared with those to a tensor that was made for the comparison.

Guarantees: "yes" only if there is no other holder. "No" may be said of a tensor that has none,
where torch or Python count in another way.
Must not: know what a tensor is for.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, UntypedStorage
from torch.nn.parameter import is_lazy

__all__ = ["find_sole", "storage_of"]


def find_sole(tensors: Sequence[Tensor | None], places: Iterable[int]) -> list[int]:
    """Those of the places where there is a tensor that the list alone, and nobody else, holds.

    Args:
        tensors: a list; what a caller's variable holds as well is not held by it alone.
        places: where in it to look.
    """
    sole = _count_of_sole()
    if not sole:
        return []
    asked = [i for i in places if _is_plain(tensors[i])]
    try:
        found = list(_count(tensors, asked))
    except RuntimeError:
        return []  # of a tensor that stands for many (under vmap), torch tells no storage
    return [i for i, counts in zip(asked, found, strict=True) if counts in sole]


def storage_of(tensor: Tensor) -> int:
    """The address of the memory that the tensor lies in; 0 where there is none to name."""
    if tensor.layout != torch.strided or tensor.is_nested or is_lazy(tensor):
        return 0
    return tensor.untyped_storage().data_ptr()


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_get_base = operator.attrgetter("_base")
_get_address = operator.attrgetter("_cdata")
_strided = torch.strided
_get_use_count: Any = getattr(Tensor, "_use_count", None)  # not in every torch


def _is_plain(tensor: Tensor | None) -> bool:
    return type(tensor) is Tensor and tensor.layout is _strided and not tensor.requires_grad


def _count(tensors: Sequence[Any], places: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """How often each of these tensors is referred to, in every way that there is.

    Each question is asked of all in one loop in C: a step asks it of every gradient.
    """
    picked = [tensors[i] for i in places]
    storages = list(map(Tensor.untyped_storage, picked))
    bases = map(_get_base, picked)
    owners = [own if base is None else base for own, base in zip(picked, bases, strict=True)]
    return zip(
        map(sys.getrefcount, picked),
        map(_get_use_count, picked),
        map(sys.getrefcount, owners),
        map(_get_use_count, owners),
        map(sys.getrefcount, storages),
        map(torch._C._storage_Use_Count, map(_get_address, storages)),
        # Over memory that is not torch's own (numpy's, another library's, a file's), the counts
        # say nothing of who else has it.
        map(UntypedStorage.resizable, storages),
        map(UntypedStorage.is_shared, storages),
        strict=True,
    )


@functools.cache
def _count_of_sole() -> tuple[tuple[int, ...], ...]:
    """The counts of tensors that only a list holds; none where torch does not tell them.

    The second is a view, as the gradients of a linear layer's weights are.
    """
    if not (_get_use_count and hasattr(torch._C, "_storage_Use_Count")):
        return ()
    found: list[tuple[int, ...]] = []

    def count() -> None:
        weight = torch.ones(2, 2, device="cpu", requires_grad=True)
        made = F.linear(torch.ones(2, 2, device="cpu"), weight).square().sum()
        values = [torch.empty(1, device="cpu"), *torch.autograd.grad(made, [weight])]
        found.extend(_count(values, [0, 1]))

    # In a thread of its own, where no mode or hook of the caller's sees, and may keep, what is
    # made.
    thread = threading.Thread(target=count, name="samestep-count")
    thread.start()
    thread.join()
    return tuple(found)
