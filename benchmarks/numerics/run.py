"""How far a step of the wrapped module is from the plain module's, in numbers.

    python benchmarks/numerics/run.py                     measure everything, print the tables
    python benchmarks/numerics/run.py --json FILE         also write every sample to FILE
    python benchmarks/numerics/run.py --models mlp --replicas 2 3 --steps 2      a part of it

Every comparison starts from the same weights and the same rows. The numbers are deviations: the
largest difference in a tensor, divided by the largest value in that tensor; of several tensors, the
worst one.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samestep import DataParallel

ROWS = 37  # no K from 2 to 8 divides it
CLASSES = 10
LEARNING_RATE = 0.05
DTYPES = {"float32": torch.float32, "float64": torch.float64}


# -- The models: each a way to make it, a way to make rows, and the wrapper's options --------------


class Recurrent(nn.Module):
    """An LSTM of two layers; the last time step decides."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(16, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.cells(rows)[0][:, -1])


class Attention(nn.Module):
    """A Transformer encoder of two layers, without dropout; the mean over time decides."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.layers(rows).mean(1))


def make_mlp() -> nn.Module:
    layers = [nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES)]
    return nn.Sequential(*layers)


def make_cnn() -> nn.Module:
    # No bias before a BatchNorm: its gradient is zero in exact arithmetic, so that all there is of
    # it would be rounding.
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        nn.MaxPool2d(2),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES)),
    )


@dataclass(frozen=True)
class Case:
    """A model, the shape of one row, and what the wrapper is told."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    is_synchronised: bool = False


CASES = {
    "mlp": Case(make_mlp, (32,)),
    "cnn, BatchNorm synchronised": Case(make_cnn, (3, 16, 16), is_synchronised=True),
    "lstm": Case(Recurrent, (12, 16)),
    "transformer": Case(Attention, (12, 32)),
}


def make_model(name: str, dtype: torch.dtype) -> nn.Module:
    """The same weights every time; the float64 ones are those of float32, widened."""
    torch.manual_seed(1)
    return CASES[name].make().to(dtype)


def make_batches(name: str, dtype: torch.dtype, count: int) -> list[tuple[Tensor, Tensor]]:
    """The same batches every time."""
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(ROWS, *CASES[name].shape, generator=generator).to(dtype),
            torch.randint(CLASSES, (ROWS,), generator=generator),
        )
        for _ in range(count)
    ]


# -- Measuring -------------------------------------------------------------------------------------


def deviate(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest difference relative to the largest value, of the worst tensor."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.is_floating_point() and other.numel():
            scale = other.double().abs().max().item() or 1.0
            worst = max(worst, (one.double() - other.double()).abs().max().item() / scale)
    return worst


Result = dict[str, list[Tensor]]


def train(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], flip: bool = False) -> Result:
    """Train; keep output, gradients and statistics of the first step, and the last weights.

    Args:
        flip: hand the rows over in reverse order, and put the output back in order: the same sums
            in another order of additions.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    left: Result = {}
    for rows, targets in batches:
        optimizer.zero_grad()
        output = model(rows.flip(0)).flip(0) if flip else model(rows)
        F.cross_entropy(output, targets).backward()
        if not left:
            left["outputs"] = [output.detach()]
            left["gradients"] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            left["statistics"] = [buffer.clone() for buffer in model.buffers()]
        optimizer.step()
    left["weights"] = [parameter.detach() for parameter in model.parameters()]
    return left


def compare(found: Result, expected: Result) -> dict[str, float]:
    return {name: deviate(found[name], expected[name]) for name in expected if expected[name]}


def measure_case(name: str, dtype: str, replicas: Sequence[int], steps: int) -> dict[str, Any]:
    """One model and dtype: the wrapper for every K, and two yardsticks for size."""
    case, kind = CASES[name], DTYPES[dtype]
    batches = make_batches(name, kind, steps)
    plain = train(make_model(name, kind), batches)
    exact = train(make_model(name, torch.float64), make_batches(name, torch.float64, steps))
    found: dict[str, Any] = {
        "rows reversed": compare(train(make_model(name, kind), batches, flip=True), plain),
        "plain from float64": compare(plain, exact),
    }
    for num_replicas in replicas:
        options = {"sync_batch_norm": case.is_synchronised}
        runs = []
        for serial in ("", "", "1"):
            os.environ["SAMESTEP_SERIAL"] = serial
            model = DataParallel(make_model(name, kind), replicas=num_replicas, **options)
            runs.append(train(model, batches))
        found[f"K={num_replicas}"] = {
            **compare(runs[0], plain),
            "from float64": compare(runs[0], exact),
            "same bits again": is_same(runs[0], runs[1]),
            "same bits in one thread": is_same(runs[0], runs[2]),
        }
    return found


def is_same(one: Result, other: Result) -> bool:
    pairs = ((a, b) for name in one for a, b in zip(one[name], other[name], strict=True))
    return all(torch.equal(a, b) for a, b in pairs)


# -- What is different, and by how much ------------------------------------------------------------


class TokenLoss(nn.Module):
    """A loss over tokens, of which every row has another number: the rest is padding (-100)."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.head = nn.Linear(16, CLASSES)
        self.word = word

    def forward(self, rows: Tensor, labels: Tensor) -> Any:
        logits = self.head(rows).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction=self.word)
        return loss if self.word == "mean" else (loss, (labels != -100).sum())


class Spread(nn.Module):
    """A number that is not a mean over rows."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows.std()


def measure_pieces() -> float:
    """The share of a linear layer's outputs that change in a bit when its rows come in pieces."""
    torch.manual_seed(4)
    layer, rows = nn.Linear(64, 64), torch.randn(ROWS, 64)
    pieces = torch.cat([layer(piece) for piece in rows.chunk(8)])
    return (pieces != layer(rows)).double().mean().item()


def measure_bfloat16(num_replicas: int) -> dict[str, float]:
    """Gradients of the mlp under bfloat16 autocast, from each other and from float32."""
    model = make_model("mlp", torch.float32)
    rows, targets = make_batches("mlp", torch.float32, 1)[0]

    def differentiate(module: nn.Module, enabled: bool = True) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = module(rows)
        return list(
            torch.autograd.grad(F.cross_entropy(output.float(), targets), list(model.parameters()))
        )

    plain, exact = differentiate(model), differentiate(model, enabled=False)
    wrapped = differentiate(DataParallel(model, replicas=num_replicas))
    return {
        "wrapped, from plain": deviate(wrapped, plain),
        "plain, from plain in float32": deviate(plain, exact),
        "wrapped, from plain in float32": deviate(wrapped, exact),
    }


def measure_differences(num_replicas: int) -> dict[str, float]:
    """What a shard sees of its own rows only, in float64: none of it is rounding."""
    torch.manual_seed(3)
    double = torch.float64
    found: dict[str, float] = {}

    name = "cnn, BatchNorm synchronised"
    batches = make_batches(name, double, 1)
    plain = train(make_model(name, double), batches)
    wrapped = train(DataParallel(make_model(name, double), replicas=num_replicas), batches)
    for part in ("outputs", "gradients"):
        found[f"BatchNorm not synchronised: {part}"] = deviate(wrapped[part], plain[part])
    # Mean, variance and counter of the first norm, then those of the second. What reaches the
    # second was normalised by shard.
    both = list(zip(wrapped["statistics"], plain["statistics"], strict=True))
    for place, pairs in (("first", both[:3]), ("second", both[3:])):
        value = max(deviate([one], [other]) for one, other in pairs)
        found[f"BatchNorm not synchronised: running statistics of the {place} norm"] = value

    labels = torch.randint(CLASSES, (ROWS, 12))
    lengths = torch.arange(ROWS) * 12 // ROWS + 1  # short rows first: shards differ in tokens
    labels[torch.arange(12) >= lengths.unsqueeze(1)] = -100
    rows = torch.randn(ROWS, 12, 16, dtype=double)
    loss = TokenLoss("mean").to(double)
    expected = loss(rows, labels)
    value = DataParallel(loss, replicas=num_replicas)(rows, labels)
    found["mean over tokens, inside: loss"] = deviate([value], [expected])
    sums = copy.deepcopy(loss)
    sums.word = "sum"
    model = DataParallel(sums, replicas=num_replicas, reduction="sum", out_dims={"1": "sum"})
    total, count = model(rows, labels)
    found["sum and count inside, divided outside: loss"] = deviate([total / count], [expected])
    model = DataParallel(loss.head, replicas=num_replicas)
    outside = F.cross_entropy(model(rows).flatten(0, 1), labels.flatten())
    found["mean over tokens, outside: loss"] = deviate([outside], [expected])

    value = DataParallel(Spread(), replicas=num_replicas)(rows)
    found["standard deviation, inside: output"] = deviate([value], [rows.std()])
    return found


# -- Telling ---------------------------------------------------------------------------------------


def find_worst(samples: dict[str, Any], part: str) -> float | None:
    found = [v[part] for key, v in samples.items() if key.startswith("K=") and part in v]
    return max(found, default=None)


def format_tables(results: dict[str, Any]) -> list[str]:
    """The tables as Markdown."""
    lines = ["| model | dtype | outputs | gradients | statistics | weights at the end |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    parts = ["outputs", "gradients", "statistics", "weights"]
    for (name, dtype), samples in iter_samples(results):
        cells = [show(find_worst(samples, part)) for part in parts]
        lines.append(f"| {name} | {dtype} | {' | '.join(cells)} |")
    lines += ["", "| gradients | dtype | wrapped, all K | plain, rows reversed |"]
    lines.append("| --- | --- | --- | --- |")
    for (name, dtype), samples in iter_samples(results):
        cells = [show(find_worst(samples, "gradients"))]
        cells.append(show(samples["rows reversed"]["gradients"]))
        lines.append(f"| {name} | {dtype} | {' | '.join(cells)} |")
    lines += ["", "| gradients in float32, from those in float64 | plain | wrapped, K from 2 |"]
    lines.append("| --- | --- | --- |")
    for (name, dtype), samples in iter_samples(results):
        if dtype == "float32":
            names = [name for name in samples if name.startswith("K=") and name != "K=1"]
            wrapped = [samples[name]["from float64"] for name in names]
            low = min(value["gradients"] for value in wrapped)
            high = max(value["gradients"] for value in wrapped)
            plain = show(samples["plain from float64"]["gradients"])
            lines.append(f"| {name} | {plain} | {show(low)} to {show(high)} |")
    lines += ["", f"| in float64, {results['differences']['replicas']} replicas | deviation |"]
    lines.append("| --- | --- |")
    for name, value in results["differences"].items():
        if name != "replicas":
            lines.append(f"| {name} | {show(value)} |")
    lines += ["", "| gradients of the mlp under bfloat16 autocast, 4 replicas | deviation |"]
    lines.append("| --- | --- |")
    lines += [f"| {name} | {show(value)} |" for name, value in results["bfloat16"].items()]
    return lines


def iter_samples(results: dict[str, Any]) -> Iterable[tuple[tuple[str, str], dict[str, Any]]]:
    for name, by_dtype in results["cases"].items():
        for dtype, samples in by_dtype.items():
            yield (name, dtype), samples


def show(value: float | None) -> str:
    if value is None:
        return "none there"
    return "0" if value == 0 else f"{value:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--replicas", nargs="+", type=int, default=list(range(1, 9)), metavar="K")
    parser.add_argument("--steps", type=int, default=20, help="training steps of each run")
    parser.add_argument("--json", type=Path, help="where every sample is written")
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # of the plain module; a replica has one anyway
    cases = {
        name: {
            dtype: measure_case(name, dtype, arguments.replicas, arguments.steps)
            for dtype in DTYPES
        }
        for name in arguments.models
    }
    results = {
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
            "vector unit": torch.backends.cpu.get_cpu_capability(),
            "rows": ROWS,
            "steps": arguments.steps,
        },
        "cases": cases,
        "differences": {"replicas": 4, **measure_differences(4)},
        "bfloat16": measure_bfloat16(4),
        "changed by pieces": measure_pieces(),
    }
    flags = [
        sample[key]
        for _, samples in iter_samples(results)
        for name, sample in samples.items()
        if name.startswith("K=")
        for key in ("same bits again", "same bits in one thread")
    ]
    print("\n".join(format_tables(results)))
    share = results["changed by pieces"]
    print(f"\nof a linear layer's outputs, {share:.1%} change when {ROWS} rows come in 8 pieces")
    print(f"same bits again, and one shard after another: {sum(flags)} of {len(flags)} runs")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
