"""A module around a module that looks like the inner one from outside.

What it holds: :class:`Wrapper`. Why: with ``torch.nn.DataParallel`` every attribute moved behind
``.module`` and every checkpoint key got a prefix; half of the code written for it undoes that.

Guarantees:
- ``state_dict()`` has the inner module's own keys; keys with or without ``module.`` load, at any
  depth.
- Reads, writes and deletions of attributes that are not the wrapper's own reach the inner module.
- ``named_parameters()``, ``named_buffers()`` and ``named_modules()`` name things as
  ``state_dict()`` does.
Must not: know why there is a wrapper.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["OWN_PREFIX", "Wrapper"]

#: Attributes with this prefix belong to the wrapper.
OWN_PREFIX = "_samestep"
_PREFIX = "module."


class Wrapper(nn.Module):
    """Holds ``module`` and passes on everything it does not have itself."""

    module: nn.Module

    # -- Attributes --------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # Called only for names that normal lookup does not find. While a copy or an unpickled
        # object is being filled there is no inner module yet: then this must not look for it.
        modules = self.__dict__.get("_modules", {})
        if name in modules:
            return modules[name]
        if "module" not in modules or name.startswith(OWN_PREFIX):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(modules["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            super().__setattr__(name, value)
            if name == "training" and "module" in self._modules:
                self.module.training = value
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def __dir__(self) -> list[str]:
        own: list[str] = super().__dir__()  # type: ignore[no-untyped-call]  # torch's
        return sorted({*own, *dir(self.module)})

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register on the inner module."""
        self.module.register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register on the inner module."""
        self.module.register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Register on the inner module."""
        self.module.add_module(name, module)

    def register_module(self, name: str, module: nn.Module | None) -> None:
        """Register on the inner module."""
        self.module.register_module(name, module)

    def _is_own(self, name: str) -> bool:
        own = self.__dict__
        if "module" not in own.get("_modules", {}):
            return True  # under construction
        return (
            name in own
            or name == "module"
            or name.startswith(OWN_PREFIX)
            or isinstance(getattr(type(self), name, None), property)
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the inner module's gradients, at the price that it has there."""
        module = self._modules.get("module")  # as an attribute it takes ten times as long
        (self.module if module is None else module).zero_grad(set_to_none)

    # -- Containers --------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]  # as the inner module has it

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload,no-any-return]  # likewise

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]  # likewise

    def __contains__(self, key: Any) -> bool:
        return key in self.module  # type: ignore[operator]  # likewise

    def __bool__(self) -> bool:
        # With __len__ defined, `if model:` would fail for every module without a length.
        return len(self) > 0 if hasattr(type(self.module), "__len__") else True

    # -- Names and checkpoints ---------------------------------------------------------------

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the wrapper, then the inner module and its children, named without ``module.``."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the inner module's state, under its own keys."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the inner module's state; keys may all begin with ``module.`` or not.

        Returns and raises what the inner module's ``load_state_dict`` does.
        """
        if not _has_prefix(self.module, state_dict):
            return self.module.load_state_dict(state_dict, strict, assign)
        plain = OrderedDict((key.removeprefix(_PREFIX), v) for key, v in state_dict.items())
        metadata: dict[str, Any] | None = getattr(state_dict, "_metadata", None)
        if metadata is not None:  # versions of the modules, which loading looks up by name
            plain._metadata = {  # type: ignore[attr-defined]  # torch's own attribute
                (key + ".").removeprefix(_PREFIX).removesuffix("."): value
                for key, value in metadata.items()
                if key
            }
        return self.module.load_state_dict(plain, strict, assign)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # Called when a module around this one loads. torch then goes on to the child "module" with
        # the keys below it, so plain keys get the prefix here.
        below = {key[len(prefix) :]: key for key in state_dict if key.startswith(prefix)}
        if not _has_prefix(self.module, below):
            for name, key in below.items():
                state_dict[prefix + _PREFIX + name] = state_dict.pop(key)


def _has_prefix(module: nn.Module, keys: Mapping[str, Any]) -> bool:
    """Whether ``keys`` are the module's, each with ``module.`` before it."""
    if not keys or not all(key.startswith(_PREFIX) for key in keys):
        return False
    own = module.state_dict().keys()
    plain = sum(key in own for key in keys)
    return sum(key.removeprefix(_PREFIX) in own for key in keys) >= plain
