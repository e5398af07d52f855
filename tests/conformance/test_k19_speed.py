"""K19. What a call costs: counted, not timed."""

import threading

import torch
from compare import rows
from reports import beyond, report
from torch import nn

from samestep import DataParallel


def make_deep():
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(40)])


@report("P122", "pytorch/pytorch#5421", "pytorch/pytorch#3917")
def test_a_call_starts_no_thread_and_builds_nothing_after_the_first():
    model = DataParallel(make_deep(), replicas=3)
    x = torch.ones(7, 3)
    model(x).sum().backward()
    started, stats = {t.ident for t in threading.enumerate()}, model.stats()
    for _ in range(20):
        model(x).sum().backward()
    assert {t.ident for t in threading.enumerate()} == started
    assert model.stats() == stats
    assert stats.num_builds <= 6  # three replicas, at most built anew once


@report("P122", "pytorch/pytorch#5421", "pytorch/pytorch#3917")
def test_one_slot_is_a_plain_call():
    module = make_deep()
    model = DataParallel(module)
    if model.num_replicas == 1:
        seen = []
        module.register_forward_pre_hook(lambda m, args: seen.append(m is module))
        x = torch.ones(7, 3)
        assert torch.equal(model(x), module(x))
        assert seen == [True, True]
        assert model.stats().num_builds == 0
    else:
        assert model.num_replicas == torch.accelerator.device_count()


@report("P123", "pytorch/pytorch#28212", "pytorch/pytorch#28275", "pytorch/pytorch#3930")
def test_replicas_are_kept_and_follow_the_optimizer_without_copies():
    module = make_deep()
    model = DataParallel(module, replicas=3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.randn(7, 3)
    model(x).sum().backward()
    model(x).sum().backward()
    stats = model.stats()
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad()
        output = model(x)
        torch.testing.assert_close(output, module(x))
        output.sum().backward()
    assert model.stats() == stats


@report("P124", "pytorch/pytorch#37484", "pytorch/pytorch#34084")
def test_channels_last_survives_all_the_way():
    inside = []

    class Convolving(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3)

        def forward(self, x):
            last = {"memory_format": torch.channels_last}
            inside.append(x.is_contiguous(**last) and self.conv.weight.is_contiguous(**last))
            return self.conv(x)

    module = Convolving().to(memory_format=torch.channels_last)
    x = torch.randn(7, 4, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    output = DataParallel(module, replicas=3)(x)
    assert all(inside)
    assert output.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(output, module(x))
    output.sum().backward()
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


@report("P125", "pytorch/pytorch#37444")
def test_one_process_no_sampler_and_one_output_of_everything(capsys):
    model = DataParallel(make_deep(), replicas=4)
    print(model(torch.ones(8, 3)).shape)
    assert capsys.readouterr().out == "torch.Size([8, 3])\n"


@beyond("K19")
def test_a_model_that_draws_nothing_is_not_watched_operation_by_operation():
    modes = []

    class Looking(nn.Module):
        def forward(self, x):
            modes.append(torch._C._len_torch_function_stack())
            return x * 2

    model = DataParallel(Looking(), replicas=2)
    for _ in range(3):
        model(rows(4, 3))
    assert modes[-2:] == [0, 0]


@beyond("K19")
def test_evaluation_and_accumulation_copy_nothing_to_other_devices():
    module = nn.Linear(3, 2)
    model = DataParallel(module, device_ids=["meta", "meta"])
    x = torch.ones(4, 3)
    model(x)
    model(x)
    copied = model.stats().copied_bytes
    for _ in range(3):
        model(x)
    assert model.stats().copied_bytes == copied
    with torch.no_grad():
        module.weight.add_(1)
    model(x)
    # Both replicas took the one tensor that changed: 2 x 3 floats of 4 bytes each.
    assert model.stats().copied_bytes == copied + 2 * 24
