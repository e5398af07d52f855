"""K15. The wrapper looks like the module."""

import copy
import io
import pickle

import pytest
import torch
from compare import assert_same, rows
from reports import beyond, report
from torch import nn

from samestep import DataParallel, current_shard


class Model(nn.Module):
    """With a config, a property, methods and a generate, as library models have."""

    num_made = 0

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
        self.head = nn.Linear(4, 2).double()
        self.config = {"hidden": 4}
        self._threshold = 0.5

    @property
    def threshold(self):
        return self._threshold

    @threshold.setter
    def threshold(self, value):
        self._threshold = value

    @property
    def broken(self):
        raise AttributeError("broken on purpose")

    def forward(self, x):
        return self.head(self.features(x))

    def predict(self, x):
        return self.forward(x).argmax(1)

    def generate(self, x, steps=2):
        shard = current_shard()
        index = torch.full((len(x),), -1 if shard is None else shard.index)
        for _ in range(steps):
            x = x + self.head(self.features(x)).sum(1, keepdim=True)
        return x, index


@report("P97", "pytorch/pytorch#16885", "pytorch/pytorch#8071", "pytorch/pytorch#1341")
def test_attributes_methods_and_properties_read_and_write_through():
    module = Model()
    model = DataParallel(module, replicas=2)
    assert model.config is module.config
    assert model.threshold == 0.5
    assert model.predict(rows(7, 3)).shape == (7,)
    assert model.features is module.features
    model.threshold = 0.7
    model.note = "written"
    model.head = nn.Linear(4, 3).double()
    assert (module.threshold, module.note) == (0.7, "written")
    assert module.head.out_features == 3
    assert "note" not in model.__dict__
    del model.note
    assert not hasattr(module, "note")
    assert model(rows(7, 3)).shape == (7, 3)


@report("P97", "pytorch/pytorch#43329")
def test_hasattr_is_right_and_the_error_names_the_attribute():
    model = DataParallel(Model(), replicas=2)
    assert hasattr(model, "generate")
    assert not hasattr(model, "no_such_thing")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = model.no_such_thing
    with pytest.raises(AttributeError, match="broken"):
        _ = model.broken
    assert "config" in dir(model)


@report("P98", "pytorch/tutorials#445", "pytorch/tutorials#836")
def test_copies_and_pickles_do_not_recurse():
    model = DataParallel(Model(), replicas=2)
    x = rows(7, 3)
    model.eval()
    expected = model(x)
    for other in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is DataParallel
        assert other.config == {"hidden": 4}
        assert torch.equal(other(x), expected)
    bare = DataParallel.__new__(DataParallel)
    with pytest.raises(AttributeError):
        _ = bare.module


@report("P99", "pytorch/pytorch#32611", "huggingface/transformers#6821")
def test_call_runs_another_method_in_parallel():
    module = Model().eval()
    model = DataParallel(module, replicas=3)
    x = rows(7, 3)
    output, index = model.call("generate", x, steps=3)
    torch.testing.assert_close(output, module.generate(x, steps=3)[0])
    assert index.tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert model.generate(x)[1].tolist() == [-1] * 7  # by attribute: on the source module
    with pytest.raises(AttributeError, match="no_such_method"):
        model.call("no_such_method", x)


@report("P100", "pytorch/pytorch#9176", "pytorch/pytorch#3805")
def test_checkpoints_have_no_prefix_and_both_forms_load():
    module = Model()
    model = DataParallel(module, replicas=2)
    assert list(model.state_dict()) == list(module.state_dict())
    other = Model()
    other.load_state_dict(model.state_dict())
    assert_same(dict(other.state_dict()), dict(module.state_dict()))
    prefixed = {f"module.{key}": value for key, value in Model().state_dict().items()}
    for state in (Model().state_dict(), prefixed):
        result = model.load_state_dict(state)
        assert not result.missing_keys
        assert not result.unexpected_keys
        loaded = {key.removeprefix("module."): value for key, value in state.items()}
        assert_same(dict(module.state_dict()), loaded)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"module.head.bias": torch.zeros(2)})


@report("P100", "pytorch/pytorch#9176", "pytorch/pytorch#3805")
def test_a_file_goes_from_wrapped_to_plain_and_back():
    model, other = DataParallel(Model(), replicas=2), Model()
    file = io.BytesIO()
    torch.save(
        {"model": model.state_dict(), "old": nn.DataParallel(model.module).state_dict()}, file
    )
    file.seek(0)
    saved = torch.load(file)
    other.load_state_dict(saved["model"])
    target = DataParallel(Model(), replicas=3)
    target.load_state_dict(saved["old"])
    assert_same(dict(target.state_dict()), dict(other.state_dict()))


@report("P101", "bearpaw/pytorch-classification#27")
def test_a_wrapped_part_saves_and_loads_without_a_prefix_inside():
    plain, partly = Model(), Model()
    partly.features = DataParallel(partly.features, replicas=2)
    assert list(partly.state_dict()) == list(plain.state_dict())
    partly.load_state_dict(plain.state_dict())
    assert_same(dict(partly.state_dict()), dict(plain.state_dict()))
    old = {k.replace("features.", "features.module."): v for k, v in Model().state_dict().items()}
    partly.load_state_dict(old)
    assert torch.equal(partly.features.module[0].weight, old["features.module.0.weight"])
    plain.load_state_dict(partly.state_dict())


@report("P101", "bearpaw/pytorch-classification#27")
def test_a_wrapper_three_levels_down_saves_and_loads():
    deep = nn.Sequential(nn.Sequential(DataParallel(nn.Sequential(nn.Linear(3, 2)), replicas=2)))
    plain = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(3, 2))))
    deep.load_state_dict(plain.state_dict())
    plain.load_state_dict(deep.state_dict())
    assert list(deep.state_dict()) == ["0.0.0.weight", "0.0.0.bias"]
    twice = DataParallel(DataParallel(nn.Linear(3, 2), replicas=2), replicas=2)
    twice.load_state_dict(
        {"module.module.weight": torch.ones(2, 3), "module.module.bias": torch.ones(2)}
    )
    assert list(twice.state_dict()) == ["weight", "bias"]
    assert torch.equal(twice.weight, torch.ones(2, 3))


@report("P102", "airaria/TextBrewer#55")
def test_the_optimizer_may_be_made_before_or_after_wrapping():
    steps = []
    for is_before in (True, False):
        torch.manual_seed(0)
        module = Model()
        if is_before:
            optimizer = torch.optim.Adam(module.parameters())
            model = DataParallel(module, replicas=3)
        else:
            model = DataParallel(module, replicas=3)
            optimizer = torch.optim.Adam(model.parameters())
        for one, other in zip(model.parameters(), module.parameters(), strict=True):
            assert one is other
        for _ in range(2):
            optimizer.zero_grad()
            model(rows(7, 3)).square().mean().backward()
            optimizer.step()
        steps.append({key: value.clone() for key, value in module.state_dict().items()})
    assert all(torch.equal(steps[0][key], steps[1][key]) for key in steps[0])


@report("P103", "huggingface/transformers#8716")
def test_the_module_is_there_under_the_name_that_libraries_use():
    module = Model()
    model = DataParallel(module, replicas=2)
    assert model.module is module
    unwrapped = model.module if hasattr(model, "module") else model
    assert unwrapped is module
    assert isinstance(model, nn.Module)


@beyond("K15")
def test_lengths_indices_and_iteration_are_the_modules():
    model = DataParallel(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), replicas=2)
    assert len(model) == 2
    assert model[1] is model.module[1]
    assert [type(child) for child in model] == [nn.Linear, nn.Tanh]
    assert bool(DataParallel(nn.Linear(3, 2), replicas=2)) is True
    with pytest.raises(TypeError):
        len(DataParallel(nn.Linear(3, 2), replicas=2))


@beyond("K15")
def test_names_are_those_of_the_checkpoint_and_a_strict_load_reports_the_plain_names():
    model = DataParallel(Model(), replicas=2)
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    assert sorted(names) == sorted(model.state_dict())
    state = model.state_dict()
    del state["head.bias"]
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["head.bias"]


@beyond("K15")
def test_moving_casting_and_freezing_through_the_wrapper_is_seen_by_the_next_call():
    model = DataParallel(Model(), replicas=3)
    x = rows(7, 3)
    model(x)
    model.float()
    assert model(x.float()).dtype == torch.float32
    model.requires_grad_(False)
    assert not model(x.float()).requires_grad
    model.double().eval()
    torch.testing.assert_close(model(x), model.module(x))
    assert not model.module.features[1].training


@beyond("K15")
def test_a_state_dict_with_a_child_named_module_is_not_mistaken_for_a_prefix():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(3, 2)

        def forward(self, x):
            return self.module(x)

    source = Odd()
    model = DataParallel(Odd(), replicas=2)
    model.load_state_dict(source.state_dict())
    assert torch.equal(model.module.module.weight, source.module.weight)
    model.load_state_dict(nn.DataParallel(source).state_dict())
    assert torch.equal(model.module.module.weight, source.module.weight)


@beyond("K15")
def test_call_is_not_bound_by_the_dims_of_forward():
    class Two(nn.Module):
        def forward(self, x, h):
            return {"y": x + h.sum(0), "count": len(x)}

        def encode(self, x):
            return x * 2

    options = {"in_dims": {"h": 1}, "out_dims": {"count": "sum"}}
    model = DataParallel(Two(), replicas=3, **options)
    x = rows(7, 3)
    assert model(x, rows(2, 7, 3))["count"] == 7
    assert torch.equal(model.call("encode", x), x * 2)
    with pytest.raises(ValueError, match="in_dims speaks about 'no_such'"):
        DataParallel(Two(), replicas=3, in_dims={"no_such": 1}).call("encode", x)
