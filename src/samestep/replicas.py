"""Replicas: the module as each slot sees it, kept from call to call and always fresh.

What it holds: :class:`ReplicaSet`: all replicas of a module, and what is needed to see at the next
call that nothing has changed. Why:
``torch.nn.parallel.replicate`` copies every parameter at every call and returns modules without
parameters; here a replica is a real module, made once.

Guarantees: :meth:`ReplicaSet.refresh` returns replicas that equal the source module as it is now.
If nothing changed since the last call it copies no byte and makes no tensor.
Must not: run a forward, or write to the source module.

[Note: what is noticed]
An attribute, container entry or hook that was exchanged is seen by identity; an in-place write by
the tensor's version; ``p.data = ...`` and ``module.to(...)`` by the address; a flipped
``requires_grad`` by its value. Aliases need no version: their memory is the source's. Not seen: a
write through ``.data`` into a tensor that is held as a copy (``refresh(force=True)`` is for that).
"""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from samestep.devices import Slot
from samestep.homing import BringHome
from samestep.links import Carried, Rows, Stamps
from samestep.pattern import Pattern
from samestep.replica import Replica
from samestep.snapshot import Snapshot

__all__ = ["ReplicaSet", "ReplicaStats"]


class ReplicaStats(NamedTuple):
    """What a :class:`ReplicaSet` did since it was made.

    Attributes:
        num_builds: replicas built from nothing.
        num_updates: cells (dictionaries, lists) brought up to date.
        num_copied: tensors copied to bring replicas up to date (those of a build not counted).
        copied_bytes: their bytes.
        num_replays: with ``cuda_graphs=True``, how many shards' forwards were replayed.
        uncaptured: why some were not.
    """

    num_builds: int
    num_updates: int
    num_copied: int
    copied_bytes: int
    num_replays: int = 0
    uncaptured: tuple[str, ...] = ()


class ReplicaSet:
    """The replicas of one source module, by slot.

    Args:
        share: see :class:`Replica`.
        prepare: called with each new replica, to install what its forward needs (statistics).
    """

    def __init__(
        self, *, share: bool = True, prepare: Callable[[Replica], None] | None = None
    ) -> None:
        self._share = share
        self._prepare = prepare or (lambda replica: None)
        self._counts = [0, 0, 0, 0]
        self.lock = threading.RLock()  # held while leaves of the replicas accumulate gradients
        self._source: nn.Module | None = None
        self._written: dict[int, Tensor] = {}
        self._carried = Carried()
        #: Per shard of the last call, its rows of tensors on the module; empty if there are none.
        self.carried: list[dict[int, Rows]] = []
        #: Counts up whenever a module was exchanged or train()/eval() was called.
        self.generation = 0
        self._num_lists = 0
        self._number = next(_numbers)
        self.clear()

    def stats(self) -> ReplicaStats:
        """What was done so far."""
        builds, updates, copied, size = self._counts
        return ReplicaStats(builds, updates, copied, size)

    @property
    def version(self) -> tuple[int, int, int]:
        """After a refresh: another one if, since an earlier refresh of this or another set,
        anything in the module's tree or a tensor's memory or ``requires_grad`` was exchanged."""
        return self._number, self.generation, self._num_lists

    def renew(self) -> None:
        """Start anew in a forked child: a call may have been half done, and the lock held."""
        self.lock = threading.RLock()
        self.clear()

    def clear(self) -> None:
        """Drop every replica; the next refresh builds them anew."""
        self._replicas: dict[int, Replica] = {}
        self._snapshot: Snapshot | None = None
        self._modules: list[nn.Module] = []
        self._types: list[type] = []
        self._untracked: Snapshot | None = None
        self._dirty: dict[int, Any] = {}
        self._steady: Snapshot | None = None  # of every cell there is; see _follow
        self._scripted: list[tuple[Any, Any]] = []
        self._is_cut = False  # whether a replica may hold some rows of a tensor only
        self._stamps = Stamps([])  # of every tensor of the source
        self._listed = False  # whether they are those of the tree as it is now
        #: Whether the module holds a random generator, from which a forward may begin to draw.
        self.has_generator = False
        self._moved: list[Tensor] = []
        self.generation += 1

    def mark_dirty(self, cells: Sequence[Any]) -> None:
        """A forward changed its copies of these source cells: renew them at the next refresh."""
        self._dirty.update((id(cell), cell) for cell in cells)

    def carry(self, cell: Any, key: Any, tensors: Sequence[tuple[Tensor, int]]) -> None:
        """Tensors that a step left at ``place`` hold one entry per row, on the dim given."""
        self._carried.note(cell, key, tensors)

    def mark_moved(self, tensors: Sequence[Tensor]) -> None:
        """A forward gave its aliases of these tensors other memory: make new ones."""
        self._moved.extend(tensors)

    def recover(self) -> None:
        """Forget what forwards left in the replicas: at the next refresh they equal the source."""
        for replica in self._replicas.values():
            if not replica.snapshot.is_current():  # a tenth of the time that the list takes
                cells = replica.follower.cells
                self.mark_dirty([cells[index] for index in replica.snapshot.changed()])
            self.mark_moved([link.source for link in replica.find_moved()])
            if replica.has_gradients():
                replica.drop_gradients()

    def make_private(self, tensors: Sequence[Tensor]) -> None:
        """Forwards write these tensors: let each replica have a copy of its own from now on."""
        self._written.update((id(tensor), tensor) for tensor in tensors)
        self.clear()

    def refresh(
        self,
        source: nn.Module,
        slots: Sequence[Slot],
        *,
        sizes: Sequence[int] = (),
        shards: Sequence[int] | None = None,
        force: bool = False,
    ) -> list[Replica]:
        """Return the replicas of ``slots``, equal to ``source`` as it is now.

        Args:
            source: the source module.
            slots: those that have a shard in this call.
            sizes: B_k of each shard; needed where state is carried from call to call, row by row.
            shards: which of those shards the slots run; None: all, in order.
            force: copy every tensor that is held as a copy, whatever its version says.

        Raises:
            ReplicaError: the module lies on several devices, or a function in it cannot be rebound.
        """
        if source is not self._source:
            self.clear()
            self._source = source
        self.carried = self._carried.plan(sizes) if self._carried.places else []
        plans: dict[int, dict[int, Rows]] = {}
        if self.carried:
            places = range(len(slots)) if shards is None else shards
            plans = {s.index: self.carried[k] for s, k in zip(slots, places, strict=True)}
            self._is_cut = True
        if self._is_cut:
            for slot in slots:
                self._cut_anew(slot, plans.get(slot.index, {}))
        if self._snapshot is not None and not (self._follow() and self._follow_tensors()):
            self.clear()
        indices = list(map(_get_index, slots))
        if not self._replicas.keys() >= set(indices):
            missing = [slot for slot in slots if slot.index not in self._replicas]
            self._build(source, missing, plans)
        replicas = list(map(self._replicas.__getitem__, indices))
        if not self._listed:
            self._list_tensors()
        for replica in replicas:
            if replica.copies:
                self._renew(replica, force)
        return replicas

    def restore(self, replica: Replica) -> None:
        """Undo what a forward left in one replica.

        Replicas of several slots may be restored at one time, as long as the source stays as it is.
        """
        for record in replica.norms:
            record.calls.clear()
        if not replica.snapshot.is_current():
            cells = replica.follower.cells
            replica.update([cells[index] for index in replica.snapshot.changed()])
            self._prepare(replica)
            replica.index()
            replica.snapshot.take()
            self._steady = None
        if not replica.held.is_at_rest():
            self._renew(replica, force=False)
            replica.held.rest()

    # -- Following the module tree -----------------------------------------------------------

    def _cut_anew(self, slot: Slot, rows: Mapping[int, Rows]) -> None:
        """Let the slot's replica hold these rows of what is carried from call to call."""
        replica = self._replicas.get(slot.index)
        if replica is None or replica.rows == rows:
            return
        ids = {key for key in {*rows, *replica.rows} if rows.get(key) != replica.rows.get(key)}
        replica.rows = rows
        replica.relink([link.source for key, link in replica.links.items() if key in ids])
        self.mark_dirty([cell for cell in replica.follower.cells if _holds(cell, ids)])

    def _build(
        self,
        source: nn.Module,
        slots: Sequence[Slot],
        plans: Mapping[int, Mapping[int, Rows]],
    ) -> None:
        model: Replica | None = None
        pattern: Pattern | None = None
        for slot in slots:
            replica = Replica(
                source,
                slot,
                share=self._share,
                written=self._written,
                rows=plans.get(slot.index, {}),
                lock=self.lock,
                model=model,
                pattern=pattern,
            )
            self._prepare(replica)
            replica.settle()
            self._replicas[slot.index] = replica
            if model is None and len(slots) > 1:
                model, pattern = replica, replica.follower.pattern()
        self._counts[0] += len(slots)
        self._steady = None
        self._listed = False
        if self._snapshot is None:
            follower = self._replicas[slots[0].index].follower
            self._snapshot = Snapshot(follower.cells)
            self._untracked = Snapshot(follower.untracked)
            self._modules = [module for module, _ in follower.modules]
            self._types = list(map(type, self._modules))

    def _follow(self) -> bool:
        """Bring all replicas up to date; False if that needs new ones."""
        assert self._snapshot is not None
        assert self._untracked is not None
        for scripted, target in self._scripted:
            if scripted.training != target.training:
                target._c.setattr("training", scripted.training)
                self.generation += 1
        # One look at everything, where the last call found everything as it was.
        if self._steady is not None and not self._dirty and self._steady.is_current():
            return list(map(type, self._modules)) == self._types
        self._steady = None
        if not self._untracked.is_current():
            return False
        if list(map(type, self._modules)) != self._types:
            return False  # somebody gave a module another class
        for replica in self._replicas.values():
            if not replica.snapshot.is_current():  # a backward wrote it: that stays in the replica
                written = replica.snapshot.changed()
                self.mark_dirty([replica.follower.cells[index] for index in written])
        if self._snapshot.is_current() and not self._dirty:
            followers = [replica.follower for replica in self._replicas.values()]
            cells = followers[0].cells + followers[0].untracked
            self._steady = Snapshot(cells + [target for f in followers for target in f.targets])
            return True
        changed = dict(self._dirty)
        first = next(iter(self._replicas.values())).follower
        for index in self._snapshot.changed():
            cell, before = first.cells[index], self._snapshot.content(index)
            new = [value for value in _values(cell) if not _contains(_values(before), value)]
            if not all(_is_known(r, value) for r in self._replicas.values() for value in new):
                return False
            if isinstance(cell, dict) and cell.get("training") is not before.get("training"):
                self.generation += 1
            changed[id(cell)] = cell
        self._dirty = {}
        self._snapshot.take()
        self._update(list(changed.values()))
        return True

    def _update(self, cells: Sequence[Any]) -> None:
        assert self._snapshot is not None
        live = {id(tensor) for tensor in self._snapshot.tensors()}
        for replica in self._replicas.values():
            self._counts[1] += replica.update(cells)
            self._prepare(replica)
            replica.prune(live)
            replica.index()
            replica.snapshot.take()
        self._steady = None
        self._listed = False

    # -- Following tensors -------------------------------------------------------------------

    def _follow_tensors(self) -> bool:
        """Make new aliases where a tensor's memory was exchanged; False if that needs new
        replicas."""
        # A switched requires_grad too: an older graph needs its leaf as it was.
        moved = self._moved + self._stamps.find_changed()
        if not moved:
            return True
        self._moved = []
        loose = {id(t) for r in self._replicas.values() for t in r.follower.loose}
        if any(id(tensor) in loose for tensor in moved):
            return False
        self._relink(moved)
        self._listed = False
        return True

    def _list_tensors(self) -> None:
        """Note the tensors of the tree as it is now, and carry ``requires_grad`` over."""
        first = next(iter(self._replicas.values()))
        self._stamps = Stamps([link.source for link in first.links.values()])
        self._listed = True
        self._num_lists += 1
        followers = [replica.follower for replica in self._replicas.values()]
        self._scripted = [pair for follower in followers for pair in follower.scripted]
        self.has_generator = any(follower.has_generator for follower in followers)
        for replica in self._replicas.values():
            for link in replica.links.values():
                if link.copy.requires_grad != link.source.requires_grad:
                    link.copy.requires_grad_(link.source.requires_grad)
                if link.copy.requires_grad and not link.is_watched:
                    link.is_watched = True
                    BringHome(link.source).watch(link.copy)

    def _relink(self, moved: list[Tensor]) -> None:
        assert self._snapshot is not None
        follower = next(iter(self._replicas.values())).follower
        tensors = {id(tensor): tensor for tensor in moved}
        for replica in self._replicas.values():
            tensors |= {id(tensor): tensor for tensor in replica.find_neighbours(moved)}
        holding = [cell for cell in follower.cells if _holds(cell, tensors.keys())]
        for replica in self._replicas.values():
            replica.relink(list(tensors.values()))
        self._update(holding)

    def _renew(self, replica: Replica, force: bool) -> None:
        """Copy what is held as a copy and is out of date: in the source, or written by a
        forward."""
        num_tensors, num_bytes = replica.held.renew(force=force)
        self._counts[2] += num_tensors
        self._counts[3] += num_bytes


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_numbers = itertools.count()
_get_index = operator.attrgetter("index")


def _values(cell: Any) -> Iterable[Any]:
    return cell.values() if isinstance(cell, dict) else cell


def _contains(values: Iterable[Any], wanted: Any) -> bool:
    return any(value is wanted for value in values)


def _is_known(replica: Replica, value: Any) -> bool:
    """Whether ``value`` can be copied without new cells: a new parameter brings its tags along."""
    if isinstance(value, nn.Parameter):
        return id(value) in replica.links
    return replica.follower.is_known(value)


def _holds(cell: Any, ids: Container[int]) -> bool:
    return any(_is_in(value, ids) for value in _values(cell))


def _is_in(value: Any, ids: Container[int]) -> bool:
    if isinstance(value, weakref.ref):
        return id(value()) in ids
    return id(value) in ids or (type(value) is tuple and any(_is_in(v, ids) for v in value))
