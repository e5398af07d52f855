"""Numbered items from one iterator to several workers, and their results back to one consumer.

What it holds: :class:`Lookahead`. Why: slots of unlike speed balance themselves if each takes the
next item when it is free, but then results come in another order than the items, and a fast slot
would run ahead without end while the consumer, or the item whose turn it is, takes its time.

Guarantees:
- Items are pulled one at a time, in order, and each goes to one worker.
- At most ``limit`` items are out: pulled, and their result not yet taken. A worker holds one item.
- The error of an item comes at that item's turn, after the results before it; nothing is pulled
  any more once an item has failed.
Must not: know what is done with an item, or own threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from samestep.errors import note_shard

__all__ = ["Lookahead", "Taken"]

T = TypeVar("T")
Taken = tuple[int, Any]  # an item's number and its result


class Lookahead(Generic[T]):
    """Hands out items and collects their results.

    Args:
        items: pairs (number, item). Numbers go up, and may have gaps: whoever shares the items with
            other processes takes every so manieth pair.
        limit: the most items that are out at one time.
        ordered: results are taken in the order of the items, else as they come in.
    """

    def __init__(self, items: Iterator[tuple[int, T]], *, limit: int, ordered: bool) -> None:
        self._items = items
        self._limit = limit
        self._ordered = ordered
        self._pulling = threading.Lock()  # held by the one worker that pulls, or waits for room
        # Held while anything below is read or written. Reentrant: the garbage collector may close
        # an iteration, and so call stop(), in a worker that is in the middle of put().
        self._lock = threading.RLock()
        self._order: deque[int] = deque()  # numbers that are out, in the order of the items
        self._results: dict[int, tuple[Any, BaseException | None]] = {}
        self._last = -1
        self._is_over = False  # nothing more will be pulled
        self._room, self._due = _Bell(), _Bell()

    def pull(self) -> tuple[int, T] | None:
        """Return the next item; None when there is none, or when all is over.

        Waits while ``limit`` items are out. What the iterator raises is the result of the item that
        it did not give.
        """
        with self._pulling:
            while not self._may_go_on():
                self._room.wait()
            if self._is_over:
                return None
            try:
                number, item = next(self._items)
            except StopIteration:
                self.stop()
                return None
            except BaseException as error:
                note_shard(error, f"while fetching batch {self._last + 1}")
                self._announce(self._last + 1)
                self.put(self._last, error=error)
                return None
            self._announce(number)
            return number, item

    def put(self, number: int, value: Any = None, *, error: BaseException | None = None) -> None:
        """Give the result of item ``number``, or the error that came instead."""
        with self._lock:
            self._results[number] = (value, error)
            if error is not None:
                self._is_over = True
                self._room.ring()
            if self._can_take():  # not if it overtook another one whose turn comes first
                self._due.ring()

    def take(self) -> Taken | None:
        """Return the next result with its item's number; None when all were taken.

        Raises:
            BaseException: the error that came instead of the result.
        """
        while (found := self._find()) is None:
            self._due.wait()
        number, value, error = found
        del found
        if error is None:
            return None if number is None else (number, value)
        try:
            raise error
        finally:
            del error, value  # else the traceback would hold a frame that holds the traceback

    def stop(self) -> None:
        """Pull nothing any more. Items that are out may still get their results."""
        with self._lock:
            self._is_over = True
            self._room.ring()
            self._due.ring()

    def _may_go_on(self) -> bool:
        """Whether there is room for one more item, or nothing to wait for."""
        with self._lock:
            self._room.is_awaited = True  # before looking, see the lock
            if self._is_over or len(self._order) < self._limit:
                self._room.is_awaited = False
            return not self._room.is_awaited

    def _announce(self, number: int) -> None:
        with self._lock:
            self._last = number
            self._order.append(number)

    def _find(self) -> tuple[int | None, Any, BaseException | None] | None:
        """The result that is due, taken out; without a number if none will come; else None."""
        with self._lock:
            self._due.is_awaited = True
            if not self._can_take():
                return None
            self._due.is_awaited = False
            if not self._order:
                return None, None, None
            number = self._order[0] if self._ordered else next(iter(self._results))
            self._order.remove(number)
            self._room.ring()
            return number, *self._results.pop(number)

    def _can_take(self) -> bool:
        if not self._order:
            return self._is_over
        return self._order[0] in self._results if self._ordered else bool(self._results)


class _Bell:
    """Wakes the one thread that waits for it, and does nothing while none does.

    Threads that share an interpreter lock pay for each wake-up twice: the one that is woken takes a
    core from one that works, and has to ask that one for the lock. A ``threading.Condition`` wakes
    at every notice, also of what nobody can use yet, and then makes the woken wait for its own
    lock.
    """

    def __init__(self) -> None:
        self._rung: SimpleQueue[None] = SimpleQueue()
        self.is_awaited = False  # whoever sets it waits, or looks again

    def ring(self) -> None:
        """What was waited for is there. The caller holds the lock that guards it."""
        if self.is_awaited:
            self.is_awaited = False
            self._rung.put(None)

    def wait(self) -> None:
        """Wait for a ring; look again afterwards, as Ctrl-C may have left an older one."""
        self._rung.get()
