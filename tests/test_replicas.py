"""Replicas: no copy where memory can be shared, never out of date, real modules."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from samestep import DataParallel, copies, links
from samestep.devices import Slot
from samestep.errors import ReplicaError
from samestep.replica import LazyError, find_replica, home_device
from samestep.replicas import ReplicaSet

CPU = torch.device("cpu")
SLOTS = [Slot(k, CPU) for k in range(3)]


class Net(nn.Module):
    """A bit of everything that a module may hold."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(2)])
        self.register_buffer("table", torch.arange(4.0))
        self.last = nn.Linear(4, 4)
        self.last.weight = self.blocks[0].weight  # tied
        self.last.weight.tag = "tied"
        self.options = {"depth": 2, "again": [self.first]}

    def forward(self, x):
        return self.last(self.blocks[0](self.first(x))) * self.scales[0] + self.table


@pytest.fixture
def source():
    return Net()


def refresh(replicas, source, slots=SLOTS, **options):
    return [replica.module for replica in replicas.refresh(source, slots, **options)]


# --------------------------------------------------------------------------------------------------
# What a replica is
# --------------------------------------------------------------------------------------------------


def test_replicas_alias_the_parameters_and_own_their_buffers(source):
    modules = refresh(ReplicaSet(), source)
    for module in modules:
        for (name, mine), (other, theirs) in zip(
            module.named_parameters(), source.named_parameters(), strict=True
        ):
            assert name == other
            assert mine.data_ptr() == theirs.data_ptr()
            assert mine is not theirs
            assert (mine.is_leaf, mine.requires_grad) == (True, theirs.requires_grad)
        for mine, theirs in zip(module.buffers(), source.buffers(), strict=True):
            assert mine.data_ptr() != theirs.data_ptr()
            assert torch.equal(mine, theirs)
    assert len({id(module) for module in (source, *modules)}) == 4


def test_a_replica_is_a_real_module_of_its_class(source):
    (module,) = refresh(ReplicaSet(), source, SLOTS[:1])
    assert type(module) is Net
    assert list(module.state_dict()) == list(source.state_dict())
    assert len(list(module.parameters())) == len(list(source.parameters()))
    assert type(module.scales) is nn.ParameterList
    assert module.last.weight is module.blocks[0].weight
    assert module.last.weight.tag == "tied"
    assert module.options["again"][0] is module.first
    x = torch.randn(2, 3)
    assert torch.equal(module(x), source(x))


def test_a_copying_set_shares_no_memory(source):
    (module,) = refresh(ReplicaSet(share=False), source, SLOTS[:1])
    for mine, theirs in zip(module.parameters(), source.parameters(), strict=True):
        assert mine.data_ptr() != theirs.data_ptr()
        assert torch.equal(mine, theirs)


def test_a_gradient_that_reaches_a_replica_past_the_stitch_is_the_sources(source):
    (module,) = refresh(ReplicaSet(), source, SLOTS[:1])
    x = torch.randn(2, 3)
    module(x).sum().backward()
    assert module.first.weight.grad is None
    found = source.first.weight.grad.clone()
    source.zero_grad()
    source(x).sum().backward()
    assert torch.equal(found, source.first.weight.grad)


def test_replicas_are_found_by_their_module(source):
    replicas = ReplicaSet()
    records = replicas.refresh(source, SLOTS)
    assert [find_replica(record.module) for record in records] == records
    assert find_replica(source) is None
    assert find_replica(records[0].module.first) is None
    assert records[0].original(records[0].module.first) is source.first
    assert records[0].original(records[0].module.first.weight) is source.first.weight
    assert records[0].original(source) is source


def test_a_module_on_several_devices_is_refused_by_name(source):
    source.last.bias = nn.Parameter(torch.ones(4, device="meta"))
    with pytest.raises(
        ReplicaError, match=r"'scales.0' on cpu, 'last.bias' on meta|on several dev"
    ):
        home_device(source)
    with pytest.raises(ReplicaError, match="lies on several devices"):
        ReplicaSet().refresh(source, SLOTS)


def test_home_is_the_cpu_without_any_tensor():
    assert home_device(nn.ReLU()) == CPU
    assert home_device(nn.Linear(2, 2, device="meta")) == torch.device("meta")


def test_lazy_parameters_are_noticed():
    with pytest.raises(LazyError, match=r"'_modules.0._parameters.weight' has no shape yet"):
        ReplicaSet().refresh(nn.Sequential(nn.LazyLinear(3)), [Slot(0, CPU), Slot(1, CPU)])


# --------------------------------------------------------------------------------------------------
# Freshness
# --------------------------------------------------------------------------------------------------


def test_nothing_is_done_when_nothing_changed(source):
    replicas = ReplicaSet()
    before = refresh(replicas, source), replicas.stats()
    assert before[1].num_builds == 3
    for _ in range(3):
        assert (refresh(replicas, source), replicas.stats()) == before


def test_only_slots_with_a_shard_get_a_replica(source):
    replicas = ReplicaSet()
    refresh(replicas, source, SLOTS[1:2])
    assert replicas.stats().num_builds == 1
    refresh(replicas, source, SLOTS)
    assert replicas.stats().num_builds == 3


def change_buffer_in_place(net):
    net.table.mul_(3)


def rebind_buffer(net):
    net.table = torch.full((4,), 7.0)


def set_data(net):
    net.first.weight.data = torch.randn(4, 3)


def turn_data(net):  # the same address
    net.last.weight.data = net.last.weight.data.t()


def set_parameter(net):
    net.first.weight = nn.Parameter(torch.randn(4, 3))


def write_parameter(net):
    with torch.no_grad():
        net.first.weight.add_(1)


def write_through_data(net):
    net.first.weight.data.add_(1)


def load(net):
    net.load_state_dict(Net().state_dict())


def load_by_assigning(net):
    net.load_state_dict(Net().state_dict(), assign=True)


def swap_a_child(net):
    net.first = nn.Linear(3, 4, bias=False)


def add_to_a_list(net):
    net.blocks.append(nn.Linear(4, 4))


def remove_from_a_list(net):
    del net.blocks[1]


def set_an_attribute(net):
    net.options["depth"] = 5


def rename_an_entry(net):  # the same values, in the same order
    net.options["anew"] = net.options.pop("again")


def nest_an_attribute(net):
    net.options["more"] = {"deeper": [1, {"x": net.last}]}


def freeze(net):
    net.first.weight.requires_grad_(False)


def evaluate(net):
    net.eval()


def convert(net):
    net.double()


def tag(net):
    net.first.weight.tag = "new"


def untie(net):
    net.last.weight = nn.Parameter(torch.randn(4, 4))


CHANGES = [
    change_buffer_in_place,
    rebind_buffer,
    set_data,
    turn_data,
    set_parameter,
    write_parameter,
    write_through_data,
    load,
    load_by_assigning,
    swap_a_child,
    add_to_a_list,
    remove_from_a_list,
    set_an_attribute,
    rename_an_entry,
    nest_an_attribute,
    freeze,
    evaluate,
    tag,
    untie,
    convert,
]


def check_equal(replica, source, *, is_shared=True):
    """The replica is what a new one would be."""
    assert list(replica.state_dict()) == list(source.state_dict())
    for mine, theirs in zip(
        replica.state_dict().values(), source.state_dict().values(), strict=True
    ):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(replica.parameters(), source.parameters(), strict=True):
        assert (mine.data_ptr() == theirs.data_ptr()) == is_shared
        assert mine.requires_grad == theirs.requires_grad
        assert mine.stride() == theirs.stride()
        assert getattr(mine, "tag", None) == getattr(theirs, "tag", None)
    assert [m.training for m in replica.modules()] == [m.training for m in source.modules()]
    assert [type(m) for m in replica.modules()] == [type(m) for m in source.modules()]
    assert replica.options["depth"] == source.options["depth"]
    assert replica.options.keys() == source.options.keys()
    if "more" in source.options:
        assert replica.options["more"]["deeper"][1]["x"] is replica.last
    assert (replica.last.weight is replica.blocks[0].weight) == (
        source.last.weight is source.blocks[0].weight
    )
    x = torch.randn(2, 3, dtype=source.first.weight.dtype)
    assert torch.equal(replica(x), source(x))


@pytest.mark.parametrize("has_guards", [True, False])
@pytest.mark.parametrize("num_quiet", [1, 3])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_between_calls_is_followed(source, change, num_quiet, has_guards, monkeypatch):
    if not has_guards:  # as with a torch that has none
        monkeypatch.setattr(links, "TensorGuards", None)
    replicas = ReplicaSet()
    for _ in range(num_quiet):  # after two, one look at everything must tell
        refresh(replicas, source)
    change(source)
    for module in refresh(replicas, source):
        check_equal(module, source)
    settled = replicas.stats()
    refresh(replicas, source)
    assert replicas.stats() == settled


MODES = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", [set_data, turn_data, freeze], ids=lambda c: c.__name__)
def test_a_change_is_seen_in_every_mode(source, change, mode):
    replicas = ReplicaSet()
    for name in [*MODES, *MODES, mode, mode]:
        with MODES[name]():
            refresh(replicas, source)
    change(source)
    with MODES[mode]():
        modules = refresh(replicas, source)
    for module in modules:
        check_equal(module, source)


def test_memory_that_is_read_as_another_type_is_seen():
    source, replicas = nn.Linear(2, 2).half(), ReplicaSet()
    for _ in range(3):
        refresh(replicas, source)
    source.weight.data = source.weight.data.view(torch.bfloat16)
    for module in refresh(replicas, source):
        assert module.weight.dtype == torch.bfloat16


def test_a_change_of_a_tensor_without_one_address_is_seen():
    source, replicas = nn.Linear(3, 3), ReplicaSet()
    source.graph = nn.Parameter(torch.eye(3).to_sparse())
    for _ in range(3):
        refresh(replicas, source)
    source.graph.requires_grad_(False)
    assert not any(module.graph.requires_grad for module in refresh(replicas, source))


def test_changes_one_after_the_other_are_followed(source):
    replicas = ReplicaSet()
    for change in CHANGES:
        change(source)
        for module in refresh(replicas, source):
            check_equal(module, source)


SEEN_BY_COPIES = [change for change in CHANGES if change is not write_through_data]


@pytest.mark.parametrize("with_inference", [False, True])
@pytest.mark.parametrize("change", SEEN_BY_COPIES)
def test_a_set_that_copies_is_brought_up_to_date(source, change, with_inference):
    replicas = ReplicaSet(share=False)
    refresh(replicas, source, SLOTS[:2])
    change(source)
    with torch.inference_mode(with_inference):
        modules = refresh(replicas, source, SLOTS[:2])
    for module in modules:
        check_equal(module, source, is_shared=False)
    before = replicas.stats()
    refresh(replicas, source, SLOTS[:2])
    assert replicas.stats() == before


def test_a_set_that_copies_follows_changes_one_after_the_other(source):
    replicas = ReplicaSet(share=False)
    for change in SEEN_BY_COPIES:
        change(source)
        for module in refresh(replicas, source, SLOTS[:2]):
            check_equal(module, source, is_shared=False)


class Shapes(nn.Module):
    """Parameters of all kinds of memory."""

    def __init__(self):
        super().__init__()
        image = torch.randn(3, 5, 2, 2).to(memory_format=torch.channels_last)
        values = {
            "odd": torch.randn(3),
            "image": image,
            "turned": torch.randn(5, 3).T,
            "none": torch.randn(0, 4),
            "one": torch.randn(()),
            "gaps": torch.randn(4, 4)[:, ::2],
            "wide": torch.randn(7).double(),
            "more": torch.randn(5).double(),
            "small": torch.randn(9).half(),
        }
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.still = nn.Parameter(torch.randn(2, 3), requires_grad=False)
        self.tied = self.image


def change_all(net):
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(parameter + 1)


def get_storages(net):
    return {name: p.untyped_storage().data_ptr() for name, p in net.named_parameters()}


def check_copies(mine, net):
    for own, theirs in zip(mine.parameters(), net.parameters(), strict=True):
        assert torch.equal(own, theirs)
        assert own.dtype == theirs.dtype
        assert own.data_ptr() % 64 == 0  # as with memory of its own: bits can depend on that
        if theirs is not net.gaps:
            assert own.stride() == theirs.stride()


def test_what_changes_together_is_copied_to_memory_in_common():
    net, replicas = Shapes(), ReplicaSet(share=False)
    (mine,) = refresh(replicas, net, SLOTS[:1])
    at = get_storages(mine)
    assert at["odd"] == at["image"] == at["turned"] == at["one"]
    assert at["wide"] == at["more"]
    assert at["frozen"] == at["still"]
    assert len({at[name] for name in ("odd", "wide", "frozen", "small", "gaps")}) == 5
    assert mine.tied is mine.image
    check_copies(mine, net)
    change_all(net.requires_grad_(False))
    check_copies(refresh(replicas, net, SLOTS[:1])[0], net)


def test_a_copy_has_a_version_of_its_own():
    net, replicas = Shapes(), ReplicaSet(share=False)
    (mine,) = refresh(replicas, net, SLOTS[:1])

    def refresh_and_find_raised():
        before = {name: p._version for name, p in mine.named_parameters()}
        refresh(replicas, net, SLOTS[:1])
        check_copies(mine, net)
        return {name for name, p in mine.named_parameters() if p._version != before[name]}

    with torch.no_grad():
        net.odd.add_(1)
        assert refresh_and_find_raised() == {"odd"}
        mine.image.zero_()  # as a forward might
        assert refresh_and_find_raised() == {"image"}
        trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
        for parameter in trained.values():
            parameter.mul_(2)
        assert refresh_and_find_raised() == trained.keys()
    # A graph that needs the old values says so, as in torch.
    loss = (mine.odd * mine.odd).sum()
    change_all(net)
    refresh(replicas, net, SLOTS[:1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_memory_in_common_is_made_anew_with_a_tensor_that_moves():
    net, replicas = Shapes(), ReplicaSet(share=False)
    (mine,) = refresh(replicas, net, SLOTS[:1])
    before, leaf = get_storages(mine), mine.image
    net.odd.data = torch.randn(4)
    refresh(replicas, net, SLOTS[:1])
    check_copies(mine, net)
    after = get_storages(mine)
    assert after["odd"] == after["image"] != before["image"]
    assert after["wide"] == before["wide"]
    assert mine.image is mine.tied is not leaf
    net.odd.requires_grad_(False)
    refresh(replicas, net, SLOTS[:1])
    check_copies(mine, net)
    assert get_storages(mine)["odd"] != get_storages(mine)["image"] == get_storages(mine)["one"]


def test_a_tensor_that_is_gone_leaves_the_others_right():
    net, replicas = Shapes(), ReplicaSet(share=False)
    (mine,) = refresh(replicas, net, SLOTS[:1])
    memory = weakref.ref(net.odd.untyped_storage())
    net.odd = None
    refresh(replicas, net, SLOTS[:1])
    assert memory() is None
    for _ in range(2):
        change_all(net)
        refresh(replicas, net, SLOTS[:1])
        check_copies(mine, net)
    assert replicas.stats().num_builds == 1


def test_a_write_through_data_into_a_copy_needs_force(source):
    replicas = ReplicaSet(share=False)
    (module,) = refresh(replicas, source, SLOTS[:1])
    source.first.weight.data.add_(1)
    refresh(replicas, source, SLOTS[:1], force=True)
    assert torch.equal(module.first.weight, source.first.weight)


def test_what_a_forward_wrote_into_its_copies_is_gone_at_the_next_call(source):
    replicas = ReplicaSet()
    (module,) = refresh(replicas, source, SLOTS[:1])
    module.table.add_(100)
    refresh(replicas, source, SLOTS[:1])
    assert torch.equal(module.table, source.table)


def test_what_is_written_to_a_replica_between_calls_is_gone_at_the_next(source):
    replicas = ReplicaSet()
    for _ in range(3):
        modules = refresh(replicas, source)
    modules[1].options["depth"] = 9  # a backward may do so
    for module in refresh(replicas, source):
        check_equal(module, source)


def test_a_small_change_builds_no_new_replica(source):
    replicas = ReplicaSet()
    refresh(replicas, source)
    for change in (set_data, freeze, evaluate, set_an_attribute, rebind_buffer, write_parameter):
        change(source)
        refresh(replicas, source)
    assert replicas.stats().num_builds == 3


def test_another_module_gets_other_replicas(source):
    replicas, other = ReplicaSet(), Net()
    refresh(replicas, source)
    for module in refresh(replicas, other):
        check_equal(module, other)


def test_copies_of_the_source_are_independent(source):
    replicas, other = ReplicaSet(), copy.deepcopy(source)
    (module,) = refresh(replicas, source, SLOTS[:1])
    with torch.no_grad():
        other.first.weight.zero_()
    assert torch.equal(module.first.weight, source.first.weight)


def test_a_far_replica_is_brought_up_to_date_by_one_transfer(monkeypatch):
    net, replicas = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), ReplicaSet(share=False)
    (mine,) = refresh(replicas, net, SLOTS[:1])
    sent = []

    def move(tensor, device, **_):
        sent.append(tensor.numel())
        return tensor.clone()

    for module in (links, copies):
        monkeypatch.setattr(module, "is_far", lambda here, there: True)
    monkeypatch.setattr(links, "move_tensor", move)
    change_all(net)
    refresh(replicas, net, SLOTS[:1])
    assert sent == [16 + 16 + 32 + 16]  # each begins at a multiple of 64 bytes
    with torch.no_grad():
        net[0].weight.zero_(), net[1].bias.zero_()
    refresh(replicas, net, SLOTS[:1])
    assert sent[1:] == [12 + 5]
    for own, theirs in zip(mine.parameters(), net.parameters(), strict=True):
        assert torch.equal(own, theirs)


def test_what_is_far_is_sent_as_one_flat_transfer_per_dtype(monkeypatch):
    targets = [
        torch.zeros(3, 2),
        torch.zeros(4, dtype=torch.float64),
        torch.zeros(2),
        torch.zeros(0),
    ]
    sources = [torch.randn(3, 2), torch.randn(4).double(), torch.randn(2), torch.zeros(0)]
    sources.append(torch.randn(2, 3).T)
    targets.append(torch.zeros(3, 2))
    sent = []

    def move(tensor, device, **_):
        sent.append((tensor.dtype, tensor.numel()))
        return tensor.clone()

    monkeypatch.setattr(links, "is_far", lambda here, there: True)
    monkeypatch.setattr(links, "move_tensor", move)
    before = [target._version for target in targets]
    links.copy_all(targets, sources)
    assert sent == [(torch.float32, 6 + 2 + 6)]  # a single tensor needs no flat memory
    for target, source, version in zip(targets, sources, before, strict=True):
        assert torch.equal(target, source)
        assert target._version > version


def test_few_large_copies_are_renewed_each_by_itself(monkeypatch):
    monkeypatch.setattr("samestep.copies._LARGE", 1)
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))  # with gaps between the copies
    replicas, slots = ReplicaSet(share=False), [Slot(0, torch.device("cpu"))]
    replicas.refresh(net, slots)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_()
    (replica,) = replicas.refresh(net, slots)
    for own, parameter in zip(replica.module.parameters(), net.parameters(), strict=True):
        assert torch.equal(own, parameter)
        assert own.data_ptr() % 64 == 0
        assert own.data_ptr() != parameter.data_ptr()


def test_replicas_that_are_dropped_go_without_the_garbage_collector():
    model = DataParallel(nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2)), replicas=3)
    rows = torch.randn(9, 5)
    model(rows).sum().backward()
    kept = model._samestep_runtime.replicas
    seen = [weakref.ref(replica) for replica in kept._replicas.values()]
    seen += [weakref.ref(replica.module) for replica in kept._replicas.values()]
    gc.collect()
    gc.disable()
    try:
        kept.clear()
        assert [found() for found in seen] == [None] * 6
    finally:
        gc.enable()
    model(rows)  # and new ones follow


def test_another_set_of_replicas_has_another_version():
    source, slots = nn.Linear(2, 2), [Slot(0, torch.device("cpu"))]
    one, other = ReplicaSet(), ReplicaSet()
    for found in (one, other):
        found.refresh(source, slots)
    assert one.version != other.version
    version = one.version
    one.refresh(source, slots)
    assert one.version == version
    source.weight.requires_grad_(False)
    one.refresh(source, slots)
    assert one.version != version
