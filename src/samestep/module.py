"""``DataParallel``: the whole batch in, the whole output out, the same step on K slots.

What it holds: the wrapper: its arguments, the pass-through for one slot, and what can be asked of
it. Its steps are in :mod:`samestep.runtime`; looking like the inner module from outside is in
:mod:`samestep.wrapper`.
Must not: contain any of the ideas it composes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch._compile import _disable_dynamo

from samestep.devices import Device, Slot, plan_slots, resolve_device
from samestep.mirror import start_alike
from samestep.options import Options
from samestep.plan import explain_plan
from samestep.rendezvous import find_comm
from samestep.replica import home_device
from samestep.replicas import ReplicaStats
from samestep.runtime import Runtime
from samestep.state import check_buffers
from samestep.wrapper import Wrapper

if TYPE_CHECKING:
    from samestep.auto import Choice

__all__ = ["DataParallel", "data_parallel"]


class DataParallel(Wrapper):
    """Run any module on several devices, as one step.

    The batch is cut into K shards, each runs on its slot's replica, outputs are joined, and
    gradients are summed into the one module, in a fixed order.

    Args:
        module: the source module; it stays the only owner of parameters, gradients and state.
        device_ids: devices, one per slot or fewer; repeated ones and ``"cpu"`` allowed. Default:
            every accelerator, else the CPU. ``SAMESTEP_REPLICAS=3`` gives three slots to every
            wrapper that names neither devices nor replicas.
        output_device: where outputs land; None: the device of shard 0.
        dim: the tensor dimension that counts rows.
        replicas: K. Default: one per device. ``"auto"``: the first call in training measures some
            steps on copies of the module and takes what is surely faster than the plain module, or
            the plain module; see :attr:`choice`.
        split: ``"chunk"`` (torch.chunk's sizes), ``"balanced"``, or K weights.
        in_dims: which dim of which argument counts rows, by parameter name or position; None in it
            gives an argument whole to every shard; ``"rows"`` cuts a list.
        out_dims: for outputs: a dim, or ``"mean"``, ``"sum"``, ``"first"``, ``"list"``, as a tree
            prefix or ``{"key/path": ...}``.
        reduction: what a 0-dim floating output becomes: ``"mean"`` weighted by rows, or ``"sum"``.
        buffers: ``"merge"``, ``"mean"``, ``"sum"``, ``"first"``, ``"max"``, ``"min"``, or a rule
            per name.
        sync_batch_norm: normalise with the whole batch's statistics.
        recompute: keep no activations; backward runs each shard's forward again, shard by shard, so
            that a batch takes the memory of the shards that run at one time.
        eager_backward: for modules that return their loss: each shard's backward follows its
            forward at once, so that activations of one shard exist per worker, and the shards are
            waited for once per step. What needs a gradient in forward's output must be 0-dim and
            floating; anything else in it must be detached. The gradients are multiplied by the
            gradient that arrives later: exact for 1 and other powers of two. Several losses must
            get the same one. Not with ``recompute``, float16 autocast or ``create_graph=True``.
        threads_per_replica: intra-op threads of a CPU slot; part of what fixes the bits.
        cuda_graphs: capture forward and backward of a shard as CUDA graphs, where that is sure to
            change nothing, and replay them for calls of the same form. Never run on an accelerator
            by its authors: see docs/guide.md.
        workers: threads that run CPU slots; None: one per core that this process may use, or the
            calling thread alone where that was measured to be faster. It does not change a bit.
        batch: with several ranks: ``"global"``, every rank passes the whole batch and gets the
            whole output; ``"local"``, each passes its own rows (see ``split_loader``) and gets
            theirs. What is 0-dim, such as a loss, is about the whole batch either way.
        process_group: the ranks that share the slots; None: all, of the group that exists or that
            torchrun's environment describes; without either this process is alone.

    Raises:
        TypeError, ValueError: an argument that cannot be met, with the reason and the remedy.

    Exactness:
        Run to run the same bits on the CPU. Equal to the plain module up to the order of additions
        if the model does not mix rows or BatchNorm is synchronised; see docs/numerics.md.

    Source:
        The interface of ``torch.nn.DataParallel``.

    Example:
        >>> model = DataParallel(nn.Linear(5, 2), replicas=2)
        >>> model(torch.randn(30, 5)).shape
        torch.Size([30, 2])
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        replicas: int | Literal["auto"] | None = None,
        split: str | Sequence[float] = "chunk",
        in_dims: Any = None,
        out_dims: Any = None,
        reduction: str = "mean",
        buffers: str | Mapping[str, str] = "merge",
        sync_batch_norm: bool = False,
        recompute: bool = False,
        eager_backward: bool = False,
        cuda_graphs: bool = False,
        threads_per_replica: int = 1,
        workers: int | None = None,
        batch: str = "global",
        process_group: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        comm = find_comm(process_group)
        is_auto = replicas == "auto"
        if is_auto:
            _check_auto(device_ids, comm.num_ranks, cuda_graphs, recompute)
        self._samestep_options = Options(
            slots=plan_slots(
                device_ids,
                1 if replicas == "auto" else replicas,
                rank=comm.rank,
                num_ranks=comm.num_ranks,
            ),
            output=None
            if output_device is None
            else resolve_device(output_device, argument="output_device"),
            dim=dim,
            split=split,
            in_dims=in_dims,
            out_dims=out_dims,
            reduction=reduction,
            sync_batch_norm=sync_batch_norm,
            recompute=recompute,
            eager_backward=eager_backward,
            cuda_graphs=cuda_graphs,
            threads_per_replica=threads_per_replica,
            workers=workers,
            batch=batch,
            num_ranks=comm.num_ranks,
        )
        check_buffers(buffers, module)
        start_alike(comm, module)
        self._samestep_runtime = Runtime(self._samestep_options, buffers, comm)
        # With one slot there is nothing to cut, and unless asked for more nothing to do.
        is_one = self.num_replicas == 1 and comm.num_ranks == 1
        self._samestep_is_single = is_one and not (recompute or cuda_graphs or is_auto)
        self._samestep_is_open = is_auto  # the number of replicas is not decided yet
        self._samestep_choice: Choice | None = None
        self._samestep_buffers = buffers
        self.module = module

    # -- The step ----------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on the whole batch; see the class."""
        if self._samestep_is_single:
            # As an attribute it takes ten times as long.
            module: Any = self._modules.get("module")
            if module is None:
                module = self.module
            if not self._samestep_runtime.can_watch:
                args, kwargs = self._samestep_runtime.to_slot(module, args, kwargs)
            return module(*args, **kwargs)
        if torch.compiler.is_compiling():
            return _run_uncompiled(self, args, kwargs)
        if self._samestep_is_open:
            return self._open_with(args, kwargs)
        return self._samestep_runtime.run(self.module, None, args, kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run another method of the module in parallel, cut and joined like forward.

        ``in_dims`` holds for the parameters of the same name; ``out_dims`` is about forward's
        outputs.

        Args:
            method: its name, such as ``"generate"``.

        Raises:
            AttributeError: the module has no such method.
        """
        function = getattr(self.module, method)
        if self._samestep_is_single or self._samestep_is_open:
            args, kwargs = self._samestep_runtime.to_slot(self.module, args, kwargs)
            return function(*args, **kwargs)
        return self._samestep_runtime.run(self.module, method, args, kwargs)

    def _open_with(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Decide the number of replicas with this batch, if it is one to decide with; run it."""
        from samestep.auto import apply_setting, can_choose, choose_replicas  # for few models

        options, buffers = self._samestep_options, self._samestep_buffers
        with self._samestep_runtime.lock:
            if self._samestep_is_open and can_choose(self.module):
                choice = choose_replicas(self.module, options, buffers, args, kwargs)
                self._samestep_choice = choice
                if choice.setting.replicas > 1:
                    home = home_device(self.module)
                    self._samestep_options = apply_setting(options, choice.setting, home)
                    self._samestep_runtime = Runtime(self._samestep_options, buffers)
                self._samestep_is_single = choice.setting.replicas == 1 and not options.recompute
                self._samestep_is_open = False
        if self._samestep_is_open:
            args, kwargs = self._samestep_runtime.to_slot(self.module, args, kwargs)
            return self.module(*args, **kwargs)
        return self.forward(*args, **kwargs)

    # -- Looking in --------------------------------------------------------------------------

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Say, argument by argument, what a call would do with it. Runs nothing.

        Example:
            >>> model = DataParallel(nn.Linear(5, 2), replicas=3)
            >>> print(model.explain(torch.randn(30, 5)))
            args[0] float32 [30, 5]: cut on dim 0 into 10 10 10
        """
        return explain_plan(self._samestep_runtime.plan(self.module, None, args, kwargs))

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The K slots."""
        return self._samestep_options.slots

    @property
    def num_replicas(self) -> int:
        """K, the number of slots."""
        return len(self._samestep_options.slots)

    @property
    def choice(self) -> Choice | None:
        """What ``replicas="auto"`` chose and why; None: not asked for, or not decided yet."""
        return self._samestep_choice

    def stats(self) -> ReplicaStats:
        """What the replicas have cost so far: builds, updates, bytes copied; and what of their
        calls was captured."""
        found, captures = self._samestep_runtime.replicas.stats(), self._samestep_runtime.captures
        if captures is None:
            return found
        return found._replace(num_replays=captures.num_replays, uncaptured=tuple(captures.reasons))

    def refresh(self, force: bool = False) -> None:
        """Bring all replicas up to date now.

        Args:
            force: copy every tensor that a replica holds as a copy: for writes through ``.data``,
                which torch does not count as changes.
        """
        runtime = self._samestep_runtime
        with runtime.lock:
            runtime.replicas.refresh(self.module, self.slots, force=force)

    def extra_repr(self) -> str:
        """What is shown by ``print(model)`` beside the module."""
        kinds = [str(slot.device) for slot in self.slots]
        text = f"slots=[{', '.join(kinds)}], split={self._samestep_options.split!r}"
        text += self._samestep_options.describe()
        if self._samestep_is_open:
            return f"replicas='auto', {text}"
        return text if self.choice is None else f"{text}, chosen: {self.choice}"


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run ``module`` once on several slots; the function form of :class:`DataParallel`.

    Args:
        module: the source module.
        inputs: a tuple of positional arguments, or one single argument.
        device_ids, output_device, dim: as in :class:`DataParallel`.
        module_kwargs: keyword arguments of the module.

    Source:
        The signature of ``torch.nn.parallel.data_parallel``.

    Example:
        >>> data_parallel(nn.Linear(5, 2), torch.randn(30, 5), ["cpu", "cpu"]).shape
        torch.Size([30, 2])
    """
    args = () if inputs is None else inputs if isinstance(inputs, tuple) else (inputs,)
    return DataParallel(module, device_ids, output_device, dim)(*args, **(module_kwargs or {}))


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------


def _check_auto(device_ids: Any, num_ranks: int, cuda_graphs: bool, recompute: bool) -> None:
    if recompute:
        raise ValueError(
            "replicas='auto' takes what is fastest, and recompute=True gives time for memory; "
            "write the number, such as replicas=8: more than run at a time, so that a shard fits"
        )
    if cuda_graphs:
        raise ValueError(
            "replicas='auto' measures steps without captured graphs, so its choice would not be "
            "about cuda_graphs=True; leave one of the two out"
        )
    if device_ids is not None:
        raise ValueError(
            f"replicas='auto' chooses the slots itself, and device_ids names them ({device_ids}); "
            f"leave one of the two out"
        )
    if num_ranks > 1:
        raise ValueError(
            f"replicas='auto' measures, and {num_ranks} ranks would not all measure the same; "
            f"write the number, the same in every rank, such as replicas={num_ranks}"
        )


@_disable_dynamo  # imports the compiler at the first call: only while it is at work anyway
def _run_uncompiled(model: DataParallel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Break the graph of a compiled caller here: threads and locks are nothing to compile."""
    return model._samestep_runtime.run(model.module, None, args, kwargs)
