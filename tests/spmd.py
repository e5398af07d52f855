"""Real processes for tests: started once, they form a group of any size and run a function each.

A job is a function of :mod:`rank_jobs`, called in every rank as ``job(group, *arguments,
**options)``; what it returns (or raises, as a :class:`Raised`) comes back in rank order.
"""

import contextlib
import importlib
import multiprocessing
import os
import socket
import traceback
from typing import NamedTuple

MOST = 4


class Raised(NamedTuple):
    """What a rank raised."""

    kind: str
    text: str
    traceback: str
    notes: tuple = ()


class Ranks:
    """MOST processes in one gloo world."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        port = find_port()
        self._pipes, self._processes = [], []
        for rank in range(MOST):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, port, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, count, job, *arguments, options=None, env=None, seconds=120):
        """Run ``job`` in the first ``count`` ranks, in a group of their own."""
        for pipe in self._pipes[:count]:
            pipe.send((count, job, arguments, options or {}, env or {}))
        found = []
        for rank, pipe in enumerate(self._pipes[:count]):
            if not pipe.poll(seconds):
                raise TimeoutError(f"rank {rank} has not answered {job} within {seconds} s")
            try:
                found.append(pipe.recv())
            except EOFError:  # it died
                found.append(None)
        return found

    def ask(self, count, job, *arguments, **options):
        """Like :meth:`run`, for jobs that must not fail."""
        found = self.run(count, job, *arguments, **options)
        for rank, value in enumerate(found):
            assert not isinstance(value, Raised), f"rank {rank}:\n{value.traceback}"
        return found

    def close(self):
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def find_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def serve(rank, port, pipe):
    """The life of one process."""
    os.environ.update(OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    from samestep import rendezvous

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=MOST
    )
    jobs = importlib.import_module("rank_jobs")
    groups = [dist.new_group(range(count)) for count in range(1, MOST + 1)]
    while (order := pipe.recv()) is not None:
        count, name, arguments, options, env = order
        before = {key: os.environ.get(key) for key in env}
        os.environ.update(env)
        try:
            torch.manual_seed(0)
            answer = getattr(jobs, name)(groups[count - 1], *arguments, **options)
        except BaseException as error:
            notes = tuple(getattr(error, "__notes__", ()))
            answer = Raised(type(error).__name__, str(error), traceback.format_exc(), notes)
        rendezvous.leave()  # the next job finds a fresh line, whatever became of this one
        for key, value in before.items():
            if value is None:
                os.environ.pop(key)
            else:
                os.environ[key] = value
        pipe.send(answer)
    dist.destroy_process_group()
