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
from collections.abc import Iterator
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
        self._changed = threading.Condition()
        self._order: list[int] = []  # numbers that are out, in the order of the items
        self._results: dict[int, tuple[Any, BaseException | None]] = {}
        self._last = -1
        self._is_over = False  # nothing more will be pulled

    def pull(self) -> tuple[int, T] | None:
        """Return the next item; None when there is none, or when all is over.

        Waits while ``limit`` items are out. What the iterator raises is the result of the item that
        it did not give.
        """
        with self._pulling:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or len(self._order) < self._limit)
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
        with self._changed:
            self._results[number] = (value, error)
            self._is_over = self._is_over or error is not None
            self._changed.notify_all()

    def take(self) -> Taken | None:
        """Return the next result with its item's number; None when all were taken.

        Raises:
            BaseException: the error that came instead of the result.
        """
        with self._changed:
            self._changed.wait_for(self._can_take)
            if not self._order:
                return None
            number = self._order[0] if self._ordered else next(iter(self._results))
            self._order.remove(number)
            value, error = self._results.pop(number)
            self._changed.notify_all()
        if error is None:
            return number, value
        try:
            raise error
        finally:
            del error, value  # else the traceback would hold a frame that holds the traceback

    def stop(self) -> None:
        """Pull nothing any more. Items that are out may still get their results."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _announce(self, number: int) -> None:
        with self._changed:
            self._last = number
            self._order.append(number)

    def _can_take(self) -> bool:
        if not self._order:
            return self._is_over
        return self._order[0] in self._results if self._ordered else bool(self._results)
