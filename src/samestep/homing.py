"""A gradient that reached a shard's leaf past the stitch, brought to the tensor it belongs to.

What it holds: :class:`BringHome`. Must not: do anything while the stitch is at work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samestep.context import current_shard

__all__ = ["BringHome"]


class BringHome:
    """Passes on a gradient that reached a shard's leaf past the stitch.

    A tensor can leave a shard by another way than the output: a hook that appends activations to a
    list of the user's. A loss on it walks the shard's graph in the caller's own backward and ends
    in the leaf; the gradient belongs to the tensor that the leaf stands for.

    Args:
        source: that tensor.
    """

    def __init__(self, source: Tensor) -> None:
        self._source = source

    def watch(self, leaf: Tensor) -> None:
        """Take what arrives in ``leaf`` from now on."""
        leaf.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]  # torch's

    def __call__(self, leaf: Tensor) -> None:
        if current_shard() is None:  # else the stitch, or a backward inside forward, is at work
            gradient, leaf.grad = leaf.grad, None
            if gradient is not None:
                gradient = gradient.to(self._source.device)
                torch.autograd.backward([self._source], [gradient], retain_graph=True)
