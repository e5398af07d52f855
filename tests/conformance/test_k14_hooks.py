"""K14. Hooks, and calls from several threads."""

import threading

import pytest
import torch
from compare import assert_same, assert_same_state, check_same, rows, twin
from reports import beyond, report
from torch import nn

from samestep import DataParallel, StateWarning, current_shard


def make_net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


class Penalty:
    """A hook object that keeps a term of the loss on itself, per module it was called with."""

    def __init__(self):
        self.term = None

    def __call__(self, module, args, output):
        self.term = output.square().mean(1)


@report("P91", "pytorch/pytorch#42478")
def test_a_hook_object_that_keeps_a_term_keeps_the_whole_batchs():
    module = make_net()
    plain = twin(module)
    mine, theirs = Penalty(), Penalty()
    module[0].register_forward_hook(mine)
    plain[0].register_forward_hook(theirs)
    model = DataParallel(module, replicas=3)
    for _ in range(2):
        x = rows(7, 3)
        for net, hook in ((model, mine), (plain, theirs)):
            net.zero_grad()
            (net(x).mean() + hook.term.mean()).backward()
        torch.testing.assert_close(mine.term, theirs.term)
        assert_same_state(module, plain)


@report("P92", "pytorch/pytorch#11476")
def test_what_a_hook_writes_to_its_module_is_there_afterwards():
    def keep(module, args, output):
        module.activation = output
        module.num_calls = getattr(module, "num_calls", 0) + 1

    module = make_net()
    module[1].register_forward_hook(keep)
    model = DataParallel(module, replicas=3)
    x = rows(7, 3)
    model(x)
    model(x)
    assert module[1].num_calls == 2
    torch.testing.assert_close(module[1].activation, module[0](x).tanh())


@report("P93", "wandb/wandb#847", "wandb/wandb#856", "wandb/wandb#1819")
def test_a_watcher_sees_each_layer_once_per_shard_and_each_gradient_once():
    module = make_net()
    forwards, gradients = [], []
    lock = threading.Lock()

    def watch(name):
        def hook(module, args, output):
            with lock:
                forwards.append((name, current_shard().index, type(module)))

        return hook

    for name, child in module.named_children():
        child.register_forward_hook(watch(name))
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda g, name=name: gradients.append((name, g.clone())))
    model = DataParallel(module, replicas=3)
    model(rows(7, 3)).sum().backward()
    assert sorted(entry[:2] for entry in forwards) == [(n, k) for n in "012" for k in range(3)]
    assert sorted(name for name, _ in gradients) == sorted(n for n, _ in module.named_parameters())
    for name, gradient in gradients:
        assert torch.equal(gradient, module.get_parameter(name).grad)


@report("P94", "pytorch/captum#193", "pytorch/captum#190")
def test_activations_captured_by_shard_index_are_the_whole_batchs():
    module = make_net()
    captured = {}

    def capture(module, args, output):
        captured[current_shard().index] = output.detach()

    module[1].register_forward_hook(capture)
    x = rows(7, 3)
    DataParallel(module, replicas=3)(x)
    joined = torch.cat([captured[k] for k in sorted(captured)])
    torch.testing.assert_close(joined, module[0](x).tanh())


@report("P95", "pytorch/pytorch#5061", "pytorch/pytorch#35191")
def test_hooks_on_the_wrapper_fire_once_and_see_the_whole_batch():
    module = make_net()
    model = DataParallel(module, replicas=3)
    seen = []
    model.register_forward_pre_hook(lambda m, args: seen.append(("before", len(args[0]))))
    model.register_forward_hook(lambda m, args, out: seen.append(("after", len(out))))
    model.register_full_backward_hook(lambda m, gin, gout: seen.append(("back", len(gout[0]))))
    model(rows(7, 3, grad=True)).sum().backward()
    assert seen == [("before", 7), ("after", 7), ("back", 7)]


@report("P96", "pytorch/pytorch#8388", "pytorch/pytorch#11219")
@pytest.mark.parametrize("is_shared", [True, False])
def test_calls_from_several_threads_neither_lock_up_nor_mix(is_shared):
    module = make_net()
    models = [DataParallel(twin(module), replicas=2) for _ in range(3)]
    if is_shared:
        models = models[:1] * 3
    batches = [rows(7, 3) for _ in models]
    failures = []

    def work(model, x):
        expected = module(x).detach()
        for _ in range(20):
            if not torch.allclose(model(x), expected, rtol=0, atol=1e-12):
                failures.append("mixed")

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(models, batches, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []


@report("P96", "pytorch/pytorch#8388", "pytorch/pytorch#11219")
def test_a_wrapper_inside_a_wrapper_runs_and_trains():
    inner = DataParallel(nn.Linear(3, 4).double(), replicas=2)
    module = nn.Sequential(inner, nn.Tanh(), nn.Linear(4, 2).double())
    check_same(module, rows(7, 3, grad=True))


@beyond("K14")
def test_hooks_added_and_removed_between_calls_are_followed():
    module = make_net()
    model = DataParallel(module, replicas=3)
    x = rows(7, 3)
    before = model(x)
    handle = module[0].register_forward_hook(lambda m, args, out: out * 2)
    other = module[2].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    changed = model(x)
    torch.testing.assert_close(changed, module(x))
    assert not torch.allclose(changed, before)
    handle.remove()
    other.remove()
    assert torch.equal(model(x), before)


@beyond("K14")
def test_hooks_that_forward_registers_once_stay_registered():
    class Capturing(nn.Module):
        """Installs its hooks when somebody first asks for what they collect."""

        def __init__(self):
            super().__init__()
            self.net = make_net()
            self.is_installed = False
            self.collected = []

        def forward(self, x, capture=False):
            if capture and not self.is_installed:
                for layer in self.net:
                    layer.register_forward_hook(self.collect)
                self.is_installed = True
            self.collected = []
            y = self.net(x)
            found, self.collected = self.collected, []
            return y, tuple(found)

        def collect(self, module, args, output):
            self.collected.append(output)

    for first in (True, False):
        module, plain = Capturing(), Capturing()
        plain.load_state_dict(module.state_dict())
        model = DataParallel(module, replicas=3)
        x = rows(7, 3)
        for capture in (first, True, True):
            assert_same(model(x, capture=capture), plain(x, capture=capture))
        assert [len(layer._forward_hooks) for layer in module.net] == [1, 1, 1]
        assert_same(module(x), plain(x))


@beyond("K14")
def test_backward_hooks_and_tensor_hooks_inside_change_gradients_as_in_a_plain_call():
    class Reversing(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()
            self.net[0].register_full_backward_hook(lambda m, gin, gout: (gin[0] * 3,))

        def forward(self, x):
            y = self.net(x)
            if y.requires_grad:
                y.register_hook(lambda g: -g)
            return y

    check_same(Reversing(), rows(7, 3, grad=True))


@beyond("K14")
def test_a_hook_that_keeps_what_cannot_be_joined_warns_and_names_it():
    class Sizes:
        size = None

        def __call__(self, module, args, output):
            self.size = len(output)

    module = make_net()
    hook = Sizes()
    module[0].register_forward_hook(hook)
    with pytest.warns(StateWarning, match="size"):
        DataParallel(module, replicas=3)(rows(7, 3))
    assert hook.size is None


@beyond("K14")
def test_a_forward_that_calls_a_wrapped_module_from_outside_keeps_its_gradients():
    teacher = make_net()
    wrapped = DataParallel(teacher, replicas=2)

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()
            object.__setattr__(self, "teacher", [wrapped])

        def forward(self, x):
            with torch.no_grad():
                target = self.teacher[0](x)
            return (self.net(x) - target).square().mean()

    module = Student()
    x = rows(7, 3)
    loss = DataParallel(module, replicas=3)(x)
    expected = (module.net(x) - teacher(x)).square().mean()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert module.net[0].weight.grad is not None
    assert teacher[0].weight.grad is None


def losses_on_captured_activations(source, net, x, retain_graph=False, with_output=False):
    """Two steps on what a closure captured in ``source``; returns the input's gradient."""
    captured = {}

    def capture(layer, args, output):
        shard = current_shard()
        captured[0 if shard is None else shard.index] = output

    source[1].register_forward_hook(capture)
    for _ in range(2):
        captured.clear()
        output = net(x)
        loss = torch.cat([captured[k] for k in sorted(captured)]).square().sum()
        loss = loss + output.sum() if with_output else loss
        loss.backward(retain_graph=retain_graph)
    gradient, x.grad = x.grad, None
    return gradient


@beyond("K14")
def test_a_loss_on_activations_captured_by_a_closure_has_its_gradient():
    module = make_net()
    plain = twin(module)
    x = rows(7, 3, grad=True)
    found = losses_on_captured_activations(module, DataParallel(module, replicas=3), x)
    expected = losses_on_captured_activations(plain, plain, x)
    assert_same_state(module, plain)
    torch.testing.assert_close(found, expected)


@beyond("K14")
@pytest.mark.parametrize("retain_graph", [True, False])
def test_captured_activations_and_outputs_in_one_loss(retain_graph):
    module = make_net()
    plain = twin(module)
    x = rows(7, 3, grad=True)
    options = {"retain_graph": retain_graph, "with_output": True}
    model = DataParallel(module, replicas=3)
    found = losses_on_captured_activations(module, model, x, **options)
    expected = losses_on_captured_activations(plain, plain, x, **options)
    assert_same_state(module, plain)
    torch.testing.assert_close(found, expected)
