"""What is done to an autograd graph through its nodes: entering, differentiating, walking.

What it holds: :class:`Edge` and the functions that ask torch's engine, or a graph itself, for what
the public functions of ``torch.autograd`` do not give. Why apart: each leans on an interface of
torch that is not documented; here they are together, each with its reason.
Must not: know shards.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = [
    "ELSEWHERE",
    "Edge",
    "Survey",
    "accumulate",
    "apply_node",
    "differentiate",
    "find_needed",
    "group_outputs",
    "is_plain_backward",
    "make_edge",
    "nodes_of",
    "put_after",
    "scale_gradient",
    "survey",
    "without_hooks",
]


class Edge(NamedTuple):
    """Where a tensor enters a shard's graph, and its device."""

    into: GradientEdge
    device: torch.device


#: In the place of an edge into a graph that another rank has.
ELSEWHERE = Edge(None, torch.device("meta"))  # type: ignore[arg-type]  # it leads nowhere


def make_edge(tensor: Tensor) -> Edge:
    """Return the edge of a tensor that requires grad."""
    return Edge(get_gradient_edge(tensor), tensor.device)


def nodes_of(edges: Iterable[Edge | None]) -> list[Any]:
    """The nodes that the edges lead to."""
    return [edge.into.node for edge in edges if edge is not None and edge is not ELSEWHERE]


def find_needed(next_functions: Sequence[tuple[Any, int]]) -> list[bool]:
    """Per input of the node that runs now, whether its gradient goes anywhere."""
    if is_plain_backward():  # everything is wanted
        return [node is not None for node, _ in next_functions]
    return [node is not None and _will_run(node) for node, _ in next_functions]


def is_plain_backward() -> bool:
    """Whether the caller called ``backward()`` without naming inputs (torch's word for it
    differs)."""
    return bool(torch.autograd._is_checkpoint_valid())  # type: ignore[no-untyped-call]  # torch's


class Survey(NamedTuple):
    """What a look at every node of one shard's graph found.

    Attributes:
        leaves: per output, leaves that its graph ends in, by id. What two outputs share may be
            noted for one of them only: then they are a pair.
        pairs: outputs (by position) whose graphs share more than parameters.
        is_reentrant: re-entrant checkpointing left a node in it.
    """

    leaves: list[dict[int, Tensor]]
    pairs: list[tuple[int, int]]
    is_reentrant: bool


def survey(edges: Sequence[Edge], local: Container[int]) -> Survey:
    """Look at every node of the graphs behind ``edges``, each once.

    Args:
        edges: one per output.
        local: ids of leaves that join the outputs that share them (a shard's rows; not parameters).
    """
    leaves: list[dict[int, Tensor]] = [{} for _ in edges]
    pairs: list[tuple[int, int]] = []
    owners: dict[Any, int] = {}  # the output by which each node was reached first
    kinds: set[type] = set()
    for output, edge in enumerate(edges):
        stack: list[Any] = [edge.into.node]
        while stack:  # once per node of every step's graph: no call that can be spared
            node = stack.pop()
            owner = owners.get(node)
            if owner is not None:
                if owner != output:
                    pairs.append((owner, output))
                continue
            kind = type(node)
            if kind is _LEAF:
                leaf = node.variable
                leaves[output][id(leaf)] = leaf
                if id(leaf) not in local:
                    continue
            owners[node] = output
            kinds.add(kind)
            for following, _ in node.next_functions:
                if following is not None:
                    stack.append(following)
    is_reentrant = _REENTRANT in {kind.__name__ for kind in kinds}
    return Survey(leaves, pairs, is_reentrant)


def group_outputs(counts: Sequence[int], pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Put outputs (by position, the same in every shard) that belong together into groups.

    Two groups share parameters at most, so each can be a node of its own in the caller's graph: as
    in a plain module, a backward from one leaves what lies before the other alone.

    Args:
        counts: per shard, how many outputs it has.
        pairs: of all shards, outputs that belong together.
    """
    if len({*counts}) > 1:
        return [list(range(max(counts)))]  # positions mean nothing: keep all together
    root = list(range(counts[0]))

    def find(output: int) -> int:
        while root[output] != output:
            output = root[output]
        return output

    for one, other in pairs:
        low, high = sorted((find(one), find(other)))
        root[high] = low
    groups: dict[int, list[int]] = {}
    for output in range(len(root)):
        groups.setdefault(find(output), []).append(output)
    return list(groups.values())


class without_hooks:
    """Switch the gradient hooks of these leaves off.

    Where each shard's graph ends in one tensor of the user's, its hooks would see every shard's
    part; they are to see the sum, once, in the user's own graph.
    """

    __slots__ = ("_hooks", "_leaves")

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._leaves = leaves

    def __enter__(self) -> None:
        self._hooks = list(map(_get_hooks, self._leaves))
        for leaf in self._leaves:
            leaf._backward_hooks = None

    def __exit__(self, *error: object) -> None:
        for leaf, kept in zip(self._leaves, self._hooks, strict=True):
            leaf._backward_hooks = kept


def apply_node(node: type[torch.autograd.Function], *arguments: Any, inputs: list[Tensor]) -> Any:
    """``node.apply(*arguments, *inputs)``, but what it asks in Python of each input is asked in C:
    whether a transform of ``torch.func`` that is over has left it behind."""
    if torch._C._are_functorch_transforms_active():
        return node.apply(*arguments, *inputs)  # type: ignore[no-untyped-call]  # torch's
    inputs = list(map(torch._C._functorch.unwrap_if_dead, inputs))
    return super(torch.autograd.Function, node).apply(*arguments, *inputs)  # type: ignore[misc]


def put_after(nodes: Iterable[Any], first: Any) -> None:
    """Make torch's engine run ``first`` before any node of the graph behind ``nodes``.

    Of the nodes that can run, the engine takes the one made last; worker threads count for
    themselves, so their nodes may seem later than they are.
    """
    limit = first._sequence_nr()
    for node in _walk(nodes):
        if not hasattr(node, "variable") and node._sequence_nr() >= limit:
            node._set_sequence_nr(max(limit - 1, 0))


def differentiate(
    edges: Sequence[Edge],
    gradients: list[Tensor],
    leaves: list[Tensor],
    keep_graph: bool,
    create_graph: bool = False,
) -> list[Tensor | None]:
    """``torch.autograd.grad``, past its check for function modes.

    ``torch.autograd.grad`` hands itself to an active function mode, which then is off for as long
    as it runs; but activation checkpointing runs forwards inside, and their random functions must
    still find the shard's stream.
    """
    if not edges or not leaves:
        return [None] * len(leaves)
    return list(
        torch.autograd.graph._engine_run_backward(
            tuple(map(_get_node, edges)),
            tuple(gradients),
            keep_graph,
            create_graph,
            tuple(leaves),
            allow_unreachable=True,
            accumulate_grad=False,
        )
    )


def accumulate(
    edges: Sequence[Edge], gradients: list[Tensor], leaves: list[Tensor], keep_graph: bool
) -> list[Tensor | None]:
    """``torch.autograd.backward``; the leaves' gradients are taken and put back as they were."""
    if not edges:
        return [None] * len(leaves)
    before = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.graph._engine_run_backward(
            tuple(map(_get_node, edges)),
            tuple(gradients),
            keep_graph,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )
        return [leaf.grad for leaf in leaves]
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient


def scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """Let the gradient that comes back to a tensor be multiplied by ``factor``.

    A 0-dim tensor is left alone: it is about the whole batch.
    """
    if factor == 1 or not torch.is_grad_enabled() or not tensor.requires_grad or not tensor.dim():
        return tensor
    scaled: Tensor = _Scale.apply(tensor, factor)  # type: ignore[no-untyped-call]  # torch's
    return scaled


# ---------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------

_get_hooks = operator.attrgetter("_backward_hooks")
_get_node = operator.attrgetter("into")
_LEAF: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]  # the node of a leaf


class _Scale(torch.autograd.Function):
    """Itself; its gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


_REENTRANT = "CheckpointFunctionBackward"


def _walk(nodes: Iterable[Any]) -> Iterator[Any]:
    """Every node of the graph behind ``nodes``."""
    stack = list(dict.fromkeys(nodes))
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def _will_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True  # torch refuses to say so of the very leaves that autograd.grad asks for
