"""What users say about dims: ``in_dims`` for arguments and ``out_dims`` for outputs.

Holds the check of their form and their walk alongside a container: both are tree prefixes, so a
spec is either a word about everything below it or mirrors the container. It exists apart from
cutting and merging because both read the same notation.

Guarantees: what is accepted is used. A wrong type is refused at construction; a name, position or
path that does not exist is refused, with the known ones, when the call shows what exists.

Must not: look at tensors or decide what a spec means for a value.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = [
    "DEFAULT",
    "Inherited",
    "check_in_dims",
    "check_out_dims",
    "child_in_dims",
    "child_out_dims",
    "is_dim",
    "plan_argument_specs",
]


class _Default:
    """The type of :data:`DEFAULT`."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: Final = _Default()  # nothing was said; None already says "whole"


@dataclass(frozen=True)
class Inherited:
    """A spec given for a container, as its leaves see it: meant for those that it suits."""

    spec: Any


OUT_WORDS = ("mean", "sum", "first", "list")


def is_dim(spec: Any) -> bool:
    """Is it a tensor dim (an int that is not a bool)?"""
    return isinstance(spec, int) and not isinstance(spec, bool)


def check_in_dims(in_dims: Any) -> None:
    """Check the form of ``in_dims``.

    Raises:
        TypeError: something in it is not a dim, None, ``"rows"``, or a container of those.
    """
    _check_spec(
        in_dims, "in_dims", ("rows",), "a dim, None, 'rows', or a dict, list or tuple of those"
    )


def check_out_dims(out_dims: Any) -> None:
    """Check the form of ``out_dims``.

    Raises:
        TypeError: something in it is not a dim, None, one of the words ``"mean"``, ``"sum"``,
            ``"first"`` and ``"list"``, or a dict, list or tuple of those.
    """
    known = "a dim, None, 'mean', 'sum', 'first', 'list', or a dict, list or tuple of those"
    _check_spec(out_dims, "out_dims", OUT_WORDS, known)


def _check_spec(spec: Any, path: str, words: tuple[str, ...], known: str) -> None:
    if spec is None or is_dim(spec) or (isinstance(spec, str) and spec in words):
        return
    if isinstance(spec, Mapping):
        for key, inner in spec.items():
            _check_spec(inner, f"{path}[{key!r}]", words, known)
    elif isinstance(spec, (list, tuple)):
        for index, inner in enumerate(spec):
            _check_spec(inner, f"{path}[{index}]", words, known)
    else:
        raise TypeError(f"{path} is {spec!r}; it must be {known}")


# --------------------------------------------------------------------------------------------------
# in_dims
# --------------------------------------------------------------------------------------------------


def plan_argument_specs(
    in_dims: Any, num_args: int, keywords: Iterable[str], parameter_names: Sequence[str]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the spec of each positional and each keyword argument of one call.

    Raises:
        ValueError: ``in_dims`` names a parameter or position that the call does not have, or
            speaks twice about one parameter.
    """
    keywords = list(keywords)
    if in_dims is None or is_dim(in_dims) or isinstance(in_dims, str):
        everywhere = DEFAULT if in_dims is None else Inherited(in_dims)
        return [everywhere] * num_args, dict.fromkeys(keywords, everywhere)
    if not isinstance(in_dims, Mapping):
        in_dims = dict(enumerate(in_dims))
    args: list[Any] = [DEFAULT] * num_args
    kwargs: dict[str, Any] = dict.fromkeys(keywords, DEFAULT)
    seen: dict[Any, Any] = {}
    for key, spec in in_dims.items():
        name, position = _find_parameter(key, num_args, keywords, parameter_names)
        target: Any = position if name is None else name
        if target in seen:
            raise ValueError(f"in_dims speaks twice about {target!r}: {seen[target]!r} and {key!r}")
        seen[target] = key
        if name in kwargs:
            kwargs[name] = spec
        elif position is not None and position < num_args:
            args[position] = spec
    return args, kwargs


def _find_parameter(
    key: Any, num_args: int, keywords: list[str], parameter_names: Sequence[str]
) -> tuple[str | None, int | None]:
    """Return (name, position) of the parameter that a key of ``in_dims`` means."""
    if is_dim(key) and 0 <= key < max(num_args, len(parameter_names)):
        return (parameter_names[key] if key < len(parameter_names) else None), key
    if isinstance(key, str) and key in parameter_names:
        return key, list(parameter_names).index(key)
    if isinstance(key, str) and key in keywords:
        return key, None
    names = list(dict.fromkeys([*parameter_names, *keywords]))
    count = max(num_args, len(parameter_names))
    raise ValueError(
        f"in_dims speaks about {key!r}, which is no parameter of this call; "
        f"its parameters are {', '.join(map(repr, names)) or 'without names'} "
        f"and its positions {f'0 to {count - 1}' if count else 'none'}"
    )


def child_in_dims(spec: Any, keys: Sequence[Any], style: str, path: str) -> list[Any]:
    """Return the spec of each child of a container, ``DEFAULT`` where ``spec`` is silent.

    Raises:
        ValueError: ``spec`` mirrors another container than this one.
    """
    if spec is DEFAULT or isinstance(spec, Inherited):
        return [spec] * len(keys)
    if isinstance(spec, Mapping):
        # Keys of a dict are data and may be absent today; fields and positions are its form.
        unknown = [] if style == "key" else [key for key in spec if key not in keys]
        if unknown:
            raise ValueError(
                f"in_dims speaks about {unknown[0]!r} in {path}, which has {_list_keys(keys)}"
            )
        return [spec.get(key, DEFAULT) for key in keys]
    if isinstance(spec, (list, tuple)):
        if style == "key" or len(spec) > len(keys):
            raise ValueError(
                f"in_dims gives a {type(spec).__name__} of {len(spec)} for {path}, "
                f"which has {_list_keys(keys)}"
            )
        return [*spec, *[DEFAULT] * (len(keys) - len(spec))]
    return [Inherited(spec)] * len(keys)


# --------------------------------------------------------------------------------------------------
# out_dims
# --------------------------------------------------------------------------------------------------


def child_out_dims(
    spec: Any, keys: Sequence[Any], style: str, where: str, known: Iterable[str]
) -> list[Any]:
    """Return the spec of each child of a container, None where ``spec`` is silent.

    A key of a dict may be a path: ``{"aux/loss": "sum"}`` is ``{"aux": {"loss": "sum"}}``, and an
    index is written as its digits.

    Raises:
        ValueError: ``spec`` names something that is not here; the text says ``where`` that is and
            which paths are ``known``.
    """
    if spec is None or isinstance(spec, Inherited):
        return [spec] * len(keys)
    if isinstance(spec, (list, tuple)):
        if style == "key" or len(spec) > len(keys):
            raise ValueError(_unknown_path(f"a {type(spec).__name__} of {len(spec)}", where, known))
        return [*spec, *[None] * (len(keys) - len(spec))]
    if not isinstance(spec, Mapping):
        return [Inherited(spec)] * len(keys)
    found: dict[Any, Any] = {}
    by_text = {str(key): key for key in keys}
    for key, inner in spec.items():
        if key in keys:
            child, rest = key, inner
        else:
            head, _, tail = str(key).partition("/")
            if head not in by_text:
                raise ValueError(_unknown_path(repr(key), where, known))
            child, rest = by_text[head], ({tail: inner} if tail else inner)
        found[child] = _join_specs(found[child], rest, key) if child in found else rest
    return [found.get(key) for key in keys]


def _join_specs(one: Any, other: Any, key: Any) -> Any:
    if isinstance(one, Mapping) and isinstance(other, Mapping) and not set(one) & set(other):
        return {**one, **other}
    raise ValueError(f"out_dims speaks twice about {key!r}: {one!r} and {other!r}")


def _unknown_path(what: str, where: str, known: Iterable[str]) -> str:
    return f"out_dims speaks about {what} in {where}, which has {_list_keys(known)}"


def _list_keys(keys: Iterable[Any]) -> str:
    shown = [repr(key) for key in keys]
    more = f" and {len(shown) - 20} more" if len(shown) > 20 else ""
    return (", ".join(shown[:20]) or "nothing inside") + more
