"""A training that saves after every step and goes on from what it finds: tests kill and start it.

python resume.py FOLDER BATCH: each rank leaves a hash of the training's end in FOLDER.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import rank_jobs
import torch
from torch.utils.data import DataLoader, TensorDataset

import samestep

STEPS = 20


class Adam:
    """Adam with the state that torch's has, whose first step imports torch._dynamo: half a start.

    That torch's own optimizers go on to the bit is shown by test_checkpoint.py, without kills.
    """

    def __init__(self, parameters, rate=1e-2):
        self.parameters, self.rate, self.num_steps = list(parameters), rate, 0
        self.moments = [[torch.zeros_like(p) for p in self.parameters] for _ in range(2)]

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        self.num_steps += 1
        for parameter, mean, square in zip(self.parameters, *self.moments, strict=True):
            mean.lerp_(parameter.grad, 0.1)
            square.lerp_(parameter.grad.square(), 0.001)
            step = mean / (1 - 0.9**self.num_steps)
            spread = (square / (1 - 0.999**self.num_steps)).sqrt() + 1e-8
            parameter -= self.rate * step / spread

    def state_dict(self):
        return {"step": self.num_steps, "moments": self.moments}

    def load_state_dict(self, state):
        self.num_steps = state["step"]
        for own, found in zip(self.moments, state["moments"], strict=True):
            for moment, value in zip(own, found, strict=True):
                moment.copy_(value)


folder, batch = Path(sys.argv[1]), sys.argv[2]
rank = os.environ.get("RANK", "0")
(folder / f"{rank}.pid").write_text(str(os.getpid()))

torch.set_num_threads(1)
torch.manual_seed(3)
model = samestep.DataParallel(rank_jobs.Net(), replicas=8, batch=batch)
optimizer = Adam(model.parameters())
x, y = rank_jobs.make_data(1, rows=130)
loader = samestep.split_loader(
    DataLoader(TensorDataset(x[0], y[0]), batch_size=rank_jobs.ROWS, shuffle=True), model
)
everything = {"model": model, "optimizer": optimizer, "loader": loader}
saved = samestep.load(folder / "last.pt", **everything, missing_ok=True)
losses = saved["losses"] if saved else []
while len(losses) < STEPS:
    for rows, targets in loader:
        optimizer.zero_grad()
        loss = model(rows, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        samestep.save(folder / "last.pt", **everything, losses=losses, step=len(losses))
        if samestep.is_main():
            (folder / "step.txt").write_text(str(len(losses)))
        if len(losses) == STEPS:
            break
digest = rank_jobs.digest(
    model.state_dict(), optimizer.state_dict(), torch.stack(losses), torch.get_rng_state()
)
(folder / f"{rank}.hash").write_text(digest)
