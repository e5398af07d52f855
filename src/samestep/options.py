"""What the user said to ``DataParallel``, checked before anything else is done.

What it holds: :class:`Options`. Guarantees: an option that cannot be met is an error that names it
and says what to do; what is in an :class:`Options` needs no further check. Must not: look at the
module or at a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from samestep.devices import Slot
from samestep.merge import check_out_dims
from samestep.split import check_in_dims, plan_sizes

if TYPE_CHECKING:  # few wrappers need them
    from samestep.batches import Form
    from samestep.eager import EagerBackward

__all__ = ["Options"]


@dataclass(frozen=True, repr=False)
class Options:
    """What the user said, checked when it is made.

    Raises:
        TypeError, ValueError: an option that cannot be met.
    """

    slots: tuple[Slot, ...]
    output: torch.device | None
    dim: int
    split: str | Sequence[float]
    in_dims: Any
    out_dims: Any
    reduction: str
    sync_batch_norm: bool
    recompute: bool
    eager_backward: bool
    threads_per_replica: int
    workers: int | None
    batch: str
    num_ranks: int
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        for name in ("dim", "threads_per_replica"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{name} must be an int, got {number!r}")
        if self.threads_per_replica < 1:
            raise ValueError(
                f"threads_per_replica must be at least 1, got {self.threads_per_replica}"
            )
        if self.workers is not None and (
            isinstance(self.workers, bool) or not isinstance(self.workers, int) or self.workers < 1
        ):
            raise ValueError(f"workers must be a whole number of at least 1, got {self.workers!r}")
        if self.batch not in ("global", "local"):
            raise ValueError(f"batch is {self.batch!r}; it must be 'global' or 'local'")
        if self.batch == "local" and len(self.slots) < self.num_ranks:
            raise ValueError(
                f"batch='local' needs a slot in every rank (slots: {len(self.slots)}, ranks: "
                f"{self.num_ranks}); pass replicas={self.num_ranks} or more"
            )
        plan_sizes(len(self.slots), len(self.slots), self.split)  # raises for a bad split
        if not isinstance(self.split, str):
            object.__setattr__(self, "split", tuple(self.split))  # the user's list may change
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {self.reduction!r}; it must be 'mean' or 'sum'")
        for name in ("sync_batch_norm", "recompute", "eager_backward", "cuda_graphs"):
            flag = getattr(self, name)
            if not isinstance(flag, bool):
                raise TypeError(f"{name} must be True or False, got {flag!r}")
        if self.recompute and self.eager_backward:
            raise ValueError(
                "recompute=True and eager_backward=True both keep the activations of one shard at "
                "a time; use eager_backward=True alone if the module returns its loss, and "
                "recompute=True alone otherwise"
            )
        if self.cuda_graphs:
            self._check_graphs()
        check_in_dims(self.in_dims)
        check_out_dims(self.out_dims)

    @property
    def num_threads(self) -> int | None:
        """Of a shard on the CPU; None: the caller's, as one slot shares the cores with nobody."""
        is_one = len(self.slots) == self.num_ranks == 1
        return None if is_one else self.threads_per_replica

    def describe(self) -> str:
        """The options that are not what they are by default, for ``print(model)``."""
        said = {name: getattr(self, name) for name in _DEFAULTS}
        return "".join(f", {k}={v!r}" for k, v in said.items() if v != _DEFAULTS[k])

    def make_eager(self, rows: tuple[int, ...]) -> EagerBackward:
        """The backwards that follow the forwards of shards with these B_k."""
        from samestep.eager import EagerBackward

        return EagerBackward(rows, out_dims=self.out_dims, reduction=self.reduction, dim=self.dim)

    def make_form(self, names: tuple[str, ...]) -> Form:
        """What the options say of the batches of a loader, given the parameters' names."""
        from samestep.batches import Form

        return Form(self.dim, self.in_dims, names)

    def _check_graphs(self) -> None:
        kinds = {slot.device.type for slot in self.slots}
        if "cuda" not in kinds:
            raise ValueError(
                f"cuda_graphs=True captures what runs on CUDA devices, and no slot is on one (they "
                f"are on {', '.join(sorted(kinds))}); leave it out"
            )
        for name in ("sync_batch_norm", "recompute", "eager_backward"):
            if getattr(self, name):
                raise ValueError(
                    f"cuda_graphs=True replays forward and backward as they were captured, which "
                    f"{name}=True would change; leave one of the two out"
                )
        if self.num_ranks > 1:
            raise ValueError(
                f"cuda_graphs=True is there for one process, and there are {self.num_ranks} ranks; "
                f"leave it out"
            )


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_DEFAULTS: dict[str, Any] = {
    "dim": 0,
    "in_dims": None,
    "out_dims": None,
    "reduction": "mean",
    "sync_batch_norm": False,
    "recompute": False,
    "eager_backward": False,
    "cuda_graphs": False,
    "threads_per_replica": 1,
    "workers": None,
    "batch": "global",
}
