"""A copy of an object graph that follows its original.

What it holds: :class:`Follower`, which copies everything that a module can reach and remembers
which piece came from which.
Why: ``copy.deepcopy`` gives real modules, but at every call it would cost milliseconds; it leaves
closures and lambdas pointing at the original; and it cannot say which attribute a forward wrote.
``torch.nn.parallel.replicate`` copies one level of each module, so bound methods, containers and
helper objects of a replica go on pointing at the original.

How things are copied (``leaf`` decides for tensors):

==========================  ====================================================================
modules, plain objects      a new object of the class; attributes copied in turn
dict, list, set, deque      the same type; entries copied in turn; "cells": followed and watched
tuples and the like         the same object if nothing inside was copied, else rebuilt
bound methods, partials     bound to the copy
functions                   a new function if a closure cell or default reaches into the modules;
                            refused by name if it reaches them through a global variable
weak references             to the copy, if the target was copied
optimizers, datasets, ...   shared (see ``SHARED``), as is whatever cannot be copied (locks, files)
==========================  ====================================================================

Guarantees: one original object has one copy, cycles included; identical before, identical after.
Must not: know replicas, shards or devices.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import ReplicaError
from samestep.pattern import Pattern
from samestep.reach import (
    ATOMS,
    CONTAINERS,
    EMPTY,
    SHARED,
    SHARED_NAMES,
    cell_content,
    global_names,
    referents,
    set_state,
)
from samestep.snapshot import BUILT_IN, Cell, iter_items, key_text, refill

__all__ = ["Follower", "Leaf"]

Leaf = Callable[[Tensor, str], Any]


class Follower:
    """Copies an object graph and keeps the correspondence.

    Args:
        root: the module to copy.
        leaf: called for every tensor with the tensor and its path; returns the copy's.
        devices: what a ``torch.device`` kept as an attribute becomes; others stay as they are.

    Attributes:
        root: the copy.
        cells: the original cells, in the order found.
        targets: their copies.
        untracked: original cells whose copies cannot be updated piece by piece: a change there
            needs a new Follower.
        has_generator: whether a random generator of the user's was found.
        loose: tensors that no cell holds (a scripted module's lie in C++).
        scripted: pairs of scripted modules; of their state in C++ only train()/eval() is followed.
        modules: pairs (original module, copied module).

    Raises:
        ReplicaError: a function reaches a module of the tree through a global variable.
    """

    def __init__(
        self,
        root: nn.Module,
        leaf: Leaf,
        devices: Mapping[torch.device, torch.device] = types.MappingProxyType({}),
    ) -> None:
        self._leaf = leaf
        self._devices = devices
        self._copies: dict[int, Any] = {}
        self._originals: dict[int, Any] | None = {}  # None: not made yet
        self._kept: list[Any] = []  # keeps every id in the two tables unique
        self._makers: list[Callable[[], Any] | None] = []  # beside it: what makes an empty copy
        self.cells: list[Cell] = []
        self.targets: list[Cell] = []
        self.paths: list[str] = []
        self._owners: list[int] = []  # beside them, by id: whose ``__dict__`` it is, or the cell
        # By id of a ``__dict__``, its copy: one may be an attribute too (``vars(args)``), or that
        # of several objects, or the object itself (``self.__dict__ = self``).
        self._dicts: dict[int, Cell] = {}
        self._has_two_names = False
        self.untracked: list[Cell] = []
        self.loose: list[Tensor] = []
        self.has_generator = False
        self.scripted: list[tuple[torch.jit.ScriptModule, torch.jit.ScriptModule]] = []
        self.modules: list[tuple[nn.Module, nn.Module]] = []
        self._tree = {id(module) for module in root.modules()}
        try:
            self.root: nn.Module = self.copy(root, "")
        except RecursionError:
            raise ReplicaError(
                "an object that the module holds is nested too deeply to be copied (a long "
                "chain of objects, each holding the next?); keep it outside the module"
            ) from None

    def copy(self, value: Any, path: str) -> Any:
        """Return the copy of ``value``; the same one every time."""
        kind = type(value)
        if kind in ATOMS:
            return value
        found = self._copies.get(id(value), self)
        if found is not self:
            return found
        if kind in CONTAINERS or (kind is OrderedDict and not value.__dict__):
            # Most are the empty dictionaries of hooks, to which nobody gives attributes.
            return self._copy_container(value, kind, path)
        if f"{kind.__module__}.{kind.__qualname__}" in SHARED_NAMES:
            return value
        if kind in weakref.ProxyTypes:
            return self._share_proxy(value, path)
        if isinstance(value, Tensor):
            return self._leaf(value, path)
        if kind is torch.device:
            return self._devices.get(value, value)
        if isinstance(value, SHARED):
            self.has_generator = self.has_generator or isinstance(value, torch.Generator)
            return value
        if isinstance(value, nn.Module):
            return self._copy_module(value, path)
        if isinstance(value, tuple) and (kind is tuple or hasattr(kind, "_fields")):
            return self._copy_tuple(value, path)
        if kind is types.FunctionType:
            return self._copy_function(value, path)
        if kind is types.MethodType:
            owner = self.copy(value.__self__, path)
            if owner is value.__self__:
                return value
            return self._remember(value, types.MethodType(value.__func__, owner), None)
        if isinstance(value, weakref.ref):
            return self._copy_reference(value)
        return self._copy_object(value, path)

    def original(self, value: Any) -> Any:
        """Return what ``value`` is the copy of; ``value`` itself if it is none."""
        if self._originals is None:
            self._originals = {id(self._copies[id(value)]): value for value in self._kept}
        return self._originals.get(id(value), value)

    def is_known(self, value: Any) -> bool:
        """Whether copying ``value`` makes nothing new that would have to be followed."""
        if type(value) is tuple:
            return all(map(self.is_known, value))
        if isinstance(value, weakref.ref):
            return self.is_known(value())
        return (
            type(value) in ATOMS
            or isinstance(value, (Tensor, torch.device, *SHARED))
            or id(value) in self._copies
        )

    def add_cell(self, source: Cell, target: Cell, path: str, owner: Any = None) -> None:
        """Follow one more cell: ``target`` holds copies of what ``source`` holds.

        Args:
            owner: the object whose ``__dict__`` ``source`` is; None: ``source`` is itself one.
        """
        # A class of the user's may say that it is empty, whatever it holds.
        if source or type(source) not in BUILT_IN:
            self._fill(target, source, path)
        self.cells.append(source)
        self.targets.append(target)
        self.paths.append(path)
        self._owners.append(id(source if owner is None else owner))

    def update(self, index: int) -> None:
        """Make the copied cell ``index`` hold copies of what the original holds now."""
        self._fill(self.targets[index], self.cells[index], self.paths[index])

    def pattern(self) -> Pattern | None:
        """How to make one more copy of the same graph; None if it must be walked through again."""
        makers = [make for make in self._makers if make is not None]
        is_odd = self.untracked or self.loose or self._has_two_names
        if is_odd or len(makers) < len(self._kept):
            return None
        return Pattern(self._kept, makers, self.cells, self._owners, self.is_shared)

    def is_shared(self, value: Any) -> bool:
        """Whether every copy of the graph holds this very object."""
        if type(value) is tuple:
            return all(map(self.is_shared, value))
        return not isinstance(value, torch.device) and self.copy(value, "") is value

    def repeat(
        self,
        pattern: Pattern,
        leaf: Leaf,
        devices: Mapping[torch.device, torch.device],
        leaves: Mapping[int, Any],
    ) -> Follower:
        """Make another Follower of the same graph, which has not changed since this one was made.

        Args:
            pattern: of this Follower.
            leaf, devices: as when a Follower is made.
            leaves: the copies of all leaves, by id of the original.
        """
        other = copy.copy(self)  # what is known of the originals is as true there
        other._copies, other.targets = pattern.make(leaves)
        other._leaf, other._devices = leaf, devices
        other._kept, other._makers = [*self._kept], [*self._makers]
        other._originals = None
        other._dicts = {key: other.targets[index] for index, key in pattern.dicts}
        other.untracked, other.loose, other.scripted = [], [], []
        other.cells, other.paths, other._owners = [*self.cells], [*self.paths], [*self._owners]
        other.modules = [(module, other._copies[id(module)]) for module, _ in self.modules]
        other.root = other._copies[id(self.modules[0][0])]
        for index in pattern.others:
            other.update(index)
        return other

    # -- One kind of thing each -------------------------------------------------------------

    def _add_dict(self, value: Any, copied: Any, path: str) -> None:
        """Follow the ``__dict__`` of an object."""
        source = value.__dict__
        known = self._dicts.get(id(source), self._copies.get(id(source)))
        if known is not None:
            self._has_two_names = True
            with contextlib.suppress(AttributeError):  # of some types it cannot be exchanged
                object.__setattr__(copied, "__dict__", known)
                return
        self._dicts[id(source)] = copied.__dict__
        self.add_cell(source, copied.__dict__, path, value)

    def _fill(self, target: Cell, source: Cell, path: str) -> None:
        """Let ``target`` hold copies of what ``source`` holds; the types agree."""
        values: list[Any]
        if isinstance(source, dict):
            # Most entries are of a kind that needs no copy: then no path is put together.
            values = [
                (
                    key if type(key) is str else self.copy(key, f"{path}[{key!r}]"),
                    value if type(value) in ATOMS else self.copy(value, path + key_text(key)),
                )
                for key, value in iter_items(source)
            ]
        else:
            values = [self.copy(value, f"{path}[{i}]") for i, value in enumerate(source)]
        refill(target, values)

    def _remember(self, value: Any, copied: Any, make: Callable[[], Any] | None) -> Any:
        self._copies[id(value)] = copied
        if self._originals is not None:
            self._originals[id(copied)] = value
        self._kept.append(value)
        self._makers.append(make)
        return copied

    def _copy_module(self, module: nn.Module, path: str) -> nn.Module:
        cls = type(module)
        if isinstance(module, torch.jit.ScriptModule):
            return self._copy_script(module, path)
        if hasattr(module, "_orig_mod") and hasattr(module, "dynamo_ctx"):
            # torch.compile's wrapper: wrap the copy anew. torch finds the compiled code again.
            compiled: Any = module
            copied: nn.Module = cls(self.copy(compiled._orig_mod, path), compiled.dynamo_ctx)
            self._remember(module, copied, None)
            self.modules.append((module, copied))
            return copied
        # Not cls.__new__: some classes make a class of its own for every object (fx.GraphModule).
        make = functools.partial(object.__new__, cls)
        copied = make()
        self._remember(module, copied, make)
        self.modules.append((module, copied))
        self._add_dict(module, copied, path)
        return copied

    def _copy_script(self, module: torch.jit.ScriptModule, path: str) -> nn.Module:
        """A scripted module's state lives in C++: copy it there, then exchange its tensors.

        torch's own shallow copy of the handle shares the submodules, so that exchanging a tensor
        would exchange the original's.
        """
        copied = copy.deepcopy(module)
        pairs: Any = zip(module.named_modules(), copied.modules(), strict=True)
        for (name, source), target in pairs:
            prefix = f"{path}.{name}" if name else path
            for key, tensor in chain(
                source.named_parameters(recurse=False), source.named_buffers(recurse=False)
            ):
                target._c.setattr(key, self.copy(tensor, f"{prefix}.{key}"))
                self.loose.append(tensor)
            if target._c.hasattr("_flat_weights"):  # a recurrent module's list of its parameters
                weights = source._c.getattr("_flat_weights")
                target._c.setattr("_flat_weights", [self.copy(w, prefix) for w in weights])
            self._remember(source, target, None)
            self.modules.append((source, target))
            self.scripted.append((source, target))
        return copied

    def _copy_tuple(self, value: tuple[Any, ...], path: str) -> Any:
        entries = [self.copy(entry, f"{path}[{i}]") for i, entry in enumerate(value)]
        if all(map(operator.is_, entries, value)):
            return value
        make: Any = getattr(type(value), "_make", tuple)  # a named tuple's
        return make(entries)

    def _copy_container(self, value: Cell, kind: Callable[[], Cell], path: str) -> Any:
        if id(value) in self._dicts:
            self._has_two_names = True
            return self._dicts[id(value)]
        if isinstance(value, deque):
            kind = functools.partial(deque, maxlen=value.maxlen)
        target = self._remember(value, kind(), kind)
        self.add_cell(value, target, path)
        return target

    def _share_proxy(self, value: Any, path: str) -> Any:
        with contextlib.suppress(ReferenceError):  # of what is gone
            if isinstance(value, nn.Module):
                raise ReplicaError(
                    f"attribute {path.lstrip('.')!r} is a weakref.proxy of a module, which a "
                    f"replica cannot rebind; hold a weakref.ref, or the module in a list"
                )
        return value

    def _copy_reference(self, value: weakref.ref[Any]) -> Any:
        target = value()
        if not isinstance(target, (nn.Module, Tensor)):
            return value
        # Not remembered: the tensor may get another copy later. Python keeps one weak reference
        # per object, so equal targets still give the identical reference.
        copied = self.copy(target, "<weakref>")
        return value if copied is target else weakref.ref(copied)

    def _copy_function(self, value: types.FunctionType, path: str) -> Any:
        self._refuse_globals(value, path)
        reaches = self._reaches(value.__closure__ or (), set()) or self._reaches(
            (value.__defaults__, value.__kwdefaults__, value.__dict__), set()
        )
        if not reaches:
            return value
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        copied = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, cells or None
        )
        self._remember(value, copied, None)
        for cell, source in zip(cells, value.__closure__ or (), strict=True):
            content = cell_content(source)
            # Only what reaches into the modules is rebound: a list that the user collects
            # activations in must stay the user's list.
            if self._reaches((content,), set()):
                cell.cell_contents = self.copy(content, f"{path}.<closure>")
            elif content is not EMPTY:
                cell.cell_contents = content
        copied.__defaults__ = self.copy(value.__defaults__, f"{path}.<default>")
        copied.__kwdefaults__ = self.copy(value.__kwdefaults__, f"{path}.<default>")
        copied.__dict__.update(self.copy(dict(value.__dict__), f"{path}.__dict__"))
        copied.__qualname__, copied.__doc__ = value.__qualname__, value.__doc__
        return copied

    def _copy_object(self, value: Any, path: str) -> Any:
        """Any other object, by the protocol that ``copy.copy`` uses."""
        cls = type(value)
        try:
            reduced: Any = value.__reduce_ex__(4)
        except Exception:
            return value  # locks, files, generators, handles of libraries: shared
        if isinstance(reduced, str) or isinstance(value, (int, str, float, bytes)):
            return value  # a named singleton, an immutable value
        maker, arguments, state, items, entries = (*reduced, None, None, None)[:5]
        has_dict, is_cell = hasattr(value, "__dict__"), isinstance(value, CONTAINERS)
        if not (has_dict or is_cell or self._reaches((arguments, state), set())):
            # Without a __dict__ nobody could see what changes inside later: share it.
            return value
        if not is_cell and (items is not None or entries is not None):
            return value  # a container type of its own that torch's trees do not know either
        is_followed = (
            has_dict
            and getattr(cls, "__getstate__", None) is object.__getstate__
            and not hasattr(cls, "__setstate__")
        )
        make = functools.partial(
            maker, *(self.copy(argument, f"{path}.<args>") for argument in arguments)
        )
        is_alike = (is_followed or state is None) and all(map(self.is_shared, arguments))
        copied = self._remember(value, make(), make if is_alike else None)
        if is_followed:
            self._add_dict(value, copied, path)
            if isinstance(state, tuple) and state[1]:  # entries of __slots__ beside it
                set_state(copied, (None, self.copy(state[1], path)))
                self.untracked.append({})
        elif state is not None:
            set_state(copied, self.copy(state, path))
            self.untracked.append(getattr(value, "__dict__", {}))
        if is_cell:
            self.add_cell(value, copied, path)
        return copied

    # -- Functions that reach into the tree ---------------------------------------------------

    def _reaches(self, values: Iterable[Any], seen: set[int]) -> bool:
        """Whether a module of the tree can be reached from ``values``."""
        stack = list(values)
        while stack:
            value = stack.pop()
            if type(value) in ATOMS or id(value) in seen or isinstance(value, (Tensor, SHARED)):
                continue
            seen.add(id(value))
            if isinstance(value, nn.Module):
                if self._is_around(value):
                    return True
                continue
            stack.extend(referents(value))
        return False

    def _is_around(self, module: nn.Module) -> bool:
        """Whether ``module`` is of the tree, or holds a part of it (the wrapper itself, say)."""
        return any(id(m) in self._tree or id(m) in self._copies for m in module.modules())

    def _refuse_globals(self, function: types.FunctionType, path: str) -> None:
        for name in global_names(function.__code__):
            value = function.__globals__.get(name)
            if isinstance(value, nn.Module) and self._is_around(value):
                raise ReplicaError(
                    f"attribute {path.lstrip('.') or '<module>'!r} is a function that uses the "
                    f"module through the global variable {name!r}; a replica cannot rebind a "
                    f"global. Pass the module as an argument or a default instead: "
                    f"lambda x, {name}={name}: ..."
                )
