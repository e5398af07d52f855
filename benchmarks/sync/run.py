"""When every parameter has changed: separate copies against one flat copy of as many bytes.

Usage: python benchmarks/sync/run.py [--blocks 40] [--save NAME]
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from _harness import Findings, Part, compare, make_parser, ratio
from _models import make

from samestep.devices import Slot
from samestep.replicas import ReplicaSet


def measure(name, options, findings):
    net, _ = make(name)
    replicas = ReplicaSet(share=False)  # as on another device: the replica holds its own memory
    slots = [Slot(0, torch.device("cpu"))]
    replicas.refresh(net, slots)
    parameters = list(net.parameters())
    source = torch.cat([p.detach().flatten() for p in parameters])
    target = torch.empty_like(source)

    def change():
        # All that counts for a replica is that the versions differ. Writing 400 MB instead would
        # leave some of them in the caches of one variant.
        versions = [p._version + 1 for p in parameters]
        torch._C._autograd._unsafe_set_version_counter(tuple(parameters), tuple(versions))

    variants = {
        "copies": Part(change, lambda _: replicas.refresh(net, slots)),
        "flat": Part(change, lambda _: target.copy_(source)),
    }
    before = replicas.stats()
    samples = compare(variants, num_blocks=options.blocks, max_seconds=options.seconds)
    assert replicas.stats() != before, "nothing was copied"
    findings.samples[name] = samples
    value = ratio(samples, "flat", "copies")
    what = f"{name}: {len(parameters)} tensors, {source.nbytes / 1e6:.0f} MB, time of a flat copy"
    findings.add(what, value, target=5, goal="<= 1.1")


def main():
    options = make_parser(__doc__, seconds=10).parse_args()
    torch.set_num_threads(1)
    findings = Findings()
    for name in ("lstm", "many", "wide"):
        measure(name, options, findings)
        findings.save(Path(__file__).parent, options.save)


if __name__ == "__main__":
    main()
