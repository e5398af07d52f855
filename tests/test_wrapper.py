"""From outside, the wrapper is the module: names, checkpoints, attributes, copies."""

import copy
import io
import pickle
import threading

import pytest
import torch
from helpers import assert_alike, train_step
from models import make_model, normal
from torch import nn

from samestep import DataParallel


class Model(nn.Module):
    """Attributes, a property, a method, a buffer, a child."""

    kind = "of the class"

    def __init__(self):
        super().__init__()
        self.child = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(2))
        self.width = 4

    @property
    def area(self):
        return self.width**2

    def describe(self):
        return f"width {self.width}"

    def forward(self, x):
        return self.head(self.child(x)) * self.scale


@pytest.fixture
def model():
    return DataParallel(Model(), replicas=3)


# --------------------------------------------------------------------------------------------------
# Attributes
# --------------------------------------------------------------------------------------------------


def test_unknown_attributes_are_the_modules(model):
    assert model.width == 4
    assert model.area == 16
    assert model.kind == "of the class"
    assert model.describe() == "width 4"
    assert model.head is model.module.head
    assert model.head.weight is model.module.head.weight
    assert isinstance(model, nn.Module)
    assert {"width", "describe", "module", "explain"} <= set(dir(model))


def test_what_is_nowhere_is_an_attribute_error(model):
    assert not hasattr(model, "nothing")
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'nothing'"):
        model.nothing  # noqa: B018  # reading it is the test
    assert getattr(model, "nothing", 7) == 7


def test_an_error_inside_a_property_is_not_hidden(model):
    class Broken(nn.Module):
        @property
        def broken(self):
            raise AttributeError("from inside")

    with pytest.raises(AttributeError):
        DataParallel(Broken(), replicas=2).broken  # noqa: B018  # reading it is the test


def test_writes_and_deletions_reach_the_module(model):
    model.width = 5
    model.new = nn.Linear(2, 2)
    model.scale = torch.zeros(2)
    assert model.module.width == 5
    assert model.module.new is model.new
    assert "new.weight" in model.state_dict()
    assert not model.module.scale.any()
    del model.new
    assert not hasattr(model.module, "new")
    assert not model(normal(6, 3, grad=False).float()).any()


def test_the_wrappers_own_names_stay_its_own(model):
    assert model.num_replicas == 3
    assert len(model.slots) == 3
    with pytest.raises(AttributeError):
        model.num_replicas = 5
    other = Model()
    model.module = other
    assert model.module is other
    assert model(torch.randn(6, 3)).shape == (6, 2)


def test_train_eval_and_hooks_work_on_both_levels(model):
    model.eval()
    assert not model.module.training
    assert not model.module.child.training
    model.train()
    assert model.module.training
    seen = []
    model.register_forward_hook(lambda m, args, out: seen.append(("outer", len(out))))
    model.module.register_forward_hook(lambda m, args, out: seen.append(("inner", len(out))))
    model(torch.randn(6, 3))
    assert sorted(seen) == [("inner", 2)] * 3 + [("outer", 6)]


def test_gradients_are_cleared_as_the_module_does_it():
    class Careful(nn.Linear):
        def zero_grad(self, set_to_none=True):
            asked.append(set_to_none)
            super().zero_grad(set_to_none)

    asked = []
    model = DataParallel(Careful(2, 2), replicas=2)
    for set_to_none in (False, True):
        model(torch.ones(4, 2)).sum().backward()
        model.zero_grad(set_to_none)
        gradients = [parameter.grad for parameter in model.parameters()]
        assert [g is None or not g.any() for g in gradients] == [True, True]
        assert (None in gradients) is set_to_none
    assert asked == [False, True]


def test_containers_can_be_indexed_and_walked():
    model = DataParallel(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), replicas=2)
    assert len(model) == 2
    assert model[0] is model.module[0]
    assert list(model) == list(model.module)
    named = DataParallel(nn.ModuleDict({"a": nn.ReLU()}), replicas=2)
    assert "a" in named
    assert named["a"] is named.module["a"]


def test_a_wrapper_is_true_unless_its_container_is_empty(model):
    assert model
    assert not DataParallel(nn.Sequential(), replicas=2)
    with pytest.raises(TypeError):
        len(model)


def test_conversions_and_moves_reach_the_module(model):
    model.double()
    assert model.head.weight.dtype == torch.float64
    assert model(normal(6, 3)).dtype == torch.float64
    assert model.to("cpu") is model
    assert model.apply(lambda m: None) is model
    model.requires_grad_(False)
    assert not any(p.requires_grad for p in model.module.parameters())


# --------------------------------------------------------------------------------------------------
# Names and checkpoints
# --------------------------------------------------------------------------------------------------


def test_parameters_are_the_users_own_objects_under_their_own_names(model):
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in model.module.named_parameters()
    ]
    assert all(
        one is other
        for one, other in zip(model.parameters(), model.module.parameters(), strict=True)
    )
    assert [name for name, _ in model.named_buffers()] == [
        name for name, _ in model.module.named_buffers()
    ]
    assert dict(model.named_modules())["child.0"] is model.module.child[0]
    assert next(model.named_modules()) == ("", model)


def test_checkpoints_have_the_modules_keys_and_load_with_and_without_prefix(model):
    plain = Model()
    state = plain.state_dict()
    assert list(model.state_dict()) == list(state)
    prefixed = type(state)((f"module.{key}", value) for key, value in state.items())
    for form in (state, dict(state), prefixed, dict(prefixed)):
        with torch.no_grad():
            model.head.weight.zero_()
        result = model.load_state_dict(form)
        assert result.missing_keys == result.unexpected_keys == []
        assert_alike(dict(model.state_dict()), dict(state), atol=0)


@pytest.mark.parametrize("assign", [False, True])
def test_what_was_loaded_is_used_by_the_next_call(model, assign):
    model.eval()
    x, plain = torch.randn(7, 3), Model().eval()
    model(x)
    model.load_state_dict(plain.state_dict(), assign=assign)
    torch.testing.assert_close(model(x), plain(x))


def test_wrong_keys_are_reported_as_without_the_wrapper(model):
    state = dict(Model().state_dict(), extra=torch.ones(1))
    del state["head.bias"]
    for form in (state, {f"module.{key}": value for key, value in state.items()}):
        with pytest.raises(RuntimeError) as info:
            model.load_state_dict(form)
        assert "head.bias" in str(info.value)
        assert "extra" in str(info.value)
        assert model.load_state_dict(form, strict=False).missing_keys == ["head.bias"]


def test_a_module_that_has_a_child_named_module_keeps_its_keys():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)

        def forward(self, x):
            return self.module(x)

    model = DataParallel(Odd(), replicas=2)
    state = Odd().state_dict()
    assert list(model.state_dict()) == ["module.weight", "module.bias"]
    model.load_state_dict(state)
    assert_alike(dict(model.state_dict()), dict(state), atol=0)
    model.load_state_dict({f"module.{key}": value for key, value in state.items()})
    assert_alike(dict(model.state_dict()), dict(state), atol=0)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_wrapper_deep_inside_another_module_loads_both_forms(prefix):
    def outer(wrap):
        inner = Model()
        return nn.ModuleDict({"a": DataParallel(inner, replicas=2) if wrap else inner})

    target, source = outer(True), outer(False)
    assert list(target.state_dict()) == list(source.state_dict())
    state = {
        key.replace("a.", f"a.{prefix}", 1): value for key, value in source.state_dict().items()
    }
    target.load_state_dict(state)
    assert_alike(dict(target.state_dict()), dict(source.state_dict()), atol=0)


def test_an_optimizer_made_before_wrapping_is_right_and_its_state_names_the_same_parameters():
    plain = make_model("mlp")
    optimizer = torch.optim.SGD(plain.named_parameters(), lr=0.1)
    model = DataParallel(plain, replicas=3)
    x = normal(7, 3)
    before = [p.detach().clone() for p in plain.parameters()]
    step = train_step(model, (x,), {})
    optimizer.step()
    for old, p, name in zip(before, plain.parameters(), step.gradients, strict=True):
        assert_alike(p.detach(), old - 0.1 * step.gradients[name])


# --------------------------------------------------------------------------------------------------
# Copies
# --------------------------------------------------------------------------------------------------


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch_save])
def test_a_copy_is_a_wrapper_of_its_own(model, duplicate, is_used):
    if is_used:
        model(torch.randn(6, 3)).sum().backward()
        model.zero_grad()
    other = duplicate(model)
    assert type(other) is DataParallel
    assert (other.num_replicas, other.slots) == (model.num_replicas, model.slots)
    assert other.head.weight is not model.head.weight
    model.eval(), other.eval()
    x = torch.randn(6, 3)
    assert torch.equal(other(x), model(x))
    with torch.no_grad():
        other.head.bias.add_(1)
    torch.testing.assert_close(other(x), model(x) + 1)


def test_options_survive_a_copy():
    model = DataParallel(
        nn.Linear(3, 2), replicas=4, dim=1, split=[1, 2, 3, 4], reduction="sum", in_dims={0: 1}
    )
    other = by_pickle(model)
    assert other._samestep_options == model._samestep_options


def test_a_shallow_copy_shares_the_module_and_works(model):
    other = copy.copy(model)
    assert other.module is model.module
    assert other(torch.randn(6, 3)).shape == (6, 2)


def test_pickling_takes_no_threads_along(model):
    model(torch.randn(6, 3))
    size = len(pickle.dumps(model))
    assert size < len(pickle.dumps(model.module)) + 5000
    assert all(
        not thread.name.startswith("samestep") or thread.daemon for thread in threading.enumerate()
    )


def test_it_prints_with_its_slots(model):
    text = repr(model)
    assert "slots=[cpu, cpu, cpu], split='chunk'" in text
    assert "(child): Sequential(" in text


def test_a_wrapper_whose_module_was_deleted_says_so():
    model = DataParallel(nn.Linear(2, 2))
    del model.module
    with pytest.raises(AttributeError, match="module"):
        model(torch.ones(1, 2))


def test_what_is_printed_names_every_option_that_is_not_the_default():
    assert "recompute" not in repr(DataParallel(nn.Linear(2, 2), replicas=2))
    model = DataParallel(nn.Linear(2, 2), replicas=2, dim=1, recompute=True, out_dims={"a": "sum"})
    assert "dim=1" in repr(model)
    assert "recompute=True" in repr(model)
    assert "out_dims={'a': 'sum'}" in repr(model)
