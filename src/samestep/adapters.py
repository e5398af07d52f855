"""Batches and caches of well-known libraries, recognised by name.

What it holds: for torch_geometric's ``Batch`` how its graphs are cut and joined; for the caches of
transformers that they are opened by their attributes. Why: their users should not have to register
what so many of them use. Guarantees: none of these libraries is imported by this one; a class is
recognised by the names in its method resolution order. Must not: hold rules for anything a user can
register.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

__all__ = [
    "GraphFunctions",
    "find_graph_functions",
    "is_opened_by_attributes",
    "rebuild_graphs",
    "split_graphs",
]

# split(batch, sizes), merge(batches), rows(batch)
GraphFunctions = tuple[
    Callable[[Any, Sequence[int]], list[Any]], Callable[[list[Any]], Any], Callable[[Any], int]
]


def find_graph_functions(cls: type) -> GraphFunctions | None:
    """Return how batches of graphs are cut, if ``cls`` is torch_geometric's, else None."""
    if not _has_base(cls, "torch_geometric.data", ("Batch",)):
        return None
    return split_graphs, _merge_graphs, _count_graphs


def is_opened_by_attributes(cls: type) -> bool:
    """Whether objects of ``cls`` are containers whose entries are their attributes."""
    return _has_base(cls, "transformers.cache_utils", ("Cache", "CacheLayerMixin"))


def _has_base(cls: type, package: str, names: tuple[str, ...]) -> bool:
    return any(
        base.__name__ in names and base.__module__.startswith(package) for base in cls.__mro__
    )


def split_graphs(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch into batches of so many graphs each."""
    graphs = iter(batch.to_data_list())
    return [_make_batch(batch, [next(graphs) for _ in range(size)]) for size in sizes]


def rebuild_graphs(batch: Any, values: Sequence[Any]) -> Any:
    """Return a copy of ``batch`` with other values, in the order of its keys."""
    copied = copy.copy(batch)
    for key, value in zip(batch.to_dict(), values, strict=True):
        copied[key] = value
    return copied


def _merge_graphs(batches: list[Any]) -> Any:
    graphs = list(chain.from_iterable(batch.to_data_list() for batch in batches))
    return _make_batch(batches[0], graphs)


def _count_graphs(batch: Any) -> int:
    return int(batch.num_graphs)


def _make_batch(like: Any, graphs: list[Any]) -> Any:
    base = next(base for base in type(like).__mro__ if base.__name__ == "Batch")
    return base.from_data_list(graphs)  # type: ignore[attr-defined]  # torch_geometric's
