"""Where the ranks of a launch write: a file per rank and stream, and rank 0 on the terminal too.

What it holds: the folder of one launch, the names of the files in it, in the form in which torch's
agent asks for them, and the thread that shows rank 0's output as it comes.

Why it exists: torch's own copying to the terminal puts a prefix before each piece and turns the
carriage returns of a progress bar into line ends.

Guarantees: two launches never write into the same file; what rank 0 writes is shown byte by byte
within a twentieth of a second, and completely before the last words of the launcher.

Must not: start processes, or look at what is written.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from samestep.starter import EXIT_FILE

__all__ = ["Logs", "make_folder"]

TAIL_INTERVAL = 0.05  # seconds


def make_folder(parent: str | None) -> Path:
    """A fresh folder for one launch, so that two launches never write into the same file."""
    if parent is not None:
        os.makedirs(parent, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path(tempfile.mkdtemp(prefix=f"samestep-{stamp}-", dir=parent)).resolve()


class Logs(LogsSpecs):
    """The files of one launch; the agent asks for them before each start of the ranks."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        super().__init__(log_dir=str(folder))
        self.folder = folder
        self.environment = dict(environment)
        self.stems: dict[int, str] = {}  # by rank, of the latest start
        self.world_size = 0
        self._tail: Tail | None = None

    @property
    def root_log_dir(self) -> str:
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name the files of all local ranks and complete their environments."""
        self.close()
        self.stems = {}
        destination = LogsDest()
        for local_rank, env in envs.items():
            rank, self.world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
            restart = int(env["TORCHELASTIC_RESTART_COUNT"])
            self.stems[rank] = f"rank{rank}" + (f".restart{restart}" if restart else "")
            destination.stdouts[local_rank] = str(self.find(rank, "stdout.log"))
            destination.stderrs[local_rank] = str(self.find(rank, "stderr.log"))
            destination.error_files[local_rank] = str(self.find(rank, "error.json"))
            env["TORCHELASTIC_ERROR_FILE"] = destination.error_files[local_rank]
            env[EXIT_FILE] = str(self.find(rank, "exit.json"))
            env.update(self.environment)
        if 0 in self.stems:
            self._tail = Tail(
                {
                    self.find(0, "stdout.log"): sys.stdout.buffer,
                    self.find(0, "stderr.log"): sys.stderr.buffer,
                }
            )
            self._tail.start()
        return destination

    def find(self, rank: int, what: str) -> Path:
        """The path of one of a rank's files."""
        return self.folder / f"{self.stems[rank]}.{what}"

    def close(self) -> None:
        """Show what is left of rank 0's output, and no more."""
        if self._tail is not None:
            self._tail.stop()
            self._tail = None


class Tail(threading.Thread):
    """Copies what is added to files to streams, byte by byte as it is."""

    def __init__(self, copies: Mapping[Path, BinaryIO]) -> None:
        super().__init__(name="samestep-tail", daemon=True)
        for path in copies:
            path.touch()
        self._copies = [(path.open("rb"), stream) for path, stream in copies.items()]
        self._ended = threading.Event()

    def run(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(TAIL_INTERVAL)  # asked before the last look at the files
            self._copies = [pair for pair in self._copies if copy_new(*pair)]

    def stop(self) -> None:
        """Copy the rest and end."""
        self._ended.set()
        self.join()
        for file, _ in self._copies:
            file.close()


def copy_new(file: BinaryIO, stream: BinaryIO) -> bool:
    """Copy what was added; False once nobody reads the stream (``samestep run ... | head``)."""
    try:
        if data := file.read():
            stream.write(data)
            stream.flush()
    except OSError:
        file.close()
        return False
    return True
