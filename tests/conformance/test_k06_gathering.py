"""K06. Outputs: any tree comes back as one call would have returned it."""

import dataclasses
import warnings
from collections import OrderedDict, defaultdict, deque
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare import assert_same, check_same, rows
from reports import beyond, report
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from samestep import DataParallel, MergeError, current_shard


class Returning(nn.Module):
    """A linear layer behind a function that makes the output."""

    def __init__(self, function):
        super().__init__()
        self.fc = nn.Linear(3, 2).double()
        self.function = function

    def forward(self, x, *args, **kwargs):
        return self.function(self.fc(x), *args, **kwargs)


def shard_index():
    shard = current_shard()
    return 0 if shard is None else shard.index


@report("P43", "pytorch/pytorch#7956", "pytorch/pytorch#6983", "pytorch/pytorch#9811")
@pytest.mark.parametrize("dim", [0, 1])
def test_a_loss_stays_one_number_without_a_warning(dim):
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2).double()

        def forward(self, x, y):
            return F.mse_loss(self.fc(x), y)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = {"dim": dim, "in_dims": dim}
        x, y = (rows(7, 3), rows(7, 2)) if dim == 0 else (rows(4, 7, 3), rows(4, 7, 2))
        check_same(WithLoss(), x, y, options=options, num_calls=2)


@report("P44", "pytorch/pytorch#62466")
def test_strings_come_back_as_strings():
    names = list("abcdefg")
    check_same(Returning(lambda y, names: {"y": y, "name": names}), rows(7, 3), names)
    check_same(Returning(lambda y: (y, "same", b"same")), rows(7, 3))
    with pytest.raises(MergeError, match=r"output\[1\] differs between shards.*'shard 1'"):
        DataParallel(Returning(lambda y: (y, f"shard {shard_index()}")), replicas=2)(rows(7, 3))
    listed = Returning(lambda y: (y, f"shard {shard_index()}"))
    _, told = DataParallel(listed, replicas=2, out_dims={"1": "list"})(rows(7, 3))
    assert told == ["shard 0", "shard 1"]


@report(
    "P45", "pytorch/pytorch#15994", "pytorch/pytorch#94699", "Lightning-AI/pytorch-lightning#2507"
)
def test_numbers_and_flags_come_back_as_they_are():
    check_same(Returning(lambda y: (y, 3, True, 2.5, 1j, None)), rows(7, 3))
    with pytest.raises(
        MergeError, match=r"output\[1\] differs between shards: shard 0 \(3 rows\): int 3"
    ):
        DataParallel(Returning(lambda y: (y, len(y))), replicas=3)(rows(7, 3))
    _, count = DataParallel(Returning(lambda y: (y, len(y))), replicas=3, out_dims={"1": "sum"})(
        rows(7, 3)
    )
    assert count == 7


@report("P47", "pytorch/pytorch#2992", "pytorch/pytorch#2511")
def test_dicts_keep_the_first_shards_order_and_missing_keys_are_named():
    def ordered(y):
        pair = [("a", y), ("b", 2 * y)]
        return dict(reversed(pair) if shard_index() == 1 else pair)

    check_same(Returning(ordered), rows(7, 3))

    def partial(y):
        return {"a": y, **({"only": y} if shard_index() == 0 else {})}

    with pytest.raises(MergeError, match="has 'only' in shard 0 but not in shard 1"):
        DataParallel(Returning(partial), replicas=2)(rows(7, 3))


@dataclasses.dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor
    extra: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    inner: Output
    tag: str = "kept"


@dataclasses.dataclass
class ModelOutput(OrderedDict):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


@report("P48", "pytorch/pytorch#41327", "huggingface/transformers#5685")
def test_dataclasses_keep_their_type():
    check_same(Returning(lambda y: Output(y.mean(), y)), rows(7, 3))
    check_same(Returning(lambda y: Frozen(Output(None, y, [y, 1]))), rows(7, 3))
    _, output = check_same(Returning(lambda y: ModelOutput(logits=y)), rows(7, 3))
    assert output.loss is None
    assert output["logits"] is output.logits


class Named(NamedTuple):
    y: torch.Tensor
    hidden: torch.Tensor | None = None
    note: str = "n"


@report("P49", "pytorch/pytorch#50510")
def test_named_tuples_keep_their_type_with_none_in_a_field():
    check_same(Returning(Named), rows(7, 3))
    check_same(Returning(lambda y: [Named(y, y * 2), torch.max(y, 1)]), rows(7, 3))


class Trimming(nn.Module):
    """Pads to the longest sequence it sees, so shards differ in the time dim."""

    def __init__(self, total_length=None):
        super().__init__()
        self.rnn = nn.GRU(3, 2, batch_first=True).double()
        self.total_length = total_length

    def forward(self, x, lengths):
        longest = int(lengths.max())
        packed = nn.utils.rnn.pack_padded_sequence(
            x[:, :longest], lengths, batch_first=True, enforce_sorted=False
        )
        padded, _ = nn.utils.rnn.pad_packed_sequence(
            self.rnn(packed)[0], batch_first=True, total_length=self.total_length
        )
        return padded


@report("P50", "pytorch/pytorch#44141", "pytorch/pytorch#30657")
def test_outputs_of_different_lengths_are_an_error_with_shapes_and_remedies():
    x, lengths = rows(4, 9, 3), torch.tensor([9, 8, 3, 2])
    with pytest.raises(
        MergeError,
        match=r"rows on dim 0, but its other dims differ: .*\[2, 9, 2\].*\[2, 3, 2\].*'list'",
    ):
        DataParallel(Trimming(), replicas=2)(x, lengths)
    pieces = DataParallel(Trimming(), replicas=2, out_dims="list")(x, lengths)
    assert [list(piece.shape) for piece in pieces] == [[2, 9, 2], [2, 3, 2]]


@report("P50", "pytorch/pytorch#1591", "pytorch/pytorch#6299")
def test_padding_to_the_total_length_in_forward_joins():
    x, lengths = rows(4, 9, 3), torch.tensor([9, 8, 3, 2])
    check_same(Trimming(total_length=9), x, lengths, replicas=2)


@report("P52", "pytorch/pytorch#51104")
def test_outputs_land_on_any_output_device():
    module = nn.Linear(3, 2)
    assert (
        DataParallel(module, ["cpu"] * 2, output_device="cpu")(rows(7, 3).float()).device.type
        == "cpu"
    )
    output = DataParallel(Returning(lambda y: {"y": [y], "n": 1}), ["cpu"] * 2, "meta")(rows(7, 3))
    assert output["y"][0].device.type == "meta"


@report("P53", "Lightning-AI/pytorch-lightning#4073")
def test_every_leaf_of_a_nested_output_lands_on_the_output_device():
    def use(y):
        return {"loss": {"a": y.mean(), "b": [y.square().mean()]}, "y": y}

    check_same(Returning(use), rows(7, 3))
    output = DataParallel(Returning(use), ["cpu"] * 3, output_device="meta")(rows(7, 3))
    assert {t.device.type for t in (output["loss"]["a"], output["loss"]["b"][0], output["y"])} == {
        "meta"
    }


@report("P54")
@pytest.mark.parametrize("none_in", [0, 1])
def test_none_beside_a_tensor_is_an_error_with_the_path(none_in):
    module = Returning(lambda y: [y, None if shard_index() == none_in else y])
    with pytest.raises(MergeError, match=r"output\[1\] is None in some shards only"):
        DataParallel(module, replicas=2)(rows(7, 3))


@report("P54")
def test_sets_deques_and_default_dicts_come_back():
    def use(y):
        return deque([y], maxlen=2), defaultdict(list, y=y), {"a", "b"}, frozenset({1})

    _, output = check_same_but_deque(use)
    assert output[0].maxlen == 2
    assert output[1].default_factory is list


def check_same_but_deque(use):
    module = Returning(use)
    x = rows(7, 3)
    model = DataParallel(module, replicas=3)
    output, expected = model(x), module(x)
    assert type(output[0]) is deque
    assert_same([list(output[0]), *output[1:]], [list(expected[0]), *expected[1:]])
    return model, output


@report("P54")
def test_lists_of_unequal_lengths_are_an_error_with_the_path():
    module = Returning(lambda y: {"parts": [y] * (1 + shard_index())})
    with pytest.raises(MergeError, match=r"output\['parts'\] has different lengths"):
        DataParallel(module, replicas=2)(rows(7, 3))


@beyond("K06")
def test_boxes_and_per_row_lists_of_dicts_come_back_in_row_order():
    def detect(y, counts):
        found = [{"boxes": y[i : i + 1].repeat(n, 1)} for i, n in enumerate(counts.tolist())]
        return found, pad_sequence([f["boxes"] for f in found], padding_value=0.0).sum(0)

    check_same(Returning(detect), rows(7, 3), torch.tensor([1, 0, 3, 2, 0, 1, 4]))

    def flat(y, counts):
        return y.repeat_interleave(counts, 0), np.arange(len(y)) * 0.0

    module, x = Returning(flat), rows(7, 3)
    counts = torch.tensor([1, 0, 3, 2, 0, 1, 4])
    (boxes, numbers), (expected, others) = (
        DataParallel(module, replicas=3)(x, counts),
        module(x, counts),
    )
    torch.testing.assert_close(boxes, expected)
    assert numbers.tolist() == others.tolist()


@beyond("K06")
def test_hidden_states_with_rows_in_the_middle_and_attention_maps_are_joined_by_shape():
    class Stacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(3, 2, num_layers=2, batch_first=True).double()

        def forward(self, x):
            output, (h, c) = self.rnn(x)
            return output, (h, c), output @ output.transpose(1, 2)

    check_same(Stacked(), rows(7, 5, 3, grad=True))


@beyond("K06")
def test_the_input_itself_a_parameter_and_a_constant_come_back_as_one():
    class Passing(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(rows(3))
            self.register_buffer("table", torch.arange(3.0))

        def forward(self, x, lookup):
            return x, self.w, self.table, lookup, {"w": self.w * x}

    module = Passing()
    _, output = check_same(module, rows(7, 3, grad=True), torch.arange(5))
    assert output[1] is module.w


@beyond("K06")
def test_a_module_in_the_output_is_the_source_modules_own():
    class Handing(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 2).double()
            self.config = {"layers": [1, 2]}

        def forward(self, x):
            return x, self.head, {"me": self, "config": self.config}

    module = Handing()
    _, head, more = DataParallel(module, replicas=3)(rows(7, 3))
    assert head is module.head
    assert more["me"] is module
    assert more["config"] == module.config
