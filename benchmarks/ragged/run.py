"""How far from the plain module are gradients on two ranks, ours and torch's DDP's?

    python benchmarks/ragged/run.py --save NAME

For batches of several sizes, in float64: the largest difference of a gradient from the plain
module's in one process, divided by that gradient's largest value; and of the weights after 20 steps
of SGD. DDP twice: each rank with its rows of a batch cut in two, and with what torch's
DistributedSampler gives it, which repeats rows to make the ranks' shares equal.
"""

import argparse
import copy
import json
import os
import platform
import socket
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import samestep

RANKS, STEPS, FEATURES, CLASSES = 2, 20, 12, 4
SIZES = [8, 64, 7, 9, 33, 63]
WAYS = ["DDP, rows cut", "DDP, DistributedSampler", "samestep, local", "samestep, global"]


def share(way, rows, rank):
    """Which rows of a batch a rank passes."""
    if way == "samestep, global":
        return list(range(rows))
    if way == "DDP, DistributedSampler":
        sampler = torch.utils.data.DistributedSampler(
            range(rows), num_replicas=RANKS, rank=rank, shuffle=False
        )
        return list(sampler)
    first = -(-rows // RANKS)
    return list(range(first) if rank == 0 else range(first, rows))


def wrap(way, module):
    if way.startswith("DDP"):
        return nn.parallel.DistributedDataParallel(module)
    return samestep.DataParallel(module, replicas=RANKS, batch=way.split()[-1])


def deviate(found, right):
    return max(
        float(((a - b).abs().max() / b.abs().max()).detach())
        for a, b in zip(found, right, strict=True)
    )


def train(way, rows, rank):
    """Deviations of the first gradient and of the weights at the end."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES)).double()
    module = copy.deepcopy(plain)
    model = wrap(way, module)
    generator = torch.Generator().manual_seed(7)
    own, first = share(way, rows, rank), None
    for _ in range(STEPS):
        x = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64)
        y = torch.randint(0, CLASSES, (rows,), generator=generator)
        F.cross_entropy(plain(x), y).backward()
        F.cross_entropy(model(x[own]), y[own]).backward()
        if first is None:
            first = deviate(
                [p.grad for p in module.parameters()], [p.grad for p in plain.parameters()]
            )
        for one in (plain, module):
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    return first, deviate(list(module.parameters()), list(plain.parameters()))


def work(rank, port, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    found = {f"{way}, B = {rows}": train(way, rows, rank) for rows in SIZES for way in WAYS}
    if rank == 0:
        queue.put(found)
    dist.barrier()
    dist.destroy_process_group()


def format_rows(found):
    """The rows of the table in docs/numerics.md."""
    return [
        f"| {rows} | "
        + " | ".join("{:.1e}, {:.1e}".format(*found[f"{way}, B = {rows}"]) for way in WAYS)
        + " |"
        for rows in SIZES
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", metavar="NAME", help="write results/DATE_NAME.json")
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    processes = [context.Process(target=work, args=(rank, port, queue)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    found = queue.get()
    for process in processes:
        process.join()
    print("\n".join(format_rows(found)))
    if arguments.save:
        path = Path(__file__).parent / "results" / f"{date.today()}_{arguments.save}.json"
        machine = {"torch": torch.__version__, "processor": platform.processor() or "unknown"}
        path.write_text(json.dumps({"machine": machine, "deviations": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
