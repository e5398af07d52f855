"""The four verbs, apart and together."""

import pytest
import torch
from helpers import assert_alike, score
from models import Pair, make_model, normal
from torch import nn

from samestep import MergeError, current_shard, gather, parallel_apply, replicate, scatter
from samestep.functional import merge_state

THREE = ["cpu"] * 3


def test_scatter_cuts_anything_into_views():
    x = torch.arange(14.0).view(7, 2)
    shards = scatter({"x": x, "pair": Pair(["a"] * 7, 3)}, THREE)
    assert [shard["x"].shape[0] for shard in shards] == [3, 3, 1]
    assert [len(shard["pair"].left) for shard in shards] == [3, 3, 1]
    assert all(type(shard["pair"]) is Pair and shard["pair"].right == 3 for shard in shards)
    assert shards[1]["x"].data_ptr() == x[3:].data_ptr()
    assert [s.shape for s in scatter(x, ["cpu"] * 2, 1)] == [(7, 1), (7, 1)]


def test_scatter_without_rows_gives_one_shard():
    assert scatter("text", THREE) == ("text",)
    assert [s.shape for s in scatter(torch.ones(0, 2), THREE)] == [(0, 2)]


def test_gather_undoes_scatter_and_both_are_differentiable():
    x = normal(7, 2)
    back = gather(scatter(x, THREE), "cpu")
    assert torch.equal(back, x)
    (back * torch.arange(7).unsqueeze(1)).sum().backward()
    assert torch.equal(x.grad, torch.arange(7.0).double().unsqueeze(1).expand(7, 2))


def test_gather_weights_by_rows_and_refuses_what_does_not_fit():
    losses = [{"x": torch.ones(r, 1), "loss": torch.tensor(float(r))} for r in (3, 1)]
    assert gather(losses, "cpu", rows=[3, 1])["loss"] == (3 * 3 + 1) / 4
    assert gather(losses, None, rows=[3, 1], reduction="sum")["loss"] == 4
    with pytest.raises(MergeError, match="different types"):
        gather([torch.ones(1), "text"], "cpu", rows=[1, 1])
    with pytest.raises(ValueError, match="target_device holds 'abacus'"):
        gather([torch.ones(1)], "abacus")


def test_the_verbs_together_are_the_step():
    plain, x = make_model("mlp"), normal(7, 3)
    expected = torch.autograd.grad(score(plain(x)), [x, *plain.parameters()])
    replicas = replicate(plain, THREE)
    out = gather(parallel_apply(replicas, scatter(x, THREE)), "cpu")
    assert_alike(out, plain(x))
    assert_alike(torch.autograd.grad(score(out), [x, *plain.parameters()]), expected)


def test_replicas_are_real_and_may_be_detached():
    plain = make_model("mlp")
    replicas = replicate(plain, THREE)
    assert len(replicas) == 3
    assert all(len(list(replica.parameters())) == 4 for replica in replicas)
    detached = replicate(plain, THREE, True)
    out = parallel_apply(detached, scatter(normal(7, 3, grad=False), THREE))
    assert not any(o.requires_grad for o in out)
    assert all(p.requires_grad for p in plain.parameters())


def test_replicas_outlive_the_call_that_made_them():
    plain, x = make_model("mlp"), normal(6, 3, grad=False)
    replicas = replicate(plain, THREE)
    for _ in range(3):
        out = gather(parallel_apply(replicas, scatter(x, THREE)), "cpu")
        assert_alike(out, plain(x))


def test_parallel_apply_runs_any_modules_on_their_own_inputs():
    modules = [nn.Linear(2, k + 1) for k in range(3)]
    inputs = [torch.ones(2), (torch.ones(3, 2),), [torch.ones(1, 2)]]
    out = parallel_apply(modules, inputs, devices=THREE)
    assert [tuple(o.shape) for o in out] == [(1,), (3, 2), (1, 3)]
    sum(o.sum() for o in out).backward()
    assert all(module.weight.grad is not None for module in modules)


def test_parallel_apply_passes_keywords_and_shards():
    class Ask(nn.Module):
        def forward(self, x, *, plus):
            return x + plus, current_shard().index

    out = parallel_apply([Ask()] * 3, [torch.ones(2)] * 3, [{"plus": k} for k in range(3)])
    assert [(o.tolist(), k) for o, k in out] == [([1 + k] * 2, k) for k in range(3)]


@pytest.mark.parametrize(
    ("modules", "inputs", "kwargs", "devices", "message"),
    [
        (2, 3, None, None, r"\(modules: 2, inputs: 3, kwargs_tup: 2, devices: 2\)"),
        (2, 2, 1, None, r"\(modules: 2, inputs: 2, kwargs_tup: 1, devices: 2\)"),
        (2, 2, None, 3, r"\(modules: 2, inputs: 2, kwargs_tup: 2, devices: 3\)"),
        (0, 0, None, None, "one entry per module is needed"),
    ],
)
def test_sequences_of_different_lengths_are_refused(modules, inputs, kwargs, devices, message):
    with pytest.raises(ValueError, match=message):
        parallel_apply(
            [nn.Identity()] * modules,
            [torch.ones(1)] * inputs,
            None if kwargs is None else [{}] * kwargs,
            None if devices is None else ["cpu"] * devices,
        )


def test_an_error_in_a_verb_has_its_shard():
    class Bad(nn.Module):
        def forward(self, x):
            raise LookupError("bad")

    with pytest.raises(LookupError, match="bad") as info:
        parallel_apply([nn.Identity(), Bad()], [torch.ones(2)] * 2)
    assert "in shard 1 of 2" in info.value.__notes__[0]


def test_state_is_merged_without_guesses():
    assert merge_state(["same", "same"], [1, 2]) == "same"
    assert torch.equal(
        merge_state([torch.ones(1), torch.zeros(2)], [1, 2]), torch.tensor([1.0, 0, 0])
    )
    with pytest.raises(MergeError):
        merge_state([torch.ones(4), torch.zeros(4)], [1, 2])
