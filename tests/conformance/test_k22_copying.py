"""K22. Copying and saving, of the wrapper and from inside forward."""

import copy
import io
import pickle

import torch
from compare import check_same, rows
from reports import beyond, report
from torch import nn

from samestep import DataParallel


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4).double()
        self.head = nn.Linear(4, 2).double()

    def forward(self, x):
        return self.head(self.body(x))


class Teaching(Head):
    """Copies a part of itself in forward, as momentum teachers do."""

    def forward(self, x):
        teacher = copy.deepcopy(self.head).requires_grad_(False)
        whole = copy.deepcopy(self)
        assert whole is not self
        assert next(whole.parameters()).is_leaf
        y = self.body(x)
        return self.head(y) - 0.5 * teacher(y) + 0 * whole.head(y).detach()


class Saving(Head):
    def forward(self, x):
        file = io.BytesIO()
        torch.save(self, file)
        torch.save(self.state_dict(), file := io.BytesIO())
        file.seek(0)
        assert list(torch.load(file)) == list(self.state_dict())
        assert len(pickle.dumps(self)) > 0
        return super().forward(x)


@report("P132", "pytorch/pytorch#33785")
def test_a_replica_and_its_children_can_be_copied_in_forward():
    check_same(Teaching(), rows(7, 3, grad=True))


@report("P133", "pytorch/pytorch#37182")
def test_a_replica_can_be_saved_in_forward():
    check_same(Saving(), rows(7, 3))


@report("P133", "pytorch/pytorch#37182")
def test_the_wrapper_is_saved_without_replicas_and_works_after_loading():
    model = DataParallel(Head(), replicas=3, split="balanced")
    x = rows(7, 3)
    expected = model(x)
    expected.sum().backward()
    plain_size = len(pickle.dumps(model.module))
    saved = pickle.dumps(model)
    assert len(saved) < plain_size + 2000
    loaded = pickle.loads(saved)
    assert torch.equal(loaded(x), expected)
    assert loaded.num_replicas == 3
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), expected)


@report("P134", "pytorch/xla#755")
def test_replicas_start_equal_and_are_the_source_modules_values():
    seen = []

    class Looking(Head):
        def forward(self, x):
            seen.append([parameter.detach().clone() for parameter in self.parameters()])
            return super().forward(x)

    module = Looking()
    DataParallel(module, replicas=4)(rows(8, 3))
    assert len(seen) == 4
    for found in seen:
        assert all(torch.equal(a, b) for a, b in zip(found, module.parameters(), strict=True))


@beyond("K22")
def test_a_copy_of_the_wrapper_shares_nothing_and_trains_by_itself():
    model = DataParallel(Head(), replicas=3)
    x = rows(7, 3)
    model(x).sum().backward()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.head.bias.add_(1)
    torch.testing.assert_close(other(x), model(x) + 1)
    other.zero_grad()
    other(x).sum().backward()
    torch.testing.assert_close(other.body.weight.grad, model.body.weight.grad)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(other)
    assert averaged(x).shape == (7, 2)


@beyond("K22")
def test_a_wrapped_model_goes_to_a_forked_process():
    model = DataParallel(Head(), replicas=3)
    x = rows(7, 3)
    expected = model(x).detach()

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            with torch.no_grad():
                return model(x)

    loader = torch.utils.data.DataLoader(
        Rows(), batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    for output in loader:
        torch.testing.assert_close(output, expected)
