"""K11. Recurrent networks: current weights, packed sequences, padding."""

import pytest
import torch
from compare import assert_same_state, check_same, rows, twin
from reports import beyond, report
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

from samestep import DataParallel


@report("P74", "pytorch/pytorch#6299", "pytorch/pytorch#1591")
def test_padding_is_the_batchs_when_the_packed_sequence_comes_in_and_goes_out():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(3, 2).double()

        def forward(self, packed):
            return self.rnn(packed)[0]

    module = Packed()
    packed = pack_sequence([rows(n, 3) for n in (2, 9, 3, 8, 1)], enforce_sorted=False)
    output = pad_packed_sequence(DataParallel(module, replicas=2)(packed))
    expected = pad_packed_sequence(module(packed))
    torch.testing.assert_close(output[0], expected[0])
    assert torch.equal(output[1], expected[1])


@report("P75", "pytorch/pytorch#33907")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_three_steps_of_training_always_use_the_current_weights(kind):
    module = kind(3, 2, num_layers=2, batch_first=True, bidirectional=True).double()
    plain = twin(module)
    model = DataParallel(module, replicas=3)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5) for net in (model, plain)]
    for _ in range(3):
        x = rows(7, 5, 3)
        for net, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            net(x)[0].square().mean().backward()
            optimizer.step()
        assert_same_state(module, plain)


@report("P76", "pytorch/pytorch#34513")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_recurrent_network_has_the_current_weights():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 2, batch_first=True).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0]

    source = Recurrent()
    module = torch.jit.script(source)
    model = DataParallel(module, replicas=3)
    for _ in range(2):
        x = rows(7, 5, 3)
        module.zero_grad()
        output = model(x)
        torch.testing.assert_close(output, source(x))
        output.square().sum().backward()
        mine = [parameter.grad.clone() for parameter in source.parameters()]
        expected = torch.autograd.grad(source(x).square().sum(), list(source.parameters()))
        for one, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(one, other)
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.add_(0.1)


@beyond("K11")
def test_a_cell_in_a_python_loop_and_proj_and_attention_over_time():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(3, 4).double()
            self.rnn = nn.LSTM(4, 4, proj_size=2, batch_first=True).double()
            self.attention = nn.MultiheadAttention(2, 1, batch_first=True).double()

        def forward(self, x, mask):
            h, c = x.new_zeros(len(x), 4), x.new_zeros(len(x), 4)
            steps = []
            for t in range(x.shape[1]):
                h, c = self.cell(x[:, t], (h, c))
                steps.append(h)
            y, _ = self.rnn(torch.stack(steps, 1))
            return self.attention(y, y, y, key_padding_mask=mask)

    mask = torch.arange(5)[None] >= torch.tensor([5, 4, 3, 5, 1, 2, 5])[:, None]
    check_same(Loop(), rows(7, 5, 3, grad=True), mask)


@beyond("K11")
def test_state_carried_from_call_to_call_for_truncated_backpropagation():
    class Carrying(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 2, batch_first=True).double()
            self.state = None

        def forward(self, x):
            h = None if self.state is None else self.state.transpose(0, 1).contiguous()
            y, h = self.rnn(x, h)
            self.state = h.transpose(0, 1).detach()
            return y

    module = Carrying()
    check_same(module, rows(7, 5, 3), num_calls=3)
    assert module.state.shape == (7, 1, 2)


@beyond("K11")
def test_sorted_and_unsorted_packing_with_initial_state_inside_forward():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(3, 2, batch_first=True, bidirectional=True).double()

        def forward(self, x, lengths, state):
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            h, c = (s.transpose(0, 1).contiguous() for s in state)
            output, (h, c) = self.rnn(packed, (h, c))
            y, _ = pad_packed_sequence(output, batch_first=True, total_length=x.shape[1])
            return y, (h.transpose(0, 1), c.transpose(0, 1))

    lengths = torch.tensor([2, 9, 3, 8, 1, 9, 4])
    state = (rows(7, 2, 2, grad=True), rows(7, 2, 2, grad=True))
    check_same(Encoder(), rows(7, 9, 3, grad=True), lengths, state)
