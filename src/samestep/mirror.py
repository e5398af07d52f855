"""Whether the ranks of a step see the same things: batches, parameters, random seeds.

What it holds: :class:`Mirror`. Why: every rank runs the user's own script, and where two of them
differ (a shuffle without a seed, a model built from other random numbers), training would go on and
mean nothing.

Guarantees: in the first calls, and whenever the batch has a new form, everything is compared by
checksum before any forward runs. In every call a few entries of each tensor of the batch and one
tensor of the module are, in turn, so that nothing that drifts apart stays unseen.
Must not: change anything.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import RankError
from samestep.spread import Spread
from samestep.tree import iter_leaves

__all__ = ["Mirror"]

_NUM_FIRST = 2  # calls in which everything is compared
_NUM_PICKED = 256  # entries of a tensor that are looked at in every call
_NUM_FORMS = 256

Sums = dict[str, Any]


class Mirror:
    """What one wrapper compares between ranks."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._forms: set[Any] = set()

    def compare(
        self, spread: Spread, module: nn.Module, batch: Any, form: Any, setting: Any
    ) -> None:
        """Compare everything, if that is due.

        Args:
            spread: of the call.
            module: the source module.
            batch: the call's arguments.
            form: what a batch of another form differs in.
            setting: what the user said of the wrapper, which must agree too.

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
            "setting": {"arguments of DataParallel": str(setting)},
            "module": _sum_module(module),
            "batch": {} if spread.is_local else _sum_batch(batch, _NUM_ALL),
        }
        self.check(spread, spread.agree("first look", own))

    def note(self, spread: Spread, module: nn.Module, batch: Any) -> dict[str, Sums]:
        """A few entries of the batch, and one tensor of the module: for :meth:`check`."""
        tensors = dict(module.named_parameters())
        names = list(tensors)
        turn = names[self._num_calls % len(names)] if names else ""
        return {
            "module": {turn: _sum(tensors[turn], _NUM_ALL)} if names else {},
            "batch": {} if spread.is_local else _sum_batch(batch, _NUM_PICKED),
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
                    _MESSAGES[kind].format(name=name, rank=rank, place=spread.place)
                    + f" (checksums {values})" * (kind != "setting")
                )


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_NUM_ALL = 1 << 62
_MESSAGES = {
    "setting": (
        "rank {rank} has other {name} than rank 0 in {place}: every rank must wrap the same module "
        "in the same way"
    ),
    "module": (
        "{name!r} of the module differs between rank 0 and rank {rank} in {place}: every rank must "
        "start from the same parameters and change them alike; call torch.manual_seed with the "
        "same seed before the model is made, or load the same checkpoint"
    ),
    "batch": (
        "{name} differs between rank 0 and rank {rank} in {place}: with batch='global' every rank "
        "passes the same whole batch. Is a shuffle unseeded, or does a DistributedSampler cut the "
        "batches already? For batches that are cut: batch='local' and samestep.split_loader"
    ),
}


def _sum_module(module: nn.Module) -> Sums:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: _sum(tensor, _NUM_ALL) for name, tensor in tensors}


def _sum_batch(batch: Any, num_entries: int) -> Sums:
    found: Sums = {}
    args, kwargs = batch
    for name, tree in [(f"args[{i}]", arg) for i, arg in enumerate(args)] + [
        (f"kwargs[{key!r}]", value) for key, value in kwargs.items()
    ]:
        for path, leaf in iter_leaves(tree, name):
            if isinstance(leaf, Tensor):
                found[path] = _sum(leaf, num_entries)
            elif isinstance(leaf, (int, float, complex, str, bytes, type(None))):
                found[path] = leaf
    return found


def _sum(tensor: Tensor, num_entries: int) -> Any:
    """A checksum of the bits of a tensor, or of some of its entries."""
    tensor = tensor.detach()
    form = (str(tensor.dtype), tuple(tensor.shape))
    if tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        return form
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    flat = flat[:: max(1, flat.numel() // num_entries)].cpu().contiguous()
    return form if not flat.numel() else (*form, zlib.crc32(flat.view(torch.uint8).numpy().data))
