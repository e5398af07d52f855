# %% [markdown]
# # Data parallelism in one line
#
# An ordinary PyTorch program and one more line: the wrapper cuts every batch into shards, runs a
# replica of the model on each, and puts the outputs together again. The loop keeps seeing the whole
# batch and the whole output.
#
# With several accelerators, each gets a replica. To see several replicas on any machine, start
# Python with the environment variable `SAMESTEP_REPLICAS=2` (or 3, or 8). The script takes no
# arguments.

# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from samestep import DataParallel

input_size = 5
output_size = 2
batch_size = 30
data_size = 100

# %% [markdown]
# ## Where things are
#
# `model.to(device)` moves the model itself. `tensor.to(device)` never moves the tensor: it returns
# one that is on the device, and the result must be assigned.

# %%
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
device = torch.device(device)

layer = nn.Linear(2, 2)
print("model.to returns the model itself:", layer.to(device) is layer)

tensor = torch.zeros(2)
tensor.to(torch.float64)
print("without an assignment the tensor is still", tensor.dtype)
tensor = tensor.to(torch.float64)
print("with one it is", tensor.dtype)

# %% [markdown]
# ## A dataset and a model
#
# The model says what reaches it. Replicas print at the same time, so each line is written at once,
# its line end included.


# %%
class RandomDataset(Dataset):
    def __init__(self, size, length):
        self.data = torch.randn(length, size)

    def __getitem__(self, index):
        return self.data[index]

    def __len__(self):
        return len(self.data)


class Model(nn.Module):
    def __init__(self, input_size, output_size):
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)

    def forward(self, inputs):
        outputs = self.fc(inputs)
        line = f"\tIn Model: input size {inputs.size()} output size {outputs.size()}\n"
        print(line, end="")
        return outputs


loader = DataLoader(RandomDataset(input_size, data_size), batch_size=batch_size, shuffle=True)

# %% [markdown]
# ## The one line

# %%
model = Model(input_size, output_size)
model = DataParallel(model)  # <- the one line
model = model.to(device)

if model.num_replicas > 1:
    devices = ", ".join(dict.fromkeys(str(slot.device) for slot in model.slots))
    print(f"Let's use {model.num_replicas} replicas on {devices}!")

# %% [markdown]
# ## The loop
#
# It does not know how many replicas there are.

# %%
for data in loader:
    inputs = data.to(device)
    outputs = model(inputs)
    print("Outside: input size", inputs.size(), "output_size", outputs.size())
