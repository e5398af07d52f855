"""A replica: the module as one slot sees it.

What it holds: :class:`Replica`, one slot's copy of the module tree, and the questions that are
asked of modules before they are replicated. Why: ``torch.nn.parallel.replicate`` gives modules
without parameters.

How a tensor of the source module appears in a replica:

=========================  ===================================================================
parameter, or any tensor   an alias: a leaf of its own over the source's memory (no bytes), so that
that requires grad         each shard's graph ends in its replica; on another device a copy
any other tensor           a private copy: a forward may write it, and shards must not race
(buffers above all)
=========================  ===================================================================

Guarantees: a replica is a real module of the source's class, and whatever points into the source
points into the replica.
Must not: decide when a replica is out of date (the set of them does).
"""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from samestep.copies import Copies, Flat, lay_out
from samestep.devices import Slot
from samestep.errors import ReplicaError
from samestep.follow import Follower, Leaf
from samestep.holders import storage_of
from samestep.links import Link, Rows, as_leaf, copy_to, get_addresses
from samestep.norm import NormRecord
from samestep.pattern import Pattern
from samestep.snapshot import Snapshot

__all__ = ["LazyError", "Replica", "find_replica", "home_device"]


class LazyError(ReplicaError):
    """A parameter gets its shape from the first batch, so there is nothing to replicate yet."""


class Replica:
    """One slot's copy of the source module.

    Args:
        source: the module to replicate.
        slot: whose replica this is.
        share: False: hold copies even of parameters on the same device (as on another device).
        model: another replica of ``source`` as it is now: what was found out for it holds here.
        pattern: that of the model's follower.

    Attributes:
        module: the copy, a real module of the same class: the replica itself.
        links: by id of the source tensor.
        rows: by id of the source tensor, which of its rows are this replica's; others it holds
            whole.
        norms: what its BatchNorm modules saw in the last forward.
    """

    def __init__(
        self,
        source: nn.Module,
        slot: Slot,
        *,
        share: bool = True,
        written: Container[int] = (),
        rows: Mapping[int, Rows] = MappingProxyType({}),
        lock: threading.RLock | None = None,
        model: Replica | None = None,
        pattern: Pattern | None = None,
    ) -> None:
        self.slot = slot
        self.lock = lock or threading.RLock()
        self.norms: list[NormRecord] = []
        self.links: dict[int, Link] = {}
        self._share = share
        self._written = written
        self.rows = rows
        self._by_copy: dict[int, Link] = {}
        self._places: dict[int, tuple[Flat, Tensor]] = {}  # copies that have no link yet
        self.held = Copies([])
        #: Counts up whenever anything that it holds may have been exchanged.
        self.age = 0
        # Made when they are asked for, and again when tensors changed.
        self._links_by_path: dict[str, Link] | None = None
        self._objects: dict[str, Any] | None = None
        self._names: dict[int, str] = {}
        self._targets: dict[int, Any] = {}
        self.source = source
        self.home: torch.device
        self._storages: set[int]
        if model is None:
            self.home = home_device(source)
            self._storages = {storage_of(parameter) for parameter in source.parameters()} - {0}
        else:
            self.home, self._storages = model.home, model._storages
        with torch.inference_mode(False), torch.no_grad():
            if not (share and slot.device == self.home):
                self._lay_out(source.parameters())
            self.follower = self._copy_tree(model, pattern)
        self._places = {}
        self.module = self.follower.root
        self._targets = (
            {id(cell): i for i, cell in enumerate(self.follower.cells)}
            if model is None or pattern is None
            else model._targets
        )
        _registry[self.module] = weakref.ref(self)

    def _copy_tree(self, model: Replica | None, pattern: Pattern | None) -> Follower:
        devices = {self.home: self.slot.device}
        # Not a bound method: a replica that nobody has any more is free at once.
        leaf: Leaf = partial(Replica._link, weakref.proxy(self))
        if model is not None and pattern is not None:
            is_alike = self.slot.device == model.slot.device and not (self.rows or model.rows)
            leaves = {}
            for key, link in model.links.items():
                found = (link.is_alias, link.is_private, link.is_suspect)
                kind = found if is_alike else self._judge(link.source)
                leaves[key] = self._add_link(link.source, link.path, *kind)
            return model.follower.repeat(pattern, leaf, devices, leaves)
        follower = Follower(self.source, leaf, devices)
        for link in self.links.values():
            if isinstance(link.source, nn.Parameter) or link.source.__dict__:
                # What the user put on a tensor belongs to the replica's too.
                tags = link.source.__dict__
                follower.add_cell(tags, link.copy.__dict__, link.path, link.source)
        return follower

    def settle(self) -> None:
        """Take the replica for what it is now: the source module's equal, made ready to run."""
        self.index()
        self.snapshot = Snapshot(self.follower.targets)

    def original(self, value: Any) -> Any:
        """Return the source's object that ``value`` is this replica's copy of, or ``value``."""
        if isinstance(value, weakref.ref):
            found = self.original(value())
            return value if found is value() else weakref.ref(found)
        if isinstance(value, torch.device):
            return self.home if value == self.slot.device else value
        link = self._by_copy.get(id(value))
        return self.follower.original(value) if link is None else link.source

    def target(self, cell: Any) -> Any:
        """Return this replica's copy of a source cell; None if it has none."""
        index = self._targets.get(id(cell))
        return None if index is None else self.follower.targets[index]

    def name_cell(self, index: int) -> tuple[str, int]:
        """A name for a cell that is the same in every process: its path, and which with that."""
        path = self.follower.paths[index]
        return path, self.follower.paths[:index].count(path)

    def find_cell(self, path: str, number: int) -> Any:
        """Return the source cell of that name."""
        found = [i for i, known in enumerate(self.follower.paths) if known == path]
        return self.follower.cells[found[number]]

    def links_by_path(self) -> dict[str, Link]:
        """The links by the paths of their tensors."""
        if self._links_by_path is None:
            self._links_by_path = {link.path: link for link in self.links.values()}
        return self._links_by_path

    def source_objects(self) -> dict[str, Any]:
        """The source's tensors, modules and containers, by names that every process has."""
        if self._objects is None:
            self._objects = {f"tensor {link.path}": link.source for link in self.links.values()}
            for name, module in self.source.named_modules():
                self._objects[f"module {name}"] = module
            for index, cell in enumerate(self.follower.cells):
                path, number = self.name_cell(index)
                self._objects[f"cell {path} {number}"] = cell
            self._names = {id(value): name for name, value in self._objects.items()}
        return self._objects

    def source_names(self) -> dict[int, str]:
        """The same, by id."""
        self.source_objects()
        return self._names

    def update(self, cells: Iterable[Any]) -> int:
        """Bring the copies of these source cells up to date; returns how many there were."""
        indices = [self._targets[id(cell)] for cell in cells if id(cell) in self._targets]
        with torch.inference_mode(False), torch.no_grad():
            for index in indices:
                self.follower.update(index)
        self._places = {}
        return len(indices)

    def prune(self, live: set[int]) -> None:
        """Forget the tensors that the source no longer holds."""
        live = live | {id(tensor) for tensor in self.follower.loose}
        for key in [key for key in self.links if key not in live]:
            self._by_copy.pop(id(self.links.pop(key).copy), None)

    def index(self) -> None:
        """Sort the links by what must be asked of them at every call. Again when tensors
        changed."""
        stale = {id(link) for link in self.held.find_stale()}
        self.age += 1
        self._set_clocks()
        self._links_by_path, self._objects = None, None
        self._has_hooks = any(
            module._forward_hooks or module._forward_pre_hooks
            for _, module in self.follower.modules
        )
        self.paths = {id(link.copy): link.path for link in self.links.values()}
        self.aliases = [link for link in self.links.values() if link.is_alias]
        self.copies = [link for link in self.links.values() if not link.is_alias]
        self.held = Copies(self.copies, stale)
        # Beside each list of links the tensors that are asked, in a C loop, at every call.
        self._alias_tensors = [link.copy for link in self.aliases]
        self._addresses = get_addresses(self._alias_tensors)
        parameters = [link for link in self.copies if isinstance(link.source, nn.Parameter)]
        self._trained = self.aliases + parameters
        self._trained_tensors = [link.copy for link in self._trained]
        #: Of this replica's tensors, those that can accumulate gradients.
        self.graded = self._alias_tensors + [
            link.copy for link in self.copies if link.copy.requires_grad
        ]
        # Inference tensors have no versions; then nothing can be said about them.
        self._counted = [link for link in self.aliases if not link.copy.is_inference()]
        self._counted_tensors = [link.copy for link in self._counted]
        self._picked: tuple[frozenset[str], list[Link]] = frozenset(), []

    def pick(self, paths: frozenset[str]) -> list[Link]:
        """The links of the source's tensors at these paths that need a gradient. Remembered: what
        one step uses, the next uses too."""
        if self._picked[0] != paths:
            self._picked = (
                paths,
                [
                    link
                    for link in self.links.values()
                    if link.path in paths and link.source.requires_grad and link.rows is None
                ],
            )
        return self._picked[1]

    def begin(self) -> None:
        """A forward is about to run."""
        for record in self.norms:
            record.calls.clear()

    def watch(self) -> None:
        """Forwards are about to run, of which :meth:`find_raced` and :meth:`find_switched` tell."""
        self._versions = list(map(_get_version, self._counted_tensors))
        self._required = list(map(_needs_gradient, self._trained_tensors))

    def find_written(self) -> list[Link]:
        """Links whose copy the forward wrote, or gave other memory."""
        written = self.held.find_written() if self.copies else []
        try:
            is_same = list(map(Tensor.data_ptr, self._alias_tensors)) == self._addresses
        except RuntimeError:  # one has no one place
            is_same = False
        return written if is_same else written + self.find_moved()

    def find_moved(self) -> list[Link]:
        """Aliases that the forward gave other memory (``parameter.data = ...``)."""
        is_same = get_addresses(self._alias_tensors) == self._addresses
        return [] if is_same else [link for link in self.aliases if link.is_parted]

    def find_raced(self) -> list[Link]:
        """Aliases that the forward wrote in place: memory that all shards share."""
        now = list(map(_get_version, self._counted_tensors))
        if now == self._versions:
            return []
        pairs = zip(self._counted, self._versions, now, strict=True)
        return [link for link, before, after in pairs if before != after]

    def find_read(self) -> list[Tensor]:
        """What forwards only read, as a rule the parameters; not those that have no version."""
        copied = [link.copy for link in self.copies if not link.is_private]
        return [*self._counted_tensors, *(copy for copy in copied if not copy.is_inference())]

    def find_switched(self) -> list[Link]:
        """Links whose ``requires_grad`` the forward switched."""
        if list(map(_needs_gradient, self._trained_tensors)) == self._required:
            return []
        return [
            link for link in self._trained if link.copy.requires_grad != link.source.requires_grad
        ]

    def has_hooks(self) -> bool:
        """Whether a hook of the user's saw what the forward computed, and may have kept it."""
        return self._has_hooks or bool(nn.modules.module._global_forward_hooks)

    def has_gradients(self) -> bool:
        """Whether the forward called ``backward()`` itself."""
        return not all(map(operator.is_, map(_get_gradient, self.graded), _NONES))

    def drop_gradients(self) -> None:
        """Forget what the forward accumulated itself, in a call that is not to stand."""
        for copy in self.graded:
            copy.grad = None

    def _set_clocks(self) -> None:
        """See [Note: what tells of a change]."""
        for module, copied in self.follower.modules:
            if not module._buffers:
                continue
            buffers = dict(module._buffers.items())
            counter = self.links.get(id(buffers.get("num_batches_tracked")))
            for name in _UNVERSIONED & buffers.keys():
                if buffers[name] is None:
                    continue
                link = self.links[id(buffers[name])]
                link.is_unversioned = True
                if counter is None:
                    link.is_suspect = True
                else:
                    link.owner, link.clocks = copied, (counter.source, counter.copy)

    def attach(self) -> None:
        """Let the module keep this record alive: for replicas that no set will keep."""
        self.module.__dict__["_samestep_replica"] = self
        self.snapshot.take()

    def relink(self, sources: Sequence[Tensor]) -> None:
        """Drop the copies of ``sources``; the next update makes new ones."""
        for source in sources:
            link = self.links.pop(id(source), None)
            if link is not None:
                self._by_copy.pop(id(link.copy), None)
        with torch.inference_mode(False), torch.no_grad():
            self._lay_out(sources)

    def find_neighbours(self, sources: Iterable[Tensor]) -> list[Tensor]:
        """The tensors whose copies share memory with those of ``sources``."""
        links = [self.links[id(source)] for source in sources if id(source) in self.links]
        flats = {link.flat for link in links} - {None}
        return [link.source for link in self.copies if link.flat in flats] if flats else []

    def _lay_out(self, sources: Iterable[Tensor]) -> None:
        """Copy those of ``sources`` together that will be copied because the device is another."""
        far = [
            source
            for source in sources
            if not (self._share and source.device == self.slot.device)
            and id(source) not in self._written
            and id(source) not in self.rows
        ]
        self._places = lay_out(far, self.slot.device)

    def _link(self, source: Tensor, path: str) -> Tensor:
        found = self.links.get(id(source))
        if found is not None:
            return found.copy
        if is_lazy(source):
            raise LazyError(f"{path.lstrip('.')!r} has no shape yet")
        return self._add_link(source, path, *self._judge(source))

    def _judge(self, source: Tensor) -> tuple[bool, bool, bool]:
        """Whether the copy of a tensor is an alias, is private, is suspect; see :class:`Link`."""
        is_suspect = id(source) in self._written
        is_parameter = isinstance(source, nn.Parameter) or source.requires_grad
        if not is_parameter and storage_of(source) in self._storages:
            # A parameter's memory under another name (``weight.data``): it changes with the
            # parameter, and no version tells.
            is_parameter, is_suspect = True, not self._share or source.device != self.slot.device
        is_private = is_suspect or id(source) in self.rows or not is_parameter
        is_alias = self._share and not is_private and source.device == self.slot.device
        return is_alias, is_private, is_suspect

    def _add_link(
        self, source: Tensor, path: str, is_alias: bool, is_private: bool, is_suspect: bool
    ) -> Tensor:
        rows = self.rows.get(id(source))
        flat, data = self._places.pop(id(source), (None, source))
        if flat is None:
            if rows is not None:
                data = data.narrow(*rows)
            data = data.detach() if is_alias else copy_to(data.detach(), self.slot.device)
        copy = as_leaf(data, source)
        tags = self.target(source.__dict__) if self._targets else None
        if tags is not None:
            copy.__dict__ = tags  # a parameter that was linked before keeps what hangs on it
        link = Link(source, copy, path, is_alias, is_private, is_suspect, rows=rows, flat=flat)
        self.links[id(source)] = self._by_copy[id(copy)] = link
        return copy


def find_replica(module: nn.Module) -> Replica | None:
    """Return the record of a replica that is in use; None for any other module."""
    found = _registry.get(module)
    return None if found is None else found()


def home_device(module: nn.Module) -> torch.device:
    """Return the one device on which the module's parameters and buffers lie; the CPU if none.

    Raises:
        ReplicaError: they lie on several devices.
    """
    found: dict[torch.device, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        found.setdefault(tensor.device, name)
        if len(found) > 1:
            (first, one), (second, other) = found.items()
            raise ReplicaError(
                f"the module lies on several devices ({one!r} on {first}, {other!r} on {second}); "
                f"a replica needs one. Move it to one device, or leave it unwrapped: it is "
                f"spread already"
            )
    return next(iter(found), torch.device("cpu"))


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_UNVERSIONED = {"running_mean", "running_var"}
_get_version = operator.attrgetter("_version")
_get_gradient = operator.attrgetter("grad")
_needs_gradient = operator.attrgetter("requires_grad")
_NONES = itertools.repeat(None)
# Weak on both sides: a replica belongs to its set.
_registry: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Replica]] = weakref.WeakKeyDictionary()
