"""``samestep run``: torchrun with the right settings, quiet until something fails.

What it holds: :class:`Launch`, one launch as the user asked for it, checked; :func:`run`, which
hands it to torch's own elastic agent; where the output of the ranks goes; and the last words.

Why it exists: torchrun shows all output or none, does not tell the cause of a failure from its
consequences, and leaves processes behind. Rendezvous, ranks and their environment are torch's.

Guarantees:
    - the ranks see the environment that torchrun sets, and nothing else is needed in the script:
      ``torchrun script.py`` runs the same script;
    - each rank's output is in a file of its own, rank 0's also on the terminal as it comes;
    - the first failure is the last thing on the terminal, and its exit status the launcher's;
    - after a failure, Ctrl-C or SIGTERM no process of the ranks' process groups is left.

Must not: know what the script does, or be imported by anything that trains.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import signal
import socket
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from samestep import starter, tune
from samestep.devices import count_cores
from samestep.endings import Ending, choose_first, read_ending
from samestep.output import Logs, make_folder

__all__ = ["Launch", "run"]

AGENT = "torch.distributed.elastic"  # its logger
AGENT_LOG = "agent.log"
MAX_GRACE = 25.0  # torch's agent kills after 30 seconds what has not ended by then
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch, as asked for.

    Args:
        program: a script, a module's name or a program, and its arguments.
        kind: "script", "module" (as ``python -m``) or "program" (anything that can be executed).
        workers: ranks on this machine; None: one per accelerator, without accelerators as many as
            the usable cores allow with that many threads each.
        threads_per_worker: intra-op threads of a rank; None: ``OMP_NUM_THREADS`` if it is set,
            else 1.
        nnodes: machines; the command runs once on each.
        node_rank: this machine's number, from 0; None: the rendezvous gives it.
        rdzv_endpoint: HOST or HOST:PORT where the machines meet; None: this machine only.
        rdzv_backend: "c10d" or "static"; None: "static" if ``node_rank`` is given.
        rdzv_id: a name for this launch, the same on all machines; None: "samestep".
        local_addr: the name by which the others reach this machine; None: its host name.
        max_restarts: how often all ranks may start again after a failure.
        grace: seconds between telling the ranks to stop and killing them, 0 to 25.
        log_dir: where a fresh folder for the output is made; None: where temporary files go.

    Raises:
        ValueError: an argument is out of its range, two of them disagree, or the program is not
            there. The message says it with the names of the command line.
    """

    program: tuple[str, ...]
    kind: str = "script"
    workers: int | None = None
    threads_per_worker: int | None = None
    nnodes: int = 1
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_backend: str | None = None
    rdzv_id: str | None = None
    local_addr: str | None = None
    max_restarts: int = 0
    grace: float = 10.0
    log_dir: str | None = None

    def __post_init__(self) -> None:
        if not hasattr(os, "fork"):
            raise ValueError("samestep run needs a POSIX system; here, use torchrun")
        if not 0 <= self.grace <= MAX_GRACE:
            raise ValueError(f"--grace must be from 0 to {MAX_GRACE:g} seconds, got {self.grace:g}")
        if self.log_dir is not None and os.path.isfile(self.log_dir):
            raise ValueError(f"--log-dir {self.log_dir} is there and is not a folder")
        self._check_program()
        self._check_machines()

    def _check_program(self) -> None:
        name = self.program[0] if self.program else ""
        if not name:
            raise ValueError("no script was given")
        if self.kind == "script" and not Path(name).exists():
            raise ValueError(
                f"no such script: {name} (for a module use -m, for a program --no-python)"
            )
        if self.kind == "program" and shutil.which(name) is None:
            raise ValueError(f"no such program: {name}")

    def _check_machines(self) -> None:
        if self.rdzv_endpoint is None:
            for value, name in (
                (self.rdzv_backend, "--rdzv-backend"),
                (self.rdzv_id, "--rdzv-id"),
                (self.local_addr, "--local-addr"),
                (self.node_rank or None, "--node-rank"),
            ):
                if value is not None:
                    raise ValueError(f"{name} {value} needs --rdzv-endpoint HOST:PORT")
            if self.nnodes > 1:
                raise ValueError(
                    f"--nnodes {self.nnodes} needs --rdzv-endpoint HOST:PORT, the same on each "
                    f"machine: an address of one of them and a free port"
                )
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            raise ValueError(
                f"--node-rank must be from 0 to --nnodes - 1 "
                f"(--node-rank {self.node_rank}, --nnodes {self.nnodes})"
            )
        if self.rdzv_backend == "c10d" and self.node_rank is not None:
            raise ValueError(
                "--rdzv-backend c10d numbers the machines itself; leave out --node-rank, or use "
                "--rdzv-backend static"
            )
        if self.rdzv_backend == "static" and self.node_rank is None:
            raise ValueError("--rdzv-backend static needs --node-rank on each machine")
        if self.backend == "static" and self.rdzv_endpoint and ":" not in self.rdzv_endpoint:
            raise ValueError(
                f"with --node-rank, --rdzv-endpoint needs a port (got {self.rdzv_endpoint})"
            )

    @property
    def backend(self) -> str:
        """The kind of rendezvous."""
        several = self.rdzv_endpoint is not None and self.node_rank is not None
        return self.rdzv_backend or ("static" if several else "c10d")

    @property
    def threads(self) -> int:
        """Intra-op threads of a rank."""
        if self.threads_per_worker is not None:
            return self.threads_per_worker
        text = os.environ.get("OMP_NUM_THREADS", "")
        return int(text) if text.isdigit() and int(text) > 0 else 1

    @property
    def num_ranks(self) -> int:
        """Ranks on this machine."""
        if self.workers is not None:
            return self.workers
        if torch.accelerator.is_available():
            return torch.accelerator.device_count()
        return max(1, count_cores() // self.threads)

    @property
    def command(self) -> list[str]:
        """What a rank runs."""
        if self.kind == "program":
            return list(self.program)
        how = ["-u", "-m"] if self.kind == "module" else ["-u"]  # -u: output as it comes
        return [sys.executable, *how, *self.program]

    def make_environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """What a rank's environment gets besides torch's own variables."""
        added = dict.fromkeys(THREAD_VARIABLES, str(self.threads))
        # Idle threads that spin would take the cores of the other ranks; memory that is kept is not
        # cleared again at each step. And a crash in native code shows where Python was. What the
        # user has set stays.
        wanted = {"OMP_WAIT_POLICY": "passive", "PYTHONFAULTHANDLER": "1", **tune.ENVIRONMENT}
        return added | {name: value for name, value in wanted.items() if name not in given}


def run(launch: Launch) -> int:
    """Run the ranks of this machine to their end.

    Must be called in the main thread: it takes over SIGINT, SIGTERM, SIGHUP and SIGQUIT.

    Args:
        launch: what to run.

    Returns:
        0, or the exit status of the rank that failed first (128 + the signal if one ended it), or
        128 + the signal that stopped the launcher, or 1 if the machines did not come together.
    """
    # The agent takes the signals over when it starts the ranks. Before, there is nothing to end but
    # this process; Python's own handler would wait until the machines have met.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    logs = Logs(make_folder(launch.log_dir), launch.make_environment(os.environ))
    keep_agent_quiet(logs.folder / AGENT_LOG)
    say(f"{describe_count(launch.num_ranks)} on {socket.gethostname()}, output in {logs.folder}")
    interpreter = [sys.executable, "-I", "-S"]  # the starter needs no packages
    words = [*interpreter, starter.__file__, str(os.getpid()), str(launch.grace), *launch.command]
    try:
        elastic_launch(make_config(launch, logs), words[0])(*words[1:])
        failure = None
    except Exception as error:  # whatever torch raises when the machines do not meet, or part
        failure = error
    logs.close()  # what rank 0 has written comes before the last words
    if failure is None:
        return 0
    if isinstance(failure, SignalException):
        say(f"stopped by {failure.sigval.name}")
        return 128 + int(failure.sigval)
    if isinstance(failure, ChildFailedError):
        return report_failure(logs, failure)
    logging.getLogger(AGENT).error("the agent failed", exc_info=failure)
    say(f"the machines did not meet or lost each other: {type(failure).__name__}: {failure}")
    say(f"details in {logs.folder / AGENT_LOG}")
    return 1


# ---------------------------------------------------------------------------
# Settings of torch's agent
# ---------------------------------------------------------------------------


def make_config(launch: Launch, logs: Logs) -> LaunchConfig:
    """The agent's settings."""
    alone = launch.rdzv_endpoint is None
    signals = ["SIGTERM", "SIGINT", "SIGQUIT"]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # unless started with nohup
        signals.append("SIGHUP")
    options: dict[str, Any] = {
        "min_nodes": launch.nnodes,
        "max_nodes": launch.nnodes,
        "nproc_per_node": launch.num_ranks,
        "logs_specs": logs,
        # Port 0 is any free one, so that launches on one machine do not meet by accident.
        "rdzv_endpoint": launch.rdzv_endpoint or "localhost:0",
        "rdzv_backend": launch.backend,
        "rdzv_configs": {} if launch.backend == "c10d" else {"rank": launch.node_rank},
        "run_id": str(uuid.uuid4()) if alone else launch.rdzv_id or "samestep",
        # A host name that resolves nowhere, as in many containers, does not matter on one machine.
        "local_addr": "localhost" if alone else launch.local_addr,
        "max_restarts": launch.max_restarts,
        # Of newer versions of torch. The starter's own grace is over before.
        "signals_to_handle": ",".join(signals),
        "shutdown_timeout": 30,
    }
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    return LaunchConfig(**{name: value for name, value in options.items() if name in known})


def keep_agent_quiet(path: Path) -> None:
    """Send what torch's agent has to say into a file; it is made when there is something."""
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    for name in (AGENT, "torch.distributed.launcher"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False


# ---------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------


def report_failure(logs: Logs, error: ChildFailedError) -> int:
    """Say which rank failed first and why; returns the exit status."""
    endings = {}
    for rank in logs.stems:
        ending = read_ending(rank, logs.find(rank, "exit.json"), logs.find(rank, "stderr.log"))
        if ending is not None:
            endings[rank] = ending
    for rank, failure in error.failures.items():  # whose starter was killed
        endings.setdefault(rank, Ending(rank, failure.exitcode, float(failure.timestamp)))
    first = choose_first(endings.values())
    if first is None:  # all ended well, and one of their starters did not
        say(f"the agent reports a failure, see {logs.folder}")
        return 1
    log = logs.find(first.rank, "stderr.log")
    if first.report and first.rank != 0:  # rank 0's is on the terminal already
        sys.stderr.write(first.report + "\n")
    how = describe_end(first)
    verdict = "failed first"
    if first.is_echo:
        verdict = "lost another rank, which failed first elsewhere"
        if len(logs.stems) == logs.world_size:
            verdict = "could not go on with the others (a RankError in each says why)"
    who = f"rank {first.rank} of {logs.world_size} on {socket.gethostname()}"
    say(f"{who} {verdict}: {how}, its output: {log}")
    return first.exit_status


def describe_end(ending: Ending) -> str:
    """An exit status or a signal, in words."""
    if ending.status >= 0:
        return f"exit status {ending.status}"
    try:
        return f"killed by {signal.Signals(-ending.status).name}"
    except ValueError:  # a real-time signal
        return f"killed by signal {-ending.status}"


def describe_count(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def say(line: str) -> None:
    """One line to the user, on standard error: standard output is the script's."""
    sys.stderr.write(f"samestep run: {line}\n")
    sys.stderr.flush()
