"""The errors and warnings that only this library raises, and notes on the errors of others.

Holds one class per kind of refusal, so that a caller can tell "my batch cannot be cut" from "my
outputs cannot be joined", and :func:`note_shard`, which says on somebody else's exception where it
happened. An exception raised inside a shard keeps its own type: there is no common base class that
would invite wrapping it.

Guarantees: each error that a user's mistake causes is also a ``ValueError``, the one about other
processes a ``RuntimeError``, and each warning a ``UserWarning``, so code that knows nothing of this
library catches them too.

Must not: import anything of ours, or build messages (whoever raises knows the values).
"""

__all__ = [
    "DrawWarning",
    "MergeError",
    "RankError",
    "ReplicaError",
    "SplitError",
    "StateWarning",
    "describe_error",
    "first_line",
    "note_shard",
]


class SplitError(ValueError):
    """The arguments of a call cannot be cut into shards.

    Raised by :mod:`samestep.split` before any shard runs. The message names the argument by its
    path, its shape and the two numbers that disagree. What to do: pass ``in_dims`` for that
    argument (the dim that counts rows, ``"rows"``, or ``None`` to give it whole to every shard).
    """


class MergeError(ValueError):
    """The outputs of the shards cannot be joined into one.

    Raised by :mod:`samestep.merge` after every shard has returned. The message names the output by
    its path and shows what each shard returned. What to do: pass ``out_dims`` for that output (the
    dim that counts rows, or ``"mean"``, ``"sum"``, ``"first"``, ``"list"``).
    """


class ReplicaError(ValueError):
    """A module cannot be replicated.

    Raised by the code that makes replicas, on the first call that needs more than one. The message
    names the attribute in the way and its submodule. What to do: keep that object outside the
    module, or run with one replica.
    """


class RankError(RuntimeError):
    """The ranks cannot go on together: one is gone, failed, or does something else.

    Raised by the code that speaks to other ranks, in every rank that is left, before anything of
    the step was written to the source module. The message names the ranks, the step and the likely
    cause. What to do: look at the named rank's own output first; its error is the real one.
    """


class StateWarning(UserWarning):
    """A forward wrote state that the shards left different and that no rule can merge.

    Given once per attribute by the code that brings a step's state back to the source module. What
    to do: return the value from forward, make it a buffer, or keep one entry per row.
    """


class DrawWarning(UserWarning):
    """Random numbers were drawn in a way that cannot be tied to a shard's own stream.

    Given when that is noticed, by the code that hands out random streams. What to do: draw with
    torch functions inside forward, or pass ``generator=`` where the function takes one.
    """


def describe_error(error: BaseException) -> str:
    """Say in one line what went wrong: the kind, and what it says first."""
    kind = type(error).__name__
    return f"{kind}: {first_line(error)}" if str(error) else kind


def first_line(error: BaseException) -> str:
    """What an error says first."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def note_shard(exc: BaseException, text: str) -> None:
    """Add ``text`` as a note to ``exc``, unless it carries that note already.

    Args:
        exc: an exception on its way to the user; its type and traceback stay as they are.
        text: where it happened, for instance ``in shard 2 of 3 (rows 20-29 of 30, cpu)``.

    Example:
        >>> error = RuntimeError("shapes differ")
        >>> note_shard(error, "in shard 2 of 3")
        >>> note_shard(error, "in shard 2 of 3")
        >>> error.__notes__
        ['in shard 2 of 3']
    """
    if text not in getattr(exc, "__notes__", ()):
        exc.add_note(text)
