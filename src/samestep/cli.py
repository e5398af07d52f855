"""The command line: arguments and printing, nothing else.

What it holds: the parser of ``samestep`` and one short function per command, which calls the module
that does the work.

Guarantees: what the user typed wrong ends with a message on standard error and exit status 2, never
with a traceback; success is status 0.

It must not hold any logic that a script could want to call.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import version

from samestep import tutorial
from samestep.devices import plan_slots

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after the program's name; None takes those of this process.

    Returns:
        The exit status.

    Raises:
        SystemExit: status 2 for wrong arguments, 0 after ``--help`` and ``--version``.
    """
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        plan_slots(None, arguments.replicas)
    except ValueError as error:  # a request that this machine or SAMESTEP_REPLICAS cannot meet
        parser.error(str(error))
    tutorial.run(arguments.replicas, rows=arguments.rows, batch=arguments.batch)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="samestep",
        description="Whole batch in, whole output out, the same step on several devices.",
    )
    parser.add_argument("--version", action="version", version=f"samestep {version('samestep')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    command = commands.add_parser(
        "tutorial",
        help="show how a batch is split, from inside the model and from outside",
        description="Run the classic data-parallel tutorial: each replica prints the rows that it "
        "sees, the script prints the whole batch and the whole output.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument(
        "--replicas",
        type=positive_int,
        metavar="N",
        help="how many replicas; by default one per accelerator, or what SAMESTEP_REPLICAS says",
    )
    command.add_argument("--rows", type=positive_int, default=100, help="samples in the dataset")
    command.add_argument("--batch", type=positive_int, default=30, help="rows in a batch")
    return parser


def positive_int(text: str) -> int:
    """Read a count from the command line."""
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return count
