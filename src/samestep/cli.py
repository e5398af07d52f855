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
import dataclasses
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from samestep import tutorial
from samestep.devices import plan_slots
from samestep.proof import TargetError, check_target, find_target

__all__ = ["main"]

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


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
    status: int = arguments.do(arguments, parser)
    return status


def do_tutorial(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """``samestep tutorial``."""
    try:
        plan_slots(None, arguments.replicas)
    except ValueError as error:  # a request that this machine or SAMESTEP_REPLICAS cannot meet
        parser.error(str(error))
    tutorial.run(arguments.replicas, rows=arguments.rows, batch=arguments.batch)
    return 0


def do_run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """``samestep run``."""
    from samestep import launch  # torch's agent takes a while to import; only this command needs it

    words = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(launch.Launch)
        if field.name != "program"
    }
    try:
        asked = launch.Launch((arguments.program, *arguments.arguments), **words)
    except ValueError as error:
        parser.error(str(error))
    return launch.run(asked)


def do_check(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
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


def do_bench(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """``samestep bench``."""
    from samestep import bench, report  # only this command needs them

    if arguments.plot and not report.can_plot():
        parser.error("--plot needs matplotlib: pip install samestep[plot]")
    try:
        found = bench.bench_target(
            arguments.model, num_blocks=arguments.blocks, max_seconds=arguments.seconds
        )
    except TargetError as error:
        parser.error(str(error))
    except Exception:
        traceback.print_exc()
        return 2
    print(found)
    if arguments.json:
        report.write_json(arguments.json, found.as_record())
    if arguments.plot:
        report.write_plot(arguments.plot, found.rows, found.advice.baseline, found.model)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="samestep",
        description="Whole batch in, whole output out, the same step on several devices.",
    )
    parser.add_argument("--version", action="version", version=f"samestep {version('samestep')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    add_tutorial(commands)
    add_run(commands)
    add_check(commands)
    add_bench(commands)
    return parser


def add_tutorial(commands: Commands) -> None:
    """The arguments of ``samestep tutorial``."""
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
    command.set_defaults(do=do_tutorial)


def add_run(commands: Commands) -> None:
    """The arguments of ``samestep run``."""
    command = commands.add_parser(
        "run",
        help="run a script as several processes, on one machine or several",
        description="Run a script as several processes (ranks), as torchrun does. Rank 0 speaks on "
        "the terminal; the output of each rank is in a file; the first failure is shown last.",
    )
    add = command.add_argument
    add(
        "--workers",
        type=positive_int,
        metavar="N",
        help="ranks on this machine; by default one "
        "per accelerator, or else as many as the cores allow",
    )
    add(
        "--threads-per-worker",
        type=positive_int,
        metavar="N",
        help="intra-op threads of a rank; by default what OMP_NUM_THREADS says, or else 1",
    )
    add(
        "--log-dir",
        metavar="FOLDER",
        help="where to make the folder for the ranks' output; by default where temporary files go",
    )
    add(
        "--grace",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="time to end before being killed (default: 10)",
    )
    add(
        "--max-restarts",
        type=natural_int,
        default=0,
        metavar="N",
        help="how often all ranks start again after a failure (default: 0)",
    )
    machines = command.add_argument_group("several machines", "as in torchrun, on each of them")
    add = machines.add_argument
    add("--nnodes", type=positive_int, default=1, metavar="N", help="machines (default: 1)")
    add(
        "--node-rank",
        type=natural_int,
        metavar="I",
        help="this machine's number, from 0; by default the rendezvous gives it",
    )
    add("--rdzv-endpoint", metavar="HOST:PORT", help="where the machines meet")
    add(
        "--rdzv-backend",
        choices=["c10d", "static"],
        help="by default static if --node-rank is given, else c10d",
    )
    add("--rdzv-id", metavar="NAME", help="a name for this launch, the same on all machines")
    add(
        "--local-addr",
        metavar="HOST",
        help="how the others reach this machine; by default its host name",
    )
    kind = command.add_mutually_exclusive_group()
    kind.add_argument(
        "-m",
        "--module",
        dest="kind",
        action="store_const",
        const="module",
        default="script",
        help="run a module, as python -m does",
    )
    kind.add_argument(
        "--no-python",
        dest="kind",
        action="store_const",
        const="program",
        help="run a program that is not a Python script",
    )
    command.add_argument("program", metavar="script.py", help="what to run")
    command.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    command.set_defaults(do=do_run)


def add_check(commands: Commands) -> None:
    """The arguments of ``samestep check``."""
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
    command.set_defaults(do=do_check)


def add_bench(commands: Commands) -> None:
    """The arguments of ``samestep bench``."""
    command = commands.add_parser(
        "bench",
        help="measure which setting trains a model of yours fastest on this machine",
        description="Time the training step of a model plainly, on replicas, with recompute=True "
        "and after tune_cpu(), in interleaved blocks, and say which setting to use. It takes a "
        "minute or two; leave the machine alone meanwhile.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        default="samestep.bench:make_default",
        help="a function without arguments that returns (model, *inputs), or a dict as for "
        "'samestep check'",
    )
    command.add_argument(
        "--blocks", type=block_count, default=24, metavar="N", help="blocks per setting"
    )
    command.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="the most to measure for"
    )
    command.add_argument("--json", metavar="FILE", help="write every sample")
    command.add_argument("--plot", metavar="FILE", help="draw the ratios; needs matplotlib")
    command.set_defaults(do=do_bench)


def block_count(text: str) -> int:
    """Read a number of blocks: the first two are dropped."""
    return read_int(text, at_least=3)


def positive_int(text: str) -> int:
    """Read a count from the command line."""
    return read_int(text, at_least=1)


def natural_int(text: str) -> int:
    """Read a count that may be none from the command line."""
    return read_int(text, at_least=0)


def read_int(text: str, at_least: int) -> int:
    """Read a whole number from the command line."""
    try:
        count = int(text)
    except ValueError:
        count = at_least - 1
    if count < at_least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {at_least}")
    return count


def positive_ints(text: str) -> list[int]:
    """Read counts with commas between them."""
    return [positive_int(part) for part in text.split(",")]
