"""What ``samestep run`` starts for each rank: it starts the program, waits for it, and cleans up.

What it holds: a program of its own, run as ``python starter.py LAUNCHER GRACE COMMAND...``, that
stays beside the rank's process until that ends.

Why it exists: torch's agent kills a process, not what that process has started; it looks every
tenth of a second, too seldom to tell which of two ranks died first; and nobody would be left to act
once the launcher itself is killed.

Guarantees:
    - how and when the program ended, and when it was told to, stands in the file that
      ``SAMESTEP_EXIT_FILE`` names (the program does not see that variable);
    - a program that is told to stop (SIGINT, SIGTERM, SIGHUP, SIGQUIT) has GRACE seconds, then
      it is killed; if it was told to, or failed, everything left in its process group is killed;
    - when LAUNCHER (a process id) is gone, the program is told to stop within half a second;
    - rank 0 keeps the standard input, the other ranks read an empty one.

Must not: import torch or anything of ours. It is alive beside every rank, so it must be small and
start at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from types import FrameType

__all__ = ["EXIT_FILE", "main"]

EXIT_FILE = "SAMESTEP_EXIT_FILE"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
TICK = 0.5  # seconds between looks at the launcher and at the clock
CANNOT_START = 127  # as in a shell


class Watch:
    """Whether the program was told to stop, and what follows from it.

    Everything happens in signal handlers: the process itself does nothing but wait.
    """

    def __init__(self, launcher: int, grace: float, record: str) -> None:
        self.launcher = launcher
        self.grace = grace
        self.record = record
        self.deadline: float | None = None  # on the monotonic clock; None: nobody said stop
        self.told: float | None = None  # when somebody did, in seconds since 1970

    def stop(self, signum: int, frame: FrameType | None) -> None:
        """Somebody said stop, to the whole group: the program has heard it too."""
        if self.deadline is None:
            self.deadline, self.told = time.monotonic() + self.grace, time.time()
            signal.setitimer(signal.ITIMER_REAL, min(TICK, self.grace) or 0.001, TICK)

    def tick(self, signum: int, frame: FrameType | None) -> None:
        """Look at the clock and at the launcher."""
        if self.deadline is not None:
            if time.monotonic() >= self.deadline:
                self.note(-signal.SIGKILL)
                kill_group()
        elif os.getppid() != self.launcher:
            os.killpg(0, signal.SIGTERM)  # reaches this process as well, so that grace begins

    def note(self, status: int) -> None:
        """Write down how the program ended."""
        ending = {"status": status, "time": time.time(), "told": self.told}
        with open(self.record, "w") as file:
            json.dump(ending, file)


def main(words: list[str]) -> int:
    """Run one rank's program.

    Args:
        words: the launcher's process id, the seconds of grace, and the command.

    Returns:
        The program's exit status. If it failed, this process dies with what is left of its group.
    """
    if os.getpgrp() != os.getpid():  # torch has done it; a group of others must never be killed
        os.setsid()
    watch = Watch(int(words[0]), float(words[1]), os.environ.pop(EXIT_FILE))
    for signum in STOP_SIGNALS:
        signal.signal(signum, watch.stop)
    signal.signal(signal.SIGALRM, watch.tick)
    child = os.fork()
    if child == 0:
        become(words[2:])
    signal.setitimer(signal.ITIMER_REAL, TICK, TICK)
    _, status = os.waitpid(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    code = os.waitstatus_to_exitcode(status)
    watch.note(code)
    if code or watch.deadline is not None:
        kill_group()
    return code


def become(command: list[str]) -> None:
    """In the child: turn into the program. Does not return."""
    for signum in STOP_SIGNALS:  # one that the launcher's shell ignored must work here
        signal.signal(signum, signal.SIG_DFL)
    if os.environ.get("RANK") != "0":
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
    os._exit(CANNOT_START)


def kill_group() -> None:
    """Kill everything that the program has left behind, and this process with it.

    A program that left the group (a daemon in a session of its own) is spared: it asked for that.
    """
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
