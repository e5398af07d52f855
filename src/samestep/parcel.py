"""Values packed to be sent to another rank: pickled, but for what both ranks have anyway.

What it holds: :func:`pack` and :func:`unpack`. Why: an output tree holds tensors, which travel as
bytes beside it, and may hold the source module's own parameters, buffers and modules, which every
rank has: what arrives must be that rank's own object, not a copy.

Guarantees: dense tensors keep shape, dtype and whether they require grad; an object that is there
twice stays one object. Graphs do not travel.
Must not: know shards or what a rank is.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Parcel", "pack", "unpack"]


class Parcel(NamedTuple):
    """A packed value: a text for pickle, and the tensors that it speaks of."""

    data: bytes
    tensors: list[Tensor]


def pack(value: Any, own: Mapping[int, str], hollow: Container[int] = ()) -> Parcel:
    """Pack ``value``.

    Args:
        value: anything that pickles.
        own: by id of an object that both sides have, its name.
        hollow: ids of tensors that are sent without their values: they arrive on "meta".

    Raises:
        TypeError: something in it cannot be pickled.
    """
    buffer = io.BytesIO()
    packer = _Packer(buffer, own, hollow)
    try:
        packer.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"a {type(value).__name__} cannot be sent to the other ranks: {error}; return tensors, "
            f"numbers, strings and containers of them, or objects that pickle"
        ) from error
    return Parcel(buffer.getvalue(), packer.tensors)


def unpack(data: bytes, tensors: Sequence[Tensor], own: Mapping[str, Any]) -> Any:
    """Return the value that was packed.

    Args:
        data, tensors: of the parcel.
        own: this side's objects by name.
    """
    return _Unpacker(io.BytesIO(data), tensors, own).load()


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


class _Packer(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, own: Mapping[int, str], hollow: Container[int]) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._own = own
        self._hollow = hollow
        self._numbers: dict[int, int] = {}
        self._plain: dict[int, Tensor] = {}  # tensors to be pickled in torch's own way

    def persistent_id(self, value: Any) -> Any:
        name = self._own.get(id(value))
        if name is not None:
            return name
        if not isinstance(value, Tensor) or id(value) in self._plain:
            return None
        if value.layout != torch.strided or value.is_nested or value.is_quantized:
            plain = value.detach()
            self._plain[id(plain)] = plain
            return plain, value.requires_grad
        if id(value) in self._hollow:
            return (id(value), tuple(value.shape), value.dtype), value.requires_grad
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._numbers[id(value)], value.requires_grad


class _Unpacker(pickle.Unpickler):
    def __init__(
        self, buffer: io.BytesIO, tensors: Sequence[Tensor], own: Mapping[str, Any]
    ) -> None:
        super().__init__(buffer)
        self._tensors = tensors
        self._own = own
        self._hollow: dict[int, Tensor] = {}

    def persistent_load(self, found: Any) -> Any:
        if isinstance(found, str):
            return self._own[found]
        what, requires_grad = found
        tensor = self._find(what)
        return tensor.requires_grad_() if requires_grad else tensor

    def _find(self, what: Any) -> Tensor:
        if isinstance(what, Tensor):
            return what
        if isinstance(what, int):
            return self._tensors[what]
        number, shape, dtype = what
        if number not in self._hollow:
            self._hollow[number] = torch.empty(shape, dtype=dtype, device="meta")
        return self._hollow[number]
