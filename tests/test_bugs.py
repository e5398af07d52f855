"""One test per fault that was found by trying to break the library, with its symptom."""

import copy
import os
import signal
import sys
import threading

import pytest
import torch
from torch import nn

import samestep
from samestep import DataParallel, ReplicaError


class Of(nn.Module):
    """A module whose forward is ``function(self, ...)``."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.function(self, *args)


def rows(num_rows=7, width=3, **options):
    return torch.randn(num_rows, width, dtype=torch.float64, **options)


def linear(num_in=3, num_out=2):
    return nn.Linear(num_in, num_out).double()


def run(function, seconds=20):
    """Run in a thread, so that a deadlock fails the test and does not hang it."""
    outcome = []

    def work():
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, "it hangs"
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def assert_same_modules(one, other):
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_repeated_call_sees_its_input_as_it_was():
    """A shard of one row made BatchNorm refuse; the second attempt halved the input again."""

    def halve(self, x):
        return self.norm(self.fc(x.div_(2.0)))

    module = Of(halve, fc=linear(), norm=nn.BatchNorm1d(2).double())
    plain = copy.deepcopy(module)
    x = rows()
    once = x / 2
    plain(x.clone())
    DataParallel(module, replicas=3)(x)
    torch.testing.assert_close(x, once)
    assert_same_modules(module, plain)


def test_an_input_that_cannot_be_put_back_is_an_error():
    """A dropout that begins in a later call made the call run again on what it had changed."""

    def shift(self, x):
        return self.drop(x.sub_(1.0))

    model = DataParallel(Of(shift, drop=nn.Dropout(0.0)), replicas=2)
    for _ in range(2):
        model(rows(4))
    model.module.drop.p = 0.5
    with pytest.raises(RuntimeError, match="changed its input in place, and the call had to be"):
        model(rows(4))


def test_a_gradient_hook_on_what_forward_did_not_use_is_not_called():
    """The hook of an unused parameter was called with None."""
    module = Of(lambda self, x: self.a(x), a=linear(), b=linear())
    module.b.weight.register_hook(lambda gradient: gradient * 2)
    DataParallel(module, replicas=3)(rows()).sum().backward()
    assert module.b.weight.grad is None
    assert module.a.weight.grad is not None


def test_two_outputs_two_backwards_behind_an_encoder():
    """The first backward walked, and freed, what lay before the other output."""
    module = Of(lambda self, a, b: (self.fc(a), self.fc(b)), fc=linear())
    plain = copy.deepcopy(module)
    found = []
    for net in (plain, DataParallel(module, replicas=3)):
        torch.manual_seed(0)
        first, second = rows(requires_grad=True), rows(requires_grad=True)
        one, other = net(first.sigmoid(), second.sigmoid())
        one.sum().backward()
        assert second.grad is None
        other.square().sum().backward()
        found.append((first.grad, second.grad))
    torch.testing.assert_close(*found)
    torch.testing.assert_close(module.fc.weight.grad, plain.fc.weight.grad)


def test_shards_with_unlike_numbers_of_outputs():
    """Outputs were grouped by a position that one of the shards did not have."""

    def per_row(self, x):
        return list(self.fc(x).unbind())

    module = Of(per_row, fc=linear())
    x = rows()
    found = DataParallel(module, replicas=3)(x)
    torch.testing.assert_close(torch.stack(found), torch.stack(module(x)))
    torch.stack(found).sum().backward()
    assert module.fc.weight.grad is not None


def test_forward_that_uses_an_earlier_output_of_the_same_wrapper_does_not_hang():
    """Backward of the inner step waited for the lock that the outer one held."""
    box = []

    def remember(self, x):
        output = self.fc(x)
        return output + box[0].mean() if box else output

    module = Of(remember, fc=linear())
    plain = copy.deepcopy(module)
    gradients = []
    for net in (plain, DataParallel(module, replicas=3)):
        torch.manual_seed(0)
        box.clear()
        box.append(net(rows()))
        output = net(rows())
        run(lambda output=output: output.sum().backward())
        gradients.append(net.fc.weight.grad)
    torch.testing.assert_close(*gradients)


class Conditional(nn.BatchNorm1d):
    def forward(self, batch, gain):
        return super().forward(batch) * gain


def test_batch_norm_by_keyword_and_with_more_arguments():
    """Both raised a TypeError."""
    module = Of(
        lambda self, x: self.own(self.norm(input=x), x[:, :1]),
        norm=nn.BatchNorm1d(3).double(),
        own=Conditional(3).double(),
    )
    plain = copy.deepcopy(module)
    x = rows(8)
    DataParallel(module, replicas=2)(x)
    plain(x)
    torch.testing.assert_close(module.norm.running_var, plain.norm.running_var)
    assert module.own.num_batches_tracked == 1


def test_a_batch_norm_with_a_forward_of_its_own_is_not_synchronised_in_silence():
    """Its forward was replaced, and with it what it did."""
    model = DataParallel(
        Of(lambda self, x: self.n(x, x), n=Conditional(3).double()),
        replicas=2,
        sync_batch_norm=True,
    )
    with pytest.raises(ReplicaError, match="Conditional is a BatchNorm with a forward of its own"):
        model(rows(8))


@pytest.mark.parametrize("sync", [False, True])
def test_statistics_that_are_not_tracked_stay(sync):
    """They were written all the same, and the variance shrank."""
    module = nn.BatchNorm1d(3).double()
    model = DataParallel(module, replicas=3, sync_batch_norm=sync)
    model(rows(9))
    before = copy.deepcopy(module.state_dict())
    module.track_running_stats = False
    model(rows(9))
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_statistics_updated_by_the_functional_form_are_kept():
    """torch raises neither a version nor the counter there; the update was lost."""

    def functional(self, x):
        bn = self.norm
        return nn.functional.batch_norm(x, bn.running_mean, bn.running_var, training=True)

    module = Of(functional, norm=nn.BatchNorm1d(3).double())
    plain = copy.deepcopy(module)
    x = rows(9)
    for _ in range(2):
        DataParallel(module, replicas=3)(x)
        plain(x)
    assert not torch.equal(module.norm.running_mean, torch.zeros(3))
    torch.testing.assert_close(module.norm.running_mean, plain.norm.running_mean)


def test_a_generator_on_the_module_may_be_used_later():
    """It was drawn from by all threads at once, once the model was thought to draw nothing."""

    def noise(self, x):
        self.step += 1
        return x + torch.randn(x.shape, generator=self.source) if self.step > 1 else x

    seen = []
    for _ in range(5):
        module = Of(noise, step=0, source=torch.Generator().manual_seed(1))
        model = DataParallel(module, replicas=4)
        seen.append([model(torch.zeros(8, 50)) for _ in range(3)][-1])
    assert all(torch.equal(one, seen[0]) for one in seen)
    assert not torch.equal(seen[0][:2], seen[0][2:4])


def test_what_is_registered_on_the_wrapper_is_the_modules():
    """Buffers, parameters and modules went to the wrapper, and were not saved."""
    module = linear()
    model = DataParallel(module, replicas=2)
    model.register_buffer("mean", torch.ones(1))
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    model.add_module("head", nn.Linear(1, 1))
    model.training = False
    assert {"mean", "scale", "head.weight"} <= model.state_dict().keys()
    assert module.mean is model.mean
    assert not module.training


def test_freezing_between_two_forwards_of_one_loss():
    """The older graph asked for the gradient of a leaf that required none any more."""
    module = nn.Sequential(linear(3, 4), nn.Tanh(), linear(4, 2))
    plain = copy.deepcopy(module)
    gradients = []
    for net in (plain, DataParallel(module, replicas=3)):
        torch.manual_seed(0)
        first = net(rows())
        net.requires_grad_(False)
        second = net(rows(requires_grad=True))
        net.requires_grad_(True)
        (first.sum() + second.sum()).backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
    torch.testing.assert_close(*gradients)


def test_rows_of_a_parameter_that_only_some_shards_renormalise():
    """The merged embedding was the mean of what a shard wrote and what the others had not."""
    module = nn.Embedding(10, 4, max_norm=1.0).double()
    plain = copy.deepcopy(module)
    for net in (plain, DataParallel(module, replicas=3)):
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        for _ in range(4):
            optimizer.zero_grad()
            net(torch.randint(10, (7, 2))).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(module.weight, plain.weight)


def test_a_parameters_memory_under_another_name_follows_the_optimizer():
    """``weight.data`` kept as an attribute stayed what it was in the first call."""

    def tied(self, x):
        return self.fc(x) + x @ self.memory.t()

    module = Of(tied, fc=linear())
    module.memory = module.fc.weight.data
    model = DataParallel(module, replicas=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = rows()
    for _ in range(3):
        torch.testing.assert_close(model(x), module(x))
        model(x).square().mean().backward()
        optimizer.step()


def test_a_vmap_that_draws_inside_forward():
    """The call's seed was drawn inside the vmap."""

    def noisy(self, x):
        draw = torch.func.vmap(lambda row: row + torch.rand(3), randomness="different")
        return draw(x)

    model = DataParallel(Of(noisy), replicas=2)
    torch.manual_seed(0)
    first = model(torch.zeros(6, 3))
    torch.manual_seed(0)
    assert torch.equal(first, model(torch.zeros(6, 3)))
    assert not torch.equal(first[0], first[1])


def test_an_output_that_is_there_twice_is_one_object():
    """It was joined twice, and a change of one did not show in the other."""
    model = DataParallel(Of(lambda self, x: (self.fc(x), None)[:1] * 2, fc=linear()), replicas=3)
    one, other = model(rows())
    assert one is other


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_child_forked_in_the_middle_of_a_call_can_use_the_wrapper():
    """It waited for a lock that a thread held which it did not have."""
    model = DataParallel(linear(), replicas=2)
    x = rows(4)
    model(x)
    with model._samestep_runtime.lock, model._samestep_runtime.replicas.lock:
        thread = threading.Thread(target=lambda: model(x), daemon=True)
        thread.start()  # so that a thread other than the child's only one wants the lock
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(10)
                worker = threading.Thread(target=lambda: model(x))
                worker.start()
                worker.join(8)
                code = int(worker.is_alive())
            finally:
                os._exit(code)
    _, status = os.waitpid(child, 0)
    thread.join(10)
    assert status == 0


def test_an_error_names_the_tensors_that_no_shard_got_its_rows_of():
    """A mask that went whole gave torch's shape error and no hint."""
    model = DataParallel(Of(lambda self, x, mask: x + mask), replicas=2)
    with pytest.raises(RuntimeError) as caught:
        model(rows(8), torch.zeros(7, 3, dtype=torch.float64))
    notes = "\n".join(caught.value.__notes__)
    assert "given whole to every shard: args[1] float64 [7, 3]; see model.explain()" in notes


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 2).double()
        self.h = None

    def forward(self, x):
        fits = self.h is not None and len(self.h) == len(x)
        self.h = self.cell(x, self.h if fits else None)
        return self.h


def test_state_per_row_that_the_user_packs_anew_between_calls():
    """Only the very tensor that a step had left was cut again."""
    module = Remembers()
    plain = copy.deepcopy(module)
    model = DataParallel(module, replicas=3)
    torch.manual_seed(0)
    for num_rows in (7, 7, 7, 1, 3, 6):
        x = rows(num_rows)
        torch.testing.assert_close(model(x), plain(x))
        model.h = model.h.detach()
        plain.h = plain.h.detach()


def test_the_verbs_alone_pool_statistics_and_refuse_in_words():
    module = nn.BatchNorm1d(3).double()
    plain = copy.deepcopy(module)
    x = rows(8)
    replicas = samestep.replicate(module, ["cpu", "cpu"])
    samestep.parallel_apply(replicas, samestep.scatter(x, ["cpu", "cpu"]))
    plain(x)
    torch.testing.assert_close(module.running_var, plain.running_var)
    others = samestep.replicate(linear(), ["cpu"])
    with pytest.raises(ValueError, match="replicas of different source modules"):
        samestep.parallel_apply([replicas[0], others[0]], [rows(4), rows(4)])
    with pytest.raises(ValueError, match="there are no outputs to gather"):
        samestep.gather([], "cpu")


def test_a_graph_of_the_callers_that_forward_reaches_by_a_closure():
    """The first shard's backward freed it, and the others found it freed."""
    encoder, box = nn.Sequential(linear(), nn.Tanh()), []
    module = Of(lambda self, x: self.fc(x) + box[0].mean(), fc=linear())
    plain = copy.deepcopy(module)
    gradients = []
    for net in (plain, DataParallel(module, replicas=3)):
        torch.manual_seed(0)
        encoder.zero_grad()
        box[:] = [encoder(rows())]
        net(rows()).sum().backward()
        gradients.append(encoder[0].weight.grad.clone())
    torch.testing.assert_close(*gradients)


def test_backwards_of_one_synchronised_graph_from_several_threads():
    """Their exchanges met each other's; one thread never returned."""
    net = nn.Sequential(linear(3, 3), nn.BatchNorm1d(3).double(), nn.Tanh())
    plain = copy.deepcopy(net)
    x = rows(9)
    output = DataParallel(net, replicas=3, sync_batch_norm=True)(x)
    threads = [
        threading.Thread(
            target=lambda i=i: output[i].sum().backward(retain_graph=True), daemon=True
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    plain(x)[:4].sum().backward()
    torch.testing.assert_close(net[0].weight.grad, plain[0].weight.grad)


def test_a_weight_turned_in_place_is_noticed():
    """The address and the shape were the same."""
    module = linear(3, 3)
    model = DataParallel(module, replicas=2)
    x = rows(4)
    model(x)
    module.weight.data = module.weight.data.t()
    torch.testing.assert_close(model(x), module(x))


def test_a_hook_that_writes_through_the_wrapper():
    """Whichever shard came last had its say."""
    net = nn.Sequential(linear(), nn.Tanh())
    model = DataParallel(net, replicas=3)
    net[0].register_forward_hook(lambda layer, args, output: setattr(model, "features", output))
    x = rows()
    model(x)
    torch.testing.assert_close(model.features, net[0](x))


def test_a_batch_norm_with_a_forward_patched_on_the_object():
    """torch's own forward ran instead."""
    module = nn.Sequential(linear(), nn.BatchNorm1d(2).double())
    module[1].forward = lambda x: x * 2
    x = rows()
    torch.testing.assert_close(DataParallel(module, replicas=3)(x), module(x))


def test_a_buffer_with_an_entry_per_row_is_gathered():
    """It was averaged over the shards."""

    def keep(self, x):
        self.last = x.detach()
        return x

    module = Of(keep)
    module.register_buffer("last", torch.zeros(0, 3, dtype=torch.float64))
    model = DataParallel(module, replicas=4)
    for num_rows in (8, 8, 7):
        x = rows(num_rows)
        model(x)
        assert torch.equal(module.last, x)


def test_a_rule_for_a_buffer_that_is_not_there_is_refused():
    """It was ignored."""
    with pytest.raises(ValueError, match=r"speaks about 'typo'.*its buffers: running_mean"):
        DataParallel(nn.BatchNorm1d(3), replicas=2, buffers={"typo": "sum"})


@pytest.mark.parametrize("sync", [False, True])
def test_two_forwards_of_a_batch_norm_before_one_backward(sync):
    """The update of the statistics was taken for a change of what the first graph had saved."""
    net = nn.Sequential(linear(3, 3), nn.BatchNorm1d(3).double())
    plain = copy.deepcopy(net)
    model = DataParallel(net, replicas=3, sync_batch_norm=sync)
    first, second, third = rows(9), rows(9), rows(9)
    loss = model(first).square().sum() + model(second).square().sum()
    model.eval()
    frozen = model(third)
    model.train()
    (model(second).sum() + loss + frozen.sum()).backward()
    assert net[0].weight.grad is not None
    if sync:
        loss = plain(first).square().sum() + plain(second).square().sum()
        plain.eval()
        frozen = plain(third)
        plain.train()
        (plain(second).sum() + loss + frozen.sum()).backward()
        torch.testing.assert_close(net[0].weight.grad, plain[0].weight.grad)
        assert_same_modules(net, plain)


def test_reentrant_checkpointing_beside_a_stored_loss():
    """The loss that an earlier step had stored was walked, its graph freed long ago."""

    def forward(self, x):
        if self.saves:
            output = torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=True)
        else:
            output = self.net(x)
        self.aux = output.square().mean()
        return output

    module = Of(forward, net=linear(), saves=False, aux=None)
    model = DataParallel(module, replicas=3)
    for step in range(4):
        module.saves = step >= 2
        model(rows(requires_grad=True)).sum().backward()
    assert module.net.weight.grad is not None


def test_a_hook_on_a_tensor_from_outside_sees_the_sum_once():
    """It ran in each shard, and once more."""
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    calls = []

    def double(gradient):
        calls.append(gradient)
        return gradient * 2

    handle = weight.register_hook(double)
    x = rows()
    DataParallel(Of(lambda self, x: x * weight), replicas=3)(x).sum().backward()
    torch.testing.assert_close(weight.grad, 2 * x.sum(0))
    assert len(calls) == 1
    handle.remove()
    DataParallel(Of(lambda self, x: x * weight), replicas=3)(x).sum().backward()
    assert len(calls) == 1


def test_clipping_hooks_where_one_of_two_outputs_is_used():
    """The hooks of what the other output uses were called with None."""

    def forward(self, x):
        hidden = self.trunk(x).tanh()
        return self.a(hidden), self.b(hidden)

    module = Of(forward, trunk=linear(3, 4), a=linear(4), b=linear(4))
    plain = copy.deepcopy(module)
    for net in (plain, DataParallel(module, replicas=3)):
        torch.manual_seed(0)
        for parameter in net.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        net(rows())[0].sum().backward()
    torch.testing.assert_close(module.trunk.weight.grad, plain.trunk.weight.grad)
    torch.testing.assert_close(module.a.weight.grad, plain.a.weight.grad)
    assert not module.b.weight.grad.any()  # zeros where the plain module leaves None


def test_attention_without_dropout_draws_nothing():
    """It ran under the lock of those that draw, one shard at a time, and moved the generator."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = DataParallel(layer, replicas=2)
    before = torch.get_rng_state()
    model(torch.zeros(4, 5, 8))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("at", range(0, 60, 4))
def test_ctrl_c_anywhere_leaves_nothing_set_in_the_thread(at):
    """A stale stream, shard or function mode ruled the thread for the rest of the process."""
    model = DataParallel(nn.Sequential(linear(), nn.Dropout(0.5)), replicas=2)
    model(rows(4))
    threads = torch.get_num_threads()
    lines = []

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.endswith(("engine.py", "context.py", "rng.py")):
            return None
        lines.append(frame.f_lineno)
        if len(lines) == 3 * at + 1:
            raise KeyboardInterrupt
        return trace

    def call_often():
        for _ in range(20):
            model(rows(4))

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            call_often()
    finally:
        sys.settrace(None)
    assert samestep.current_shard() is None
    assert torch._C._len_torch_function_stack() == 0
    assert torch.get_num_threads() == threads
    torch.manual_seed(3)
    first = model(torch.ones(4, 3, dtype=torch.float64))
    torch.manual_seed(3)
    assert torch.equal(first, model(torch.ones(4, 3, dtype=torch.float64)))


def test_state_that_the_first_call_leaves_is_carried_though_it_ran_on_the_whole_batch():
    # A counter that goes from zero makes the first call run on the source module, in case it
    # initialises itself. The hidden state of that call was then given whole to every shard.
    class Recurs(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.hidden = None

        def forward(self, x):
            self.seen += len(x)
            self.hidden = x if self.hidden is None else x + self.hidden * 0.5
            return self.hidden * 2

    plain, module = Recurs(), Recurs()
    model = DataParallel(module, replicas=3, buffers={"seen": "sum"})
    for _ in range(3):
        x = torch.randn(7, 2)
        assert torch.equal(model(x), plain(x))
    assert module.seen == 21


def test_a_shard_run_by_itself_says_why_it_cannot_meet_others():
    # all_reduce under the functional parallel_apply raised an internal signal without a text.
    class Meets(nn.Module):
        def forward(self, x):
            return samestep.all_reduce(x.sum())

    replicas = samestep.replicate(Meets(), ["cpu", "cpu"])
    with pytest.raises(Exception, match="let the shards of a DataParallel meet"):
        samestep.parallel_apply(replicas, [torch.ones(2), torch.ones(2)])
