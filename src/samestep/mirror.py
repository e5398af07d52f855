"""Whether the ranks of a step see the same things: batches, parameters, random seeds.

What it holds: :func:`start_alike` and :class:`Mirror`. Why: every rank runs the user's own script,
and where two of them differ (a shuffle without a seed, a model built from other random numbers),
training would go on and mean nothing.

Guarantees: a script without a seed is as if each rank had begun with rank 0's. In the first calls,
and whenever the batch has a new form, everything is compared by checksum before any forward runs.
In every call a few entries of each tensor of the batch are, and a few tensors of the module in
turn, so that nothing that drifts apart stays unseen.
Must not: change anything after the start.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from samestep.comm import Comm
from samestep.errors import RankError
from samestep.randomness import read_state, write_state
from samestep.rows import is_array
from samestep.segments import open_bytes
from samestep.spread import Spread, pick_entries
from samestep.tree import iter_leaves

__all__ = ["Mirror", "start_alike"]

_NUM_FIRST = 2  # calls in which everything is compared
_NUM_PICKED = 256  # entries of a tensor that are looked at in every call
_NUM_FORMS = 256
_NUM_IN_TURN = 4  # tensors of the module that are looked at in every call,
_BYTES_IN_TURN = 1 << 16  # and about how many bytes

Sums = dict[str, Any]


def start_alike(comm: Comm, module: nn.Module) -> None:
    """Give every rank the parameters, buffers and random states of rank 0.

    Args:
        comm: the line to the other ranks.
        module: changed in place, where it differs.

    Raises:
        RankError: the modules differ in more than their values.
    """
    if comm.num_ranks == 1:
        return
    tensors = {
        name: tensor
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if not is_lazy(tensor) and tensor.layout == torch.strided and not tensor.is_meta
    }
    forms = [(name, str(t.dtype), tuple(t.shape)) for name, t in tensors.items()]
    sums = {name: _sum(tensor, None) for name, tensor in tensors.items()}
    told = comm.exchange("making a wrapper", (type(module).__name__, forms, sums))
    for rank, (name, theirs, _) in enumerate(told):
        if (name, theirs) != told[0][:2]:
            odd = next(iter(set(theirs) ^ set(told[0][1])), (name,))
            raise RankError(
                f"rank {rank} wraps another module than rank 0 ({odd[0]!r} differs); every rank "
                f"must build the same model, and wrap models in the same order"
            )
    odd_names = [name for name in tensors if any(one[2][name] != sums[name] for one in told)]
    odd_names = sorted({n for names in comm.exchange("what differs", odd_names) for n in names})
    from samestep.parcel import pack, unpack  # for several ranks

    own = [{name: tensors[name] for name in odd_names}, read_state()] if comm.rank == 0 else None
    data, values = pack(own, {})
    said, found = comm.gather("rank 0's values", data, values)
    if comm.rank:
        theirs, state = unpack(said[0], found[0], {})
        with torch.no_grad():
            for name, value in theirs.items():
                tensors[name].copy_(value)
        write_state(state)


class Mirror:
    """What one wrapper compares between ranks."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._forms: set[Any] = set()
        self._turn = 0  # which of the module's tensors is looked at next
        self._version: Any = None
        self._tensors: list[tuple[str, Tensor]] = []  # of the module as it was at that version
        self._form: Sums = {}

    def compare(
        self,
        spread: Spread,
        module: nn.Module,
        batch: Any,
        form: Any,
        read_setting: Callable[[], str],
    ) -> None:
        """Compare everything, if that is due.

        Args:
            spread: of the call.
            module: the source module.
            batch: the call's arguments.
            form: what a batch of another form differs in.
            read_setting: returns what the user said of the wrapper, which must agree too.

        Raises:
            RankError: something differs.
        """
        self._num_calls += 1
        if self._num_calls > _NUM_FIRST and form in self._forms:
            return
        if len(self._forms) >= _NUM_FORMS:
            self._forms.clear()
        self._forms.add(form)
        own = {
            "setting": {"arguments of DataParallel": _sum_text(read_setting())},
            "form": _read_form(module) | {"submodules and their settings": _sum_text(repr(module))},
            "module": _sum_module(module),
            "batch": {} if spread.is_local else _sum_batch(batch, None),
        }
        self.check(spread, spread.agree("first look", own))

    def note(
        self, spread: Spread, module: nn.Module, batch: Any, version: Any = None
    ) -> dict[str, Sums]:
        """A few entries of the batch, and a few tensors of the module: for :meth:`check`.

        Args:
            spread, module, batch: as for :meth:`compare`.
            version: another one whenever the module's tree or a tensor in it is another; None:
                not known.
        """
        if version is None or version != self._version:
            self._version = version
            self._tensors = _tensors_of(module)
            self._form = _read_form(module)
        tensors = self._tensors
        found: Sums = {}
        num_bytes = 0
        while len(found) < min(_NUM_IN_TURN, len(tensors)) and num_bytes < _BYTES_IN_TURN:
            name, tensor = tensors[self._turn % len(tensors)]
            self._turn += 1
            found[name] = _sum(tensor, None)
            num_bytes += 0 if is_lazy(tensor) else tensor.numel() * tensor.element_size()
        return {
            "form": self._form,
            "module": found,
            "batch": {} if spread.is_local else _sum_batch(batch, self._num_calls),
        }

    def check(self, spread: Spread, everyone: Sequence[Mapping[str, Sums]]) -> None:
        """Raise RankError where the ranks' checksums differ."""
        first = everyone[0]
        for kind in first:
            for rank, other in enumerate(everyone):
                if first[kind] == other[kind]:
                    continue
                names = [*first[kind], *other[kind]]
                name = next(n for n in names if first[kind].get(n) != other[kind].get(n))
                values = f"{first[kind].get(name)} and {other[kind].get(name)}"
                raise RankError(
                    _MESSAGES[kind].format(name=name, rank=rank, place=spread.title)
                    + f" (checksums {values})" * (kind in ("module", "batch"))
                )


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_MESSAGES = {
    "setting": (
        "rank {rank} has other {name} than rank 0 in {place}: every rank must wrap the same module "
        "in the same way"
    ),
    "form": (
        "the {name} differ between rank 0 and rank {rank} in {place}: every rank must treat the "
        "module alike (train(), eval(), requires_grad_(), attributes)"
    ),
    "module": (
        "{name!r} of the module differs between rank 0 and rank {rank} in {place}: every rank must "
        "start from the same parameters and change them alike; call torch.manual_seed with the "
        "same seed before the model is made, or load the same checkpoint"
    ),
    "batch": (
        "{name} differs between rank 0 and rank {rank} in {place}: with batch='global' every rank "
        "passes the same whole batch. Is a shuffle unseeded, or does a DistributedSampler cut the "
        "batches already, or split_loader without its model? For batches that are cut: "
        "batch='local' and samestep.split_loader(loader, model)"
    ),
}


_UNTOLD = "OVgG"  # arrays of objects, records, long doubles: their bytes say more than the values


def _sum_module(module: nn.Module) -> Sums:
    return {name: _sum(tensor, None) for name, tensor in _tensors_of(module)}


def _tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _read_form(module: nn.Module) -> Sums:
    """What decides which numbers are computed, beside the values."""
    modes = bytes(child.training for child in module.modules())
    needs = bytes(parameter.requires_grad for parameter in module.parameters())
    return {"modes of submodules": zlib.crc32(modes), "requires_grad": zlib.crc32(needs)}


def _sum_text(text: str) -> int:
    """A checksum of a description, but for addresses, for devices' numbers (``cuda:1``) and for the
    order in which sets are shown: these may be other ones in every process."""
    return zlib.crc32("".join(sorted(re.sub("0x[0-9a-fA-F]+|:[0-9]+", "", text))).encode())


def _sum_batch(batch: Any, turn: int | None) -> Sums:
    found: Sums = {}
    args, kwargs = batch
    named = [(f"args[{i}]", arg) for i, arg in enumerate(args)]
    named += [(f"kwargs[{key!r}]", value) for key, value in kwargs.items()]
    for name, tree in named:
        for path, leaf in iter_leaves(tree, name):
            if isinstance(leaf, Tensor):
                found[path] = _sum(leaf, turn)
            elif is_array(leaf) and leaf.dtype.char not in _UNTOLD:
                found[path] = _sum_array(leaf, turn)
            else:
                # NaN is not equal to itself, but to its text.
                is_plain = isinstance(leaf, (int, float, complex, str, bytes, type(None)))
                found[path] = repr(leaf) if is_plain else type(leaf).__qualname__
    return found


def _sum(tensor: Tensor, turn: int | None) -> Any:
    """A checksum of the bits of a tensor; with ``turn``, of some of its entries, each time others.

    The entries are not evenly spaced: every so manieth one could be the same column of each row.
    """
    if is_lazy(tensor):
        return None
    tensor = tensor.detach()
    form = (str(tensor.dtype), tuple(tensor.shape))
    if tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        return form
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    if turn is not None and flat.numel() > _NUM_PICKED:
        flat = flat[pick_entries(flat.numel(), _NUM_PICKED, turn).to(flat.device)]
    flat = flat.cpu().contiguous()
    return form if not flat.numel() else (*form, zlib.crc32(open_bytes(flat)))


def _sum_array(array: Any, turn: int | None) -> Any:
    """The same of a numpy array, which may have what no tensor has: its own dtypes and strides."""
    if turn is not None and array.size > _NUM_PICKED:
        picked = array.flat[pick_entries(array.size, _NUM_PICKED, turn).tolist()]
    else:
        picked = array
    return str(array.dtype), array.shape, zlib.crc32(picked.tobytes())
