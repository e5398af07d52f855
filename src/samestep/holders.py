"""Whether anybody else can see a tensor's memory.

What it holds: :func:`is_sole`. Why: adding one gradient to another in place spares new memory, of
which the system must first give every page; but a gradient may be a tensor that somebody keeps (a
custom backward's buffer, two parameters' common gradient, what a hook put into a list). torch asks
the same question before it takes a gradient over as ``.grad`` without copying it.

How: all references are counted, to the Python object, to the tensor, to its storage, and to the
tensor that it is a view of, and compared with those to a tensor that was made for the comparison.

Guarantees: "yes" only if there is no other holder. "No" may be said of a tensor that has none,
where torch or Python count in another way.
Must not: know what a tensor is for.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["is_sole"]


def is_sole(tensors: Sequence[Tensor | None], index: int) -> bool:
    """Whether ``tensors`` alone, and nobody else, holds its tensor number ``index``.

    Args:
        tensors: a list; what a caller's variable holds as well is not held by it alone.
        index: where in it.
    """
    tensor = tensors[index]
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.requires_grad:
        return False
    storage = tensor.untyped_storage()
    # Over memory that is not torch's own (numpy's, another library's, a file's), the counts say
    # nothing of who else has it.
    if not storage.resizable() or storage.is_shared():
        return False
    del tensor, storage
    return _count(tensors, index) in _count_of_sole()


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _count(tensors: Sequence[Any], index: int) -> tuple[int, ...]:
    """How often the tensor is referred to, in every way that there is."""
    tensor = tensors[index]
    storage, base = tensor.untyped_storage(), tensor._base
    counts = (
        sys.getrefcount(tensor),
        tensor._use_count(),
        sys.getrefcount(storage),
        torch._C._storage_Use_Count(storage._cdata),
    )
    return counts if base is None else (*counts, sys.getrefcount(base), base._use_count())


@functools.cache
def _count_of_sole() -> tuple[tuple[int, ...], ...]:
    """The counts of tensors that only a list holds; none where torch does not tell them.

    The second is a view, as the gradients of a linear layer's weights are.
    """
    if not (hasattr(Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")):
        return ()
    found: list[tuple[int, ...]] = []

    def count() -> None:
        weight = torch.ones(2, 2, device="cpu", requires_grad=True)
        made = F.linear(torch.ones(2, 2, device="cpu"), weight).square().sum()
        view = list(torch.autograd.grad(made, [weight]))
        found.extend([_count([torch.empty(1, device="cpu")], 0), _count(view, 0)])

    # In a thread of its own, where no mode or hook of the caller's sees, and may keep, what is
    # made.
    thread = threading.Thread(target=count, name="samestep-count")
    thread.start()
    thread.join()
    return tuple(found)
