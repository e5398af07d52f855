"""``split_loader``: any loader, cut into each rank's own rows, with a position to resume from.

What it holds: :func:`split_loader` and the loader it returns. Why: torch's ``DistributedSampler``
repeats rows to make the ranks even and gives each rank other batches than the plain loader has;
here every batch is the plain loader's batch, and each rank has its rows of it.

Guarantees: the ranks' rows of a batch, put end to end, are the plain loader's batch: nothing is
padded, repeated or dropped. Where rows are fetched by index a rank fetches its own only. The
generators that shuffle are drawn from as by the plain loader. After ``load_state_dict`` the rest of
the epoch is the same as if it had never been left.
Must not: fetch or collate by itself (torch's DataLoader does), or speak to torch.distributed.

[Note: rows that draw]
In a loader without workers the rows are fetched in the script's own process, and what they draw
(augmentation) comes from the generator that also shuffles. Ranks fetch different rows: after the
first batch their generators, and in the next epoch their shuffles, would differ. So with several
ranks each fetch is seeded from (epoch, batch, rank) and the generators are put back afterwards, as
torch itself seeds its worker processes.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from samestep.batches import Form, empty_batch, is_collated, plan_batch
from samestep.devices import owner_of_slot
from samestep.errors import SplitError
from samestep.module import DataParallel
from samestep.plan import plan_sizes
from samestep.position import Tape, check_position, start_of_epoch
from samestep.randomness import State, read_state, seed_all, write_state
from samestep.rendezvous import find_comm
from samestep.rows import describe_value

__all__ = ["SplitLoader", "rank_rows", "split_loader"]


def split_loader(
    loader: Iterable[Any],
    model: DataParallel | None = None,
    *,
    replicas: int | None = None,
    split: str | Sequence[float] = "chunk",
    process_group: Any = None,
) -> SplitLoader:
    """Make every batch of a loader into this rank's own rows of it, and remember the position.

    Batches are cut as the wrapper cuts them: into K shards, of which each rank has a contiguous
    run. With one rank they are the loader's own batches. Give ``shuffle=True`` or any sampler as in
    a script for one device, with the same seed on every rank.

    Args:
        loader: a ``DataLoader``, or any iterable of batches. Of a ``DataLoader`` over a map-style
            dataset only this rank's rows are fetched; other batches are read whole and cut.
        model: the wrapper that K, ``split``, ``dim`` and ``in_dims`` are taken from; what
            ``in_dims`` says of a parameter holds for the batch's item of that position or name.
            With ``batch="global"`` it takes whole batches, so nothing is cut then, and only the
            position is kept.
        replicas: K, if there is no ``model``; None: one per rank.
        split: sizes of the shards, as in ``DataParallel``, if there is no ``model``.
        process_group: the torch.distributed group whose ranks share the batches; None: all.

    Returns:
        An iterable with the attributes and the length of ``loader``, and ``state_dict()`` and
        ``load_state_dict()`` for the position, which :func:`samestep.save` and
        :func:`samestep.load` use. It can be iterated any number of times. A rank without rows in a
        batch gets the same structure with 0 rows.

    Raises:
        TypeError: ``loader`` cannot be iterated or is from here already, or ``model`` is no
            ``DataParallel``.
        ValueError: the loader's sampler already gives each rank other rows, or its batches come in
            no fixed order (``in_order=False``); ``replicas``, ``split`` or ``process_group``
            contradict ``model``.
        SplitError: in the iteration: a batch that is read whole has no rows to count, or it is not
            clear whether a list holds rows or columns.

    Exactness:
        The same rows in the same order for every number of ranks. What rows *draw* while they are
        fetched depends on the ranks, and with worker processes on when they were started: give each
        row a seed of its own where that matters.

    Example:
        >>> rows = torch.utils.data.TensorDataset(torch.arange(5))
        >>> loader = split_loader(DataLoader(rows, batch_size=3))
        >>> [batch.tolist() for (batch,) in loader]
        [[0, 1, 2], [3, 4]]
    """
    if isinstance(loader, SplitLoader):
        raise TypeError("loader is from split_loader already: its batches are this rank's rows")
    if not isinstance(loader, Iterable):
        raise TypeError(f"loader must be an iterable of batches, got {type(loader).__name__}")
    if model is not None and not isinstance(model, DataParallel):
        raise TypeError(f"model must be a samestep.DataParallel, got {type(model).__name__}")
    comm = find_comm(process_group)
    rank, num_ranks, form = comm.rank, comm.num_ranks, Form()
    if model is not None:
        options = model._samestep_options
        split = split if isinstance(split, str) else tuple(split)
        _check_agrees("replicas", replicas, None, model.num_replicas)
        _check_agrees("split", split, "chunk", options.split)
        _check_agrees("the number of ranks", num_ranks, None, options.num_ranks)
        replicas, split = model.num_replicas, options.split
        form = model._samestep_runtime.form(model.module)
        if options.batch == "global":
            rank, num_ranks = 0, 1  # every rank passes the whole batch
    _check_loader(loader)
    form = form._replace(is_collated=is_collated(loader))
    num_slots = comm.num_ranks if replicas is None else replicas
    plan_sizes(1, num_slots, split)  # refuses what does not fit now, not in the first epoch
    return SplitLoader(loader, _Share(num_slots, split, rank, num_ranks, form))


def rank_rows(
    num_rows: int, num_slots: int, split: str | Sequence[float], rank: int, num_ranks: int
) -> tuple[int, int]:
    """Return (start, stop): the rows of a batch that belong to one rank; perhaps none.

    Example:
        >>> [rank_rows(10, 4, "chunk", rank, 2) for rank in range(2)]  # 3 3 | 3 1
        [(0, 6), (6, 10)]
    """
    start = stop = 0
    for slot, size in enumerate(plan_sizes(num_rows, num_slots, split)):
        owner = owner_of_slot(slot, num_slots, num_ranks)
        start += size * (owner < rank)
        stop += size * (owner <= rank)
    return start, stop


class _Share(NamedTuple):
    """Which rows of every batch are this rank's."""

    num_slots: int
    split: str | Sequence[float]
    rank: int
    num_ranks: int
    form: Form

    @property
    def is_all(self) -> bool:
        return self.num_ranks == 1

    def rows(self, num_rows: int) -> tuple[int, int]:
        return rank_rows(num_rows, self.num_slots, self.split, self.rank, self.num_ranks)

    def cut(self, batch: Any) -> Any:
        """Return this rank's rows of a batch."""
        if self.is_all:
            return batch
        found = plan_batch(batch, self.form)
        num_rows = found.plan.num_rows
        if num_rows is None:
            raise SplitError(
                f"a batch ({describe_value(batch)}) holds nothing that counts rows, so it cannot "
                "be cut into the ranks' own; let the loader yield tensors or lists, or say by "
                "in_dims= of the DataParallel what has rows"
            )
        start, stop = self.rows(num_rows)
        return found.cut((start, stop - start, num_rows - stop))[1]


# --------------------------------------------------------------------------------------------------
# The loader
# --------------------------------------------------------------------------------------------------


class SplitLoader:
    """What :func:`split_loader` returns."""

    def __init__(self, loader: Any, share: _Share) -> None:
        self.loader = loader
        self._share = share
        self._keeps_position = _has_state(loader)
        self._generators = _find_generators(loader)
        self._pending: dict[str, Any] | None = None  # where the next iteration continues
        self._tape: Tape | None = None  # of the epoch that is under way
        self._twin: DataLoader[Any] | None = None
        if not self._keeps_position and _is_indexed(loader):
            self._batches = _RankBatches(loader, share, self._generators)
            self._twin = _make_twin(loader, share, self._batches)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":  # not there yet: a copy is being filled
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        if self._keeps_position:
            return map(self._share.cut, self.loader)
        position, self._pending = self._pending or start_of_epoch(), None
        tape = self._tape = Tape(self._generators, position)
        if self._twin is None:
            iterator = tape.open(lambda: tape.begin(lambda: iter(self.loader)))
            return self._follow(tape, self._read(tape, iterator))
        twin = self._twin
        self._batches.start(tape)
        iterator = tape.open(lambda: iter(twin))
        return self._follow(tape, self._fetch(iterator, self._batches.is_empty))

    def _follow(self, tape: Tape, batches: Iterator[Any]) -> Iterator[Any]:
        """Count what is delivered."""
        for batch in batches:
            tape.num_batches += 1
            yield batch
        if self._tape is tape:
            self._tape = None

    def _fetch(self, iterator: Iterator[Any], is_empty: deque[bool]) -> Iterator[Any]:
        """Batches of which only this rank's rows are fetched."""
        batches = self._batches
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                batches.put_back()
            if batches.cut_after:
                batch = self._share.cut(batch)
            elif is_empty.popleft():
                batch = empty_batch(batch, self._share.form)
            yield batch

    def _read(self, tape: Tape, iterator: Iterator[Any]) -> Iterator[Any]:
        """Batches that every rank reads whole."""
        num_skipped, done = tape.num_batches, object()
        while (batch := tape.draw(lambda: next(iterator, done))) is not done:
            if num_skipped:
                num_skipped -= 1
            else:
                yield self._share.cut(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: in the epoch under way (also one left by ``break``) or before one.

        It is the same on every rank, and can be loaded on another number of them.
        """
        if self._keeps_position:
            return {"loader": self.loader.state_dict()}
        if self._pending is not None:
            position = self._pending
        else:
            position = start_of_epoch() if self._tape is None else self._tape.position()
        own = read_state(self._generators)
        return {**position, "own": {k: v for k, v in own.items() if k.startswith("own")}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue where ``state`` was taken.

        The batches before that are not fetched again if the dataset is map-style; others are read
        and passed over.

        Raises:
            ValueError: ``state`` is not from the ``state_dict`` of a loader of this kind.
        """
        if self._keeps_position:
            if set(state) != {"loader"}:
                raise ValueError("this position is not from a loader that keeps its own")
            self.loader.load_state_dict(state["loader"])
            return
        position = check_position(state)
        write_state(position["own"], self._generators)
        self._pending, self._tape = position, None


class _RankBatches:
    """The batch sampler that stands in for the loader's: each batch's indices, or some of them."""

    def __init__(
        self, loader: DataLoader[Any], share: _Share, generators: Sequence[torch.Generator]
    ) -> None:
        self.sampler: Any = loader.batch_sampler
        self.cut_after = self.sampler is None  # no batches of indices: an index is a batch
        if self.cut_after:
            self.sampler = loader.sampler
        self._share = share
        self._generators = generators
        # See [Note: rows that draw].
        self._must_seed = loader.num_workers == 0 and not share.is_all and not self.cut_after
        self._before: State | None = None
        self.is_empty = deque[bool]()  # of the batches that were asked for, in their order
        self._tape: Tape | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def start(self, tape: Tape) -> None:
        self._tape = tape

    def __iter__(self) -> Iterator[Any]:
        tape = self._tape
        assert tape is not None
        is_empty = self.is_empty = deque[bool]()
        return self._draw(tape, tape.begin(lambda: iter(self.sampler)), is_empty)

    def _draw(self, tape: Tape, indices: Iterator[Any], is_empty: deque[bool]) -> Iterator[Any]:
        done = object()
        num_skipped, number = tape.num_batches, 0
        while (batch := tape.draw(lambda: next(indices, done))) is not done:
            number += 1
            if number <= num_skipped:
                continue
            if not self.cut_after:
                batch = self._choose(batch, is_empty)
            if self._must_seed:
                self._before = read_state(self._generators)
                seed_all(_mix(tape.seed, number, self._share.rank))
            yield batch

    def _choose(self, indices: Any, is_empty: deque[bool]) -> Any:
        if self._share.is_all:
            is_empty.append(False)
            return indices
        if not hasattr(indices, "__getitem__"):
            indices = list(indices)
        start, stop = self._share.rows(len(indices))
        is_empty.append(start == stop)
        # Without rows of its own a rank fetches one, for the structure of the batch.
        return indices[start:stop] if start < stop else indices[:1]

    def put_back(self) -> None:
        """The fetch is over."""
        if self._before is not None:
            write_state(self._before, self._generators)
            self._before = None


class _WorkerInit:
    """``worker_init_fn`` that lets the workers of each rank draw other numbers."""

    def __init__(self, rank: int, function: Callable[[int], None] | None) -> None:
        self._rank = rank
        self._function = function

    def __call__(self, worker: int) -> None:
        seed = _mix(torch.initial_seed(), worker, self._rank)
        torch.manual_seed(seed)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % (1 << 32))
        if self._function is not None:
            self._function(worker)


def _make_twin(loader: DataLoader[Any], share: _Share, batches: _RankBatches) -> DataLoader[Any]:
    """Return the loader with another batch sampler.

    A copy, since a subclass may be built by other arguments than ``DataLoader`` is; its ``vars``,
    since these attributes cannot be set after construction.
    """
    twin = copy.copy(loader)
    vars(twin)["sampler" if batches.cut_after else "batch_sampler"] = batches
    vars(twin)["_iterator"] = None  # the loader's own worker processes, if it keeps them
    if share.rank > 0 and loader.num_workers > 0:
        twin.worker_init_fn = _WorkerInit(share.rank, loader.worker_init_fn)
    return twin


# --------------------------------------------------------------------------------------------------
# Looking at loaders
# --------------------------------------------------------------------------------------------------


def _is_indexed(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _has_state(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and hasattr(loader, "load_state_dict")


def _samplers(loader: Any) -> Iterator[Any]:
    """The samplers of a loader, also those inside of another."""
    found = [getattr(loader, name, None) for name in ("batch_sampler", "sampler")]
    seen: list[Any] = [None]
    while found:
        sampler = found.pop(0)
        if all(sampler is not known for known in seen):
            yield sampler
            seen.append(sampler)
            found.append(getattr(sampler, "sampler", None))


def _find_generators(loader: Any) -> list[torch.Generator]:
    """The generators that rule a loader, other than the process's own; its own one first."""
    found: list[torch.Generator] = []
    for owner in (loader, *_samplers(loader)):
        generator = getattr(owner, "generator", None)
        known = (torch.default_generator, *found)
        if isinstance(generator, torch.Generator) and all(generator is not k for k in known):
            found.append(generator)
    return found


def _check_loader(loader: Any) -> None:
    for sampler in _samplers(loader):
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            raise ValueError(
                f"the loader's sampler ({type(sampler).__name__}) already gives each rank other "
                "rows; leave it out (shuffle=True, or no sampler): split_loader cuts the batches "
                "of a plain loader"
            )
    if isinstance(loader, DataLoader) and not loader.in_order:
        raise ValueError(
            "the loader has in_order=False: its batches would be other ones on each rank; make it "
            "with in_order=True"
        )


def _check_agrees(name: str, said: Any, default: Any, found: Any) -> None:
    if said != default and said != found:
        raise ValueError(f"{name} is {said!r}, but the model has {found!r}; they must agree")


def _mix(seed: int, number: int, rank: int) -> int:
    """Mix three numbers into a seed; torch's generator uses its low 32 bits."""
    mixed = torch.Generator()
    mixed.manual_seed((seed * 1_000_003 + number) * 1_000_003 % (1 << 62) + rank)
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=mixed))
