"""K02. What forward writes to the module must be there afterwards."""

import copy

import pytest
import torch
from compare import assert_same_state, check_same, rows
from reports import beyond, report
from torch import nn

from samestep import DataParallel, StateWarning


@report("P07", "pytorch/pytorch#2864")
def test_a_counter_on_the_module_counts_calls():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_calls = 0
            self.history = []
            self.table = {"calls": 0}

        def forward(self, x):
            self.num_calls += 1
            self.history.append(self.num_calls)
            self.table["calls"] = self.num_calls
            return x

    module = Counting()
    check_same(module, rows(7, 3), num_calls=3)
    assert (module.num_calls, module.history, module.table) == (3, [1, 2, 3], {"calls": 3})


@report("P07", "pytorch/pytorch#2864")
def test_an_attribute_that_the_shards_leave_different_is_warned_of_once_by_name():
    class Sized(nn.Module):
        last_size = None

        def forward(self, x):
            self.last_size = len(x)
            return x

    module = Sized()
    model = DataParallel(module, replicas=3)
    with pytest.warns(StateWarning, match="'last_size'") as caught:
        model(rows(7, 3))
    model(rows(7, 3))  # a second warning would be an error
    assert len(caught) == 1
    assert module.last_size is None


@report("P08", "Lightning-AI/pytorch-lightning#565", "Lightning-AI/pytorch-lightning#364")
def test_a_stored_output_is_the_whole_batchs_and_has_its_gradient():
    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2).double()
            self.last = None

        def forward(self, x):
            self.last = self.fc(x)
            return self.last.detach()

    plain, module = Generator(), Generator()
    module.load_state_dict(plain.state_dict())
    x = rows(7, 3)
    plain(x)
    DataParallel(module, replicas=3)(x)
    torch.testing.assert_close(module.last, plain.last)
    plain.last.square().sum().backward()
    module.last.square().sum().backward()
    assert_same_state(module, plain)


@report("P08", "Lightning-AI/pytorch-lightning#565", "Lightning-AI/pytorch-lightning#364")
def test_a_stored_output_is_read_in_the_next_call():
    class Alternating(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2).double()
            self.last = None

        def forward(self, x):
            if self.last is None:
                self.last = self.fc(x).detach()
                return self.last
            return self.fc(x) - self.last

    check_same(Alternating(), rows(7, 3), num_calls=3)


@report("P09", "Lightning-AI/pytorch-lightning#4353")
def test_an_accumulating_buffer_has_the_whole_batch():
    class Total(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros((), dtype=torch.float64))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.total += x.sum()
            self.count += len(x)
            return x

    check_same(Total(), rows(7, 3), replicas=4, num_calls=2, options={"buffers": "sum"})
    options = {"buffers": {"total": "sum", "count": "sum"}}
    check_same(Total(), rows(7, 3), replicas=4, num_calls=2, options=options)


@report("P09", "Lightning-AI/pytorch-lightning#4353")
def test_a_metric_object_inside_the_model_accumulates_rows():
    class Accuracy(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("hits", torch.zeros(3))

        def update(self, scores, target):
            self.hits += torch.bincount(target[scores.argmax(1) == target], minlength=3)

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3).double()
            self.metric = Accuracy()

        def forward(self, x, target):
            scores = self.fc(x)
            self.metric.update(scores.detach(), target)
            return scores

    options = {"buffers": {"metric.hits": "sum"}}
    check_same(Classifier(), rows(17, 3), torch.randint(3, (17,)), num_calls=2, options=options)


class ActNorm(nn.Module):
    """Starts from the statistics of the first batch."""

    def __init__(self, flag):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        if flag == "buffer":
            self.register_buffer("is_ready", torch.zeros((), dtype=torch.uint8))
        else:
            self.is_ready = False

    def forward(self, x):
        if not self.is_ready:
            self.shift.data.copy_(x.mean(0))
            if isinstance(self.is_ready, torch.Tensor):
                self.is_ready.fill_(1)
            else:
                self.is_ready = True
        return x - self.shift


@report("P11", "rosinality/glow-pytorch#2", "taesungp/contrastive-unpaired-translation#21")
@pytest.mark.parametrize("flag", ["buffer", "attribute"])
def test_initialisation_from_the_first_batch_sees_the_whole_batch(flag):
    module = ActNorm(flag)
    check_same(module, rows(7, 3), num_calls=2)
    assert module.is_ready


@report("P11", "rosinality/glow-pytorch#2", "taesungp/contrastive-unpaired-translation#21")
def test_a_layer_made_in_the_first_forward_is_made_once():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = None

        def forward(self, x):
            if self.mlp is None:
                self.mlp = nn.Linear(x.shape[1], 2).double()
            return self.mlp(x)

    module = Late()
    model = DataParallel(module, replicas=3)
    x = rows(7, 3)
    output = model(x)
    torch.testing.assert_close(output, module.mlp(x))
    assert [name for name, _ in model.named_parameters()] == ["mlp.weight", "mlp.bias"]
    model(x).sum().backward()
    torch.testing.assert_close(module.mlp.bias.grad, torch.full((2,), 7.0, dtype=torch.float64))


@beyond("K02")
def test_a_cache_filled_in_forward_is_filled():
    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = {}

        def forward(self, x):
            if x.shape[1] not in self.cache:
                self.cache[x.shape[1]] = torch.arange(x.shape[1], dtype=torch.float64)
            return x + self.cache[x.shape[1]]

    module = Caching()
    check_same(module, rows(7, 3))
    assert torch.equal(module.cache[3], torch.arange(3.0, dtype=torch.float64))


@beyond("K02")
def test_a_deleted_attribute_is_gone_and_a_new_buffer_is_there():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = True

        def forward(self, x):
            if hasattr(self, "first"):
                del self.first
                self.register_buffer("offset", torch.ones(3, dtype=torch.float64))
            return x + self.offset

    module = Changing()
    check_same(module, rows(7, 3), num_calls=2)
    assert not hasattr(module, "first")
    assert "offset" in module.state_dict()


@beyond("K02")
def test_a_rebound_buffer_and_a_momentum_encoder_are_kept():
    class Momentum(nn.Module):
        def __init__(self):
            super().__init__()
            self.online = nn.Linear(3, 2).double()
            self.target = copy.deepcopy(self.online).requires_grad_(False)
            self.register_buffer("step", torch.zeros((), dtype=torch.int64))

        @torch.no_grad()
        def update(self):
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.mul_(0.9).add_(0.1 * fast)
            self.step = self.step + 1

        def forward(self, x):
            self.update()
            return self.online(x) - self.target(x)

    module = Momentum()
    torch.nn.init.ones_(module.online.weight)
    check_same(module, rows(7, 3), num_calls=3)
    assert module.step == 3


class Writing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.module.seen.append(1)
        ctx.module.count += 1
        return grad, None


@beyond("K02")
def test_what_backward_writes_does_not_arrive_in_the_next_call():
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = []
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            return Writing.apply(x, self)

    module = Module()
    model = DataParallel(module, replicas=3)
    for _ in range(2):
        output = model(rows(7, 3, grad=True))
        before = (list(module.seen), module.count.item())
        output.sum().backward()
        model(rows(7, 3))
        assert (module.seen, module.count.item()) == before


@beyond("K02")
def test_a_history_as_long_as_the_shards_rows_is_not_taken_for_rows():
    class Recording(nn.Module):
        def __init__(self):
            super().__init__()
            self.history = []
            self.names = {"seen": []}

        def forward(self, x):
            self.history.append(len(self.history))
            self.names["seen"].append("call")
            return x

    module = Recording()
    model = DataParallel(module, replicas=3)
    for number in range(1, 5):
        model(rows(6, 3))  # two rows per shard
        assert module.history == list(range(number))
        assert module.names == {"seen": ["call"] * number}


@beyond("K02")
@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_buffer_that_starts_as_none_is_initialised_from_the_whole_batch(is_buffer):
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            if is_buffer:
                self.register_buffer("center", None)
            else:
                self.center = None

        def forward(self, x):
            if self.center is None:
                self.center = x.mean(0).detach()
            return x - self.center

    check_same(Centred(), rows(7, 3), num_calls=3)
