"""K23. Sparse, complex, nested and other tensors."""

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close, check_same, rows, twin
from reports import beyond, report
from torch import nn

from samestep import DataParallel, SplitError, current_shard


@report("P135", "pytorch/pytorch#1456", "pytorch/pytorch#3211")
def test_sparse_gradients_stay_sparse():
    module = nn.Embedding(10, 3, sparse=True).double()
    plain = twin(module)
    index = torch.tensor([1, 1, 2, 9, 2, 1, 4])
    for net in (DataParallel(module, replicas=3), plain):
        net(index).square().sum().backward()
    assert module.weight.grad.is_sparse
    assert_close(module.weight.grad.coalesce(), plain.weight.grad.coalesce())
    optimizer = torch.optim.SparseAdam(module.parameters())
    optimizer.step()


@report("P135", "pytorch/pytorch#3370")
def test_sparse_in_some_shards_and_dense_or_nothing_in_others_are_summed():
    class Mixed(nn.Module):
        def __init__(self, mixture):
            super().__init__()
            self.weight = nn.Parameter(rows(10, 3))
            self.mixture = mixture

        def forward(self, index):
            shard = current_shard()
            kind = "sparse" if shard is None else self.mixture[shard.index]
            if kind == "none":
                return torch.zeros(len(index), 3, dtype=torch.float64)
            if kind == "dense":
                return self.weight[index]
            return F.embedding(index, self.weight, sparse=True)

    index = torch.tensor([1, 1, 2, 9, 2, 1, 4])
    for mixture in (
        ["sparse", "dense", "sparse"],
        ["dense", "sparse", "none"],
        ["sparse", "none", "sparse"],
    ):
        module = Mixed(mixture)
        weights = torch.linspace(1, 2, 7, dtype=torch.float64)[:, None]
        (DataParallel(module, replicas=3)(index) * weights).sum().backward()
        expected = torch.zeros(10, 3, dtype=torch.float64)
        for k, (part, weight) in enumerate(zip(index.split(3), weights.split(3), strict=True)):
            if mixture[k] != "none":
                expected.index_add_(0, part, weight.expand(-1, 3))
        torch.testing.assert_close(module.weight.grad.to_dense(), expected)
        assert module.weight.grad.is_sparse == ("dense" not in mixture)


class SparseWeight(nn.Module):
    def __init__(self, is_parameter):
        super().__init__()
        s = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]], dtype=torch.float64).to_sparse()
        if is_parameter:
            self.s = nn.Parameter(s)
        else:
            self.register_buffer("s", s)

    def forward(self, x):
        return torch.sparse.mm(self.s, x.T).T


@report("P136", "pytorch/pytorch#32444")
@pytest.mark.parametrize("is_parameter", [True, False])
def test_sparse_parameters_and_buffers_are_replicated(is_parameter):
    module = SparseWeight(is_parameter)
    x = rows(7, 3, grad=True)
    model = DataParallel(module, replicas=3)
    for _ in range(2):
        output, expected = model(x), module(x)
        torch.testing.assert_close(output, expected)
    wanted = [x, module.s] if is_parameter else [x]
    for one, other in zip(
        torch.autograd.grad(output.square().sum(), wanted),
        torch.autograd.grad(expected.square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(one.to_dense(), other.to_dense())


@report("P137")
def test_complex_parameters_and_inputs():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 2, dtype=torch.complex128))
            self.register_buffer(
                "phase", torch.polar(torch.ones(2), torch.ones(2)).to(torch.complex128)
            )

        def forward(self, x):
            y = x @ self.w * self.phase
            return y, y.abs().square(), torch.view_as_real(y).mean()

    x = torch.randn(7, 3, dtype=torch.complex128, requires_grad=True)
    check_same(Complex(), x, num_calls=2)
    half = nn.Linear(3, 2, dtype=torch.complex64)
    check_same(half, torch.randn(7, 3, dtype=torch.complex64))


@report("P138")
def test_jagged_nested_tensors_are_cut_and_joined_by_component():
    module = nn.Linear(3, 2).double()
    parts = [rows(n, 3) for n in (2, 5, 1, 4, 3)]
    batch = torch.nested.nested_tensor(parts, layout=torch.jagged)
    output = DataParallel(module, replicas=2)(batch)
    assert output.is_nested
    assert output.layout == torch.jagged
    for one, part in zip(output.unbind(), parts, strict=True):
        torch.testing.assert_close(one, module(part))
    sum(piece.sum() for piece in output.unbind()).backward()
    torch.testing.assert_close(module.weight.grad, torch.cat(parts).sum(0).expand(2, 3))


@report("P138")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_strided_nested_tensors_are_cut_and_joined_outside_of_grad_mode():
    module = nn.Linear(3, 2).double()
    parts = [rows(n, 3) for n in (2, 5, 1, 4, 3)]
    with torch.no_grad():
        output = DataParallel(module, replicas=2)(torch.nested.nested_tensor(parts))
    for one, part in zip(output.unbind(), parts, strict=True):
        torch.testing.assert_close(one, module(part))


@report("P138")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_a_layout_that_cannot_be_cut_is_refused_by_name():
    csr = torch.eye(7).to_sparse_csr()
    with pytest.raises(SplitError, match=r"args\[0\] sparse_csr .*cannot be cut"):
        DataParallel(nn.Identity(), replicas=2)(csr)


class Metres(torch.Tensor):
    """A subclass that does nothing special."""


@report("P138")
def test_a_tensor_subclass_stays_one_on_the_way_in_and_out():
    class Typed(nn.Module):
        def forward(self, x):
            assert type(x) is Metres
            return x * 2

    x = rows(7, 3).as_subclass(Metres)
    output = DataParallel(Typed(), replicas=3)(x)
    assert type(output) is Metres
    assert torch.equal(output, x * 2)


# torch 2.11 says it of any sparse tensor, once, also where the checks are declined.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@beyond("K23")
def test_sparse_batches_in_and_out():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(rows(5, 2))

        def forward(self, x):
            return torch.sparse.mm(x, self.w), x * 2

    x = (rows(7, 5) > 0.5).double().to_sparse()
    module = Sparse()
    dense, doubled = DataParallel(module, replicas=3)(x)
    torch.testing.assert_close(dense, x.to_dense() @ module.w)
    assert torch.equal(doubled.to_dense(), x.to_dense() * 2)
    dense.sum().backward()
    torch.testing.assert_close(module.w.grad, x.to_dense().sum(0)[:, None].expand(5, 2))


@beyond("K23")
def test_integers_bools_halves_and_views_with_strides():
    class Kinds(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(6).view(2, 3).T)
            self.small = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
            self.count = nn.Parameter(torch.arange(3), requires_grad=False)

        def forward(self, x, mask, index):
            assert self.table.stride() == (1, 3)
            assert self.count.dtype == torch.int64
            return x * mask, index + self.table.sum(), mask & (index > 2)[:, None], self.small * 2

    x = rows(3, 7).T
    check_same(Kinds(), x, x > 0, torch.arange(7), replicas=3, options={"out_dims": {"3": "first"}})


@beyond("K23")
def test_conjugate_negative_and_expanded_inputs_keep_their_meaning():
    class Views(nn.Module):
        def forward(self, x, y, z):
            return x * 2, y + 1, z.clone()

    x = torch.randn(7, 3, dtype=torch.complex128).conj()
    y = torch.randn(7, 3, dtype=torch.complex128).conj().imag
    check_same(Views(), x, y, rows(7, 1).expand(7, 4))
