"""K07. Losses and gradients have the whole batch's scale."""

import pytest
import torch
import torch.nn.functional as F
from compare import assert_same_state, check_same, rows, twin
from reports import beyond, report
from torch import nn

from samestep import DataParallel


class WithLoss(nn.Module):
    def __init__(self, reduction="mean"):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        self.reduction = reduction

    def forward(self, x, y):
        return F.mse_loss(self.net(x), y, reduction=self.reduction)


@report("P55", "huggingface/transformers#608", "Lightning-AI/pytorch-lightning#1537")
@pytest.mark.parametrize("num_replicas", [2, 3, 5])
def test_a_mean_loss_of_13_rows_is_not_a_mean_of_means(num_replicas):
    check_same(WithLoss(), rows(13, 3, grad=True), rows(13, 2), replicas=num_replicas)


@report("P55", "huggingface/transformers#608")
def test_a_summed_loss_is_summed_where_the_user_says_so():
    options = {"reduction": "sum"}
    check_same(WithLoss("sum"), rows(13, 3), rows(13, 2), options=options)


@report("P57", "pytorch/pytorch#5778")
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("loss", [torch.sum, torch.mean])
def test_gradients_of_a_loss_outside_are_one_devices(num_replicas, loss):
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    plain = twin(module)
    model = DataParallel(module, replicas=num_replicas)
    x = rows(13, 3)
    loss(model(x).square()).backward()
    loss(plain(x).square()).backward()
    assert_same_state(module, plain)


@report("P58", "pytorch/pytorch#14007")
def test_the_same_bits_run_after_run():
    module = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 20))
    model = DataParallel(module, replicas=5)
    x = torch.randn(103, 30)
    found = []
    for _ in range(5):
        module.zero_grad()
        model(x).square().mean().backward()
        found.append([parameter.grad.clone() for parameter in module.parameters()])
    for gradients in found[1:]:
        assert all(map(torch.equal, gradients, found[0]))


@report("P58", "pytorch/pytorch#14007")
def test_the_same_bits_one_after_another(monkeypatch):
    module = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 20))
    model = DataParallel(module, replicas=5)
    x = torch.randn(103, 30)
    model(x).square().mean().backward()
    threaded = [parameter.grad.clone() for parameter in module.parameters()]
    monkeypatch.setenv("SAMESTEP_SERIAL", "1")
    module.zero_grad()
    model(x).square().mean().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), threaded, strict=True))


@beyond("K07")
def test_several_losses_in_a_dict_each_with_its_own_word():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2).double()

        def forward(self, x):
            y = self.fc(x)
            return {
                "loss": y.square().mean(),
                "terms": {"sum": y.sum(), "count": torch.tensor(len(y))},
                "each": y.square().mean(1),
            }

    options = {"out_dims": {"terms/sum": "sum", "terms/count": "sum"}}
    check_same(Many(), rows(13, 3, grad=True), options=options)


@beyond("K07")
def test_a_loss_over_pairs_of_rows_outside_sees_the_whole_batch():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 4).double()

        def forward(self, x):
            return F.normalize(self.fc(x), dim=1)

    module = Encoder()
    plain = twin(module)
    model = DataParallel(module, replicas=4)
    x, z = rows(13, 3), rows(13, 3)
    for encode in (model, plain):
        scores = encode(x) @ encode(z).T / 0.1
        F.cross_entropy(scores, torch.arange(13)).backward()
    assert_same_state(module, plain)


@beyond("K07")
def test_five_steps_of_adam_with_clipping_and_accumulation_follow_the_plain_module():
    module = WithLoss()
    plain = twin(module)
    model = DataParallel(module, replicas=3)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, plain)]
    for _ in range(5):
        batches = [(rows(n, 3), rows(n, 2)) for n in (7, 5)]
        for step, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            for x, y in batches:
                (step(x, y) / 2).backward()
            nn.utils.clip_grad_norm_(step.parameters(), 0.1)
            optimizer.step()
        assert_same_state(module, plain)
