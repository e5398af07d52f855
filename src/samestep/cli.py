"""The command line: arguments and printing, nothing else.

What it holds: the parser of ``samestep`` and one short function per command, which calls the module
that does the work.

Guarantees: what the user typed wrong ends with a message on standard error and exit status 2, never
with a traceback; success is status 0. ``samestep check`` ends with 1 if the steps are not equal,
and with 2 and the traceback if the user's own code fails.

It must not hold any logic that a script could want to call.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Sequence
from importlib.metadata import version

from samestep import tutorial
from samestep.check import TargetError, check_target, find_target
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
    if arguments.command == "check":
        return run_check(parser, arguments)
    return run_tutorial(parser, arguments)


def run_tutorial(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """``samestep tutorial``."""
    try:
        plan_slots(None, arguments.replicas)
    except ValueError as error:  # a request that this machine or SAMESTEP_REPLICAS cannot meet
        parser.error(str(error))
    tutorial.run(arguments.replicas, rows=arguments.rows, batch=arguments.batch)
    return 0


def run_check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """``samestep check``."""
    try:
        make = find_target(arguments.target)
        report = check_target(make, arguments.replicas)
    except TargetError as error:
        parser.error(str(error))
    except Exception:  # the user's module, function or model: not our words, and not "not equal"
        traceback.print_exc()
        return 2
    print(report)
    return 0 if report.ok else 1


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

    command = commands.add_parser(
        "check",
        help="run a model of yours both ways and say whether the step is the same",
        description="Run the step of a model plainly and on several replicas, and say what differs "
        "and what to change. Exit status: 0 the same, 1 not the same or not proven, 2 nothing "
        "could be checked.",
    )
    command.add_argument(
        "target",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns (model, *inputs), or a dict of the "
        "arguments of samestep.check: 'model', 'inputs', 'loss', 'replicas', ...",
    )
    command.add_argument(
        "--replicas",
        type=positive_ints,
        metavar="N,N,...",
        help="the numbers of replicas to try, such as 1,2,3",
    )
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


def positive_ints(text: str) -> list[int]:
    """Read counts with commas between them."""
    return [positive_int(part) for part in text.split(",")]
