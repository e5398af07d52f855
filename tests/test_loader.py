"""Each rank gets its own rows of the plain loader's batches; an epoch can be left and resumed."""

import copy
import dataclasses
import itertools
import random
import types

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import samestep
from samestep import loader as loader_module
from samestep import split_loader
from samestep.errors import SplitError
from samestep.loader import rank_rows
from samestep.plan import plan_sizes
from samestep.randomness import find_moved, read_state, write_state


def split_for(rank, num_ranks, loader, *args, **kwargs):
    """What one rank of several gets from split_loader."""
    with pytest.MonkeyPatch.context() as patch:
        comm = types.SimpleNamespace(rank=rank, num_ranks=num_ranks)
        patch.setattr(loader_module, "find_comm", lambda group: comm)
        return split_loader(loader, *args, **kwargs)


class Rows(Dataset):
    """Row i is a dict about i; remembers which rows were fetched."""

    def __init__(self, size):
        self.size, self.fetched = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.fetched.append(index)
        return {"x": torch.full((3,), float(index)), "name": f"row {index}", "y": index}


class Stream(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class Jittered(Dataset):
    """Rows that draw while they are fetched."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        draws = torch.rand(()), random.random(), numpy.random.rand()
        return torch.tensor([float(index), *draws, len(INITIALISED)])


INITIALISED = []  # in a worker process: the numbers that its worker_init_fn was called with


class ShuffledByWorkers(IterableDataset):
    """A stream whose order is drawn in the worker process."""

    def __iter__(self):
        return iter(torch.randperm(20).tolist())


class Lengths(Sampler):
    """A batch sampler of the user's: batches of 1, 2, 3, ... from Python's own random numbers."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        order = list(range(self.size))
        random.shuffle(order)
        for length in itertools.count(1):
            if not order:
                return
            yield [order.pop() for _ in range(min(length, len(order)))]


class Moody(Sampler):
    """Draws from the process's generator at every batch, as the epoch goes."""

    def __iter__(self):
        for _ in range(6):
            yield torch.randint(20, (4,)).tolist()


# --------------------------------------------------------------------------------------------------
# Rows of ranks
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["chunk", "balanced", "weights"])
@pytest.mark.parametrize("num_slots", [1, 3, 4, 8])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_ranks_share_all_rows_in_order_and_cut_only_between_shards(split, num_slots, num_ranks):
    if split == "weights":
        split = [1.0 + slot % 3 for slot in range(num_slots)]
    for num_rows in range(12):
        ranges = [
            rank_rows(num_rows, num_slots, split, rank, num_ranks) for rank in range(num_ranks)
        ]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == num_rows
        assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
        sizes = plan_sizes(num_rows, num_slots, split)
        borders = {0, *itertools.accumulate(sizes)}
        assert {edge for pair in ranges for edge in pair} <= borders


def test_a_slot_belongs_to_the_rank_that_its_place_among_the_slots_says():
    assert [rank_rows(8, 4, "chunk", rank, 2) for rank in range(2)] == [(0, 4), (4, 8)]
    assert [rank_rows(6, 2, "chunk", rank, 4) for rank in range(4)] == [
        (0, 3),
        (3, 3),
        (3, 6),
        (6, 6),
    ]


def join(parts):
    """The batch that the ranks' parts are of."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts)
    if isinstance(first, dict):
        return {key: join([part[key] for part in parts]) for key in first}
    return type(first)(itertools.chain.from_iterable(parts))


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return left == right


LOADERS = {
    "in order": lambda: DataLoader(Rows(11), batch_size=4),
    "shuffled": lambda: DataLoader(Rows(11), batch_size=4, shuffle=True),
    "drop last": lambda: DataLoader(Rows(11), batch_size=4, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(
        Rows(11), 4, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "weights": lambda: DataLoader(
        Rows(9), 4, sampler=WeightedRandomSampler([1.0, 2.0, 3.0] * 3, 10)
    ),
    "batch sampler": lambda: DataLoader(Rows(11), batch_sampler=Lengths(11)),
    "draws at each batch": lambda: DataLoader(Rows(20), batch_sampler=Moody()),
    "whole batches by index": lambda: DataLoader(
        Rows(6),
        batch_size=None,
        sampler=RandomSampler(range(6)),
        collate_fn=lambda row: {"x": row["x"]},
    ),
    "stream": lambda: DataLoader(Stream(11), batch_size=4),
    "list": lambda: [torch.arange(4), torch.arange(3), torch.arange(1)],
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_the_ranks_rows_are_the_plain_loaders_batch(name, num_ranks):
    """Two epochs: the second shuffle depends on what the first left of the generators."""
    start = read_state()
    plain = LOADERS[name]()
    expected = [batch for _ in range(2) for batch in plain]
    after = read_state()
    found = []
    for rank in range(num_ranks):
        write_state(start)
        split = split_for(rank, num_ranks, LOADERS[name](), replicas=4)
        found.append([batch for _ in range(2) for batch in split])
        assert not find_moved(after, read_state())
    assert len(found[0]) == len(expected)
    for batch, *parts in zip(expected, *found, strict=True):
        assert same(join(parts), batch)


def test_a_rank_fetches_its_own_rows_only():
    dataset = Rows(12)
    split = split_for(1, 3, DataLoader(dataset, batch_size=6))
    assert [batch["y"].tolist() for batch in split] == [[2, 3], [8, 9]]
    assert dataset.fetched == [2, 3, 8, 9]


def test_a_rank_without_rows_gets_the_structure_with_no_rows():
    dataset = Rows(5)
    split = split_for(2, 3, DataLoader(dataset, batch_size=4))
    full, empty = split
    assert full["y"].tolist() == []  # 4 rows over 3 slots are 2 and 2
    assert empty["x"].shape == (0, 3)
    assert empty["y"].dtype == torch.int64
    assert empty["name"] == []


class Items(Dataset):
    """Row i is what a function makes of i."""

    def __init__(self, make, size=5):
        self.make, self.size = make, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.make(index)


def image(index, channels=3):
    return torch.full((channels, 4, 4 + index % 2), float(index))


EMPTY = {
    "texts by default": (lambda i: f"row {i}", None, None, []),
    "texts": (lambda i: f"row {i}", list, None, []),
    "a tuple of texts": (lambda i: f"row {i}", tuple, None, ()),
    "0-dim tensors": (lambda i: torch.tensor(float(i)), list, None, []),
    "images": (image, list, None, []),
    "grey images": (lambda i: image(i, 1), list, None, []),
    "dicts": (lambda i: {"x": torch.ones(1)}, list, None, []),
    "images and boxes": (
        lambda i: (image(i), {"boxes": torch.ones(1, 4)}),
        lambda rows: tuple(zip(*rows, strict=True)),
        None,
        ((), ()),
    ),
    "columns": (
        lambda i: (torch.ones(3), (i, f"row {i}")),
        None,
        None,
        [torch.ones(0, 3), [torch.zeros(0, dtype=torch.int64), ()]],
    ),
    "a column in a list": (
        lambda i: (torch.ones(3), [torch.ones(2)]),
        None,
        None,
        [torch.ones(0, 3), [torch.ones(0, 2)]],
    ),
    "one column": (lambda i: (torch.ones(1),), None, None, [torch.ones(0, 1)]),
    "a table that is whole": (
        lambda i: i,
        lambda rows: (torch.tensor(rows), torch.ones(1, 2)),
        {"table": None},
        (torch.zeros(0, dtype=torch.int64), torch.ones(1, 2)),
    ),
    "rows on another dim": (
        lambda i: i,
        lambda rows: {"x": torch.ones(1, len(rows)), "table": [1]},
        {"x": 1, "table": None},
        {"x": torch.ones(1, 0), "table": [1]},
    ),
    "a list whose items the model takes for rows": (
        lambda i: torch.ones(1, 2),
        list,
        {"x": "rows"},
        [],
    ),
}


class TwoArguments(torch.nn.Module):
    def forward(self, x, table=None):
        return x


@pytest.mark.parametrize("name", EMPTY)
def test_a_rank_without_rows_gets_lists_without_items(name):
    make, collate, in_dims, expected = EMPTY[name]
    loader = DataLoader(Items(make), batch_size=4, collate_fn=collate)
    model = make_model(3, TwoArguments(), replicas=3, in_dims=in_dims)
    _, found = split_for(2, 3, loader, model)
    assert type(found) is type(expected)
    assert equal_trees(found, expected)


def equal_trees(found, expected):
    if isinstance(expected, torch.Tensor):
        return found.shape == expected.shape and found.dtype == expected.dtype
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            equal_trees(found[key], expected[key]) for key in expected
        )
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(equal_trees, found, expected))
    return found == expected


def cut_whole(batch, in_dims=None, num_ranks=2, module=None):
    """What each rank gets of a batch that all of them read."""
    parts = []
    for rank in range(num_ranks):
        model = make_model(num_ranks, module or TwoArguments(), replicas=num_ranks, in_dims=in_dims)
        (part,) = split_for(rank, num_ranks, [batch], model)
        parts.append(part)
    return parts


def test_whole_batches_of_texts_are_cut_by_items():
    assert cut_whole(["a", "b", "c"]) == [["a", "b"], ["c"]]
    assert cut_whole(("a", "b", "c")) == [("a", "b"), ("c",)]
    assert cut_whole((["a", "b", "c"], [1, 2, 3])) == [(["a", "b"], [1, 2]), (["c"], [3])]
    assert cut_whole({"x": ["a", "b"], "n": 7}) == [{"x": ["a"], "n": 7}, {"x": ["b"], "n": 7}]


def test_whole_batches_of_images_are_cut_as_the_model_says():
    images = [image(0) for _ in range(5)]
    targets = [{"boxes": torch.ones(3, 4)} for _ in images]
    first, second = cut_whole(images, {"x": "rows"})
    assert [*first, *second] == images
    assert len(first) == 3
    both = {"x": "rows", "table": "rows"}
    for batch in ((images, targets), [images, targets], (tuple(images), tuple(targets))):
        (ours, their), (rest, others) = cut_whole(batch, both)
        assert [*ours, *rest] == images
        assert [*their, *others] == targets
    first, second = cut_whole({"x": images, "table": targets}, both)
    assert first["x"] + second["x"] == images


@pytest.mark.parametrize("in_dims", [{"x": None}, {0: None}, [None]])
def test_a_mask_before_the_rows_stays_whole_if_the_model_says_so(in_dims):
    mask, rows = torch.eye(3), torch.arange(8)
    for batch in ((mask, rows), [mask, rows]):
        parts = cut_whole(batch, in_dims)
        assert all(torch.equal(part[0], mask) for part in parts)
        assert [part[1].tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_in_dims_says_of_arguments_that_no_batch_has_is_left_out():
    class Three(torch.nn.Module):
        def forward(self, x, y=None, z=None, **others):
            return x

    said = {"z": 1, "extra": None, 1: 1}
    assert [len(part) for part in cut_whole(torch.ones(4), said, module=Three())] == [2, 2]


@pytest.mark.parametrize(
    "batch",
    [
        [torch.ones(3, 8, 8) for _ in range(5)],
        [torch.ones(3, 8, 8), torch.zeros(3, 9, 7)],
        ([torch.ones(3, 8, 8)] * 5,),
        (tuple(torch.ones(3, 8, 8) for _ in range(5)), ({"label": 1},) * 5),
        [{"x": torch.ones(3)}, {"x": torch.ones(3)}],
        {"x": [torch.ones(3, 8, 8)] * 2},
    ],
)
def test_a_list_of_rows_or_columns_is_refused_with_the_remedy(batch):
    with pytest.raises(SplitError, match=r"may hold . rows, or columns of 3 rows each.*'rows'\}"):
        cut_whole(batch)


def test_columns_that_agree_are_cut_where_they_are_known_to_be_columns():
    x = torch.arange(8.0).view(4, 2)
    assert [len(part[0]) for part in cut_whole((x, x))] == [2, 2]
    assert [len(part[0]) for part in cut_whole([x, x], in_dims=0)] == [2, 2]
    assert [len(part[0]) for part in cut_whole([x, torch.arange(4)])] == [2, 2]
    assert [len(part["y"]) for part in cut_whole({"x": [x, x], "y": x})] == [2, 2]

    class Pairs(IterableDataset):
        def __iter__(self):
            return iter((row, row) for row in x)

    split = split_for(0, 2, DataLoader(Pairs(), batch_size=4))
    assert [column.tolist() for column in next(iter(split))] == [x[:2].tolist()] * 2


def test_whole_batches_without_rows_are_refused():
    for batch in (1.0, {"a": torch.tensor(1.0)}, (["a"], ["b", "c"])):
        with pytest.raises(SplitError, match=r"nothing that counts rows.*in_dims="):
            cut_whole(batch)


def test_generators_are_drawn_from_when_the_plain_loader_draws():
    def run(loader):
        draws = []
        iterator = iter(loader)
        draws.append(torch.rand(1))  # between iter() and the first batch
        for _ in iterator:
            draws.append(torch.rand(1))
        return torch.cat(draws)

    start = read_state()
    expected = run(DataLoader(Rows(10), batch_size=3, shuffle=True))
    for rank in range(2):
        write_state(start)
        loader = DataLoader(Rows(10), batch_size=3, shuffle=True)
        assert torch.equal(run(split_for(rank, 2, loader)), expected)


def test_one_rank_gets_the_loaders_own_batches():
    batches = [{"x": torch.ones(3)}, {"x": torch.ones(2)}]
    assert all(found is batch for found, batch in zip(split_loader(batches), batches, strict=True))


def make_model(num_ranks, module=None, **options):
    """A wrapper as one rank of several has it."""
    model = samestep.DataParallel(module or torch.nn.Linear(3, 1), **options)
    model._samestep_options = dataclasses.replace(
        model._samestep_options, num_ranks=num_ranks, batch=options.get("batch", "local")
    )
    return model


def test_the_model_says_how_batches_are_cut():
    model = make_model(2, replicas=4, split=[4, 1, 1, 2])
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=8)
    parts = [next(iter(split_for(rank, 2, loader, model)))[0] for rank in range(2)]
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3, 4], [5, 6, 7]]


def test_a_model_that_takes_whole_batches_gets_them_on_every_rank():
    model = make_model(2, replicas=2, batch="global")
    for rank in range(2):
        split = split_for(rank, 2, DataLoader(Rows(5), batch_size=4), model)
        assert [batch["y"].tolist() for batch in split] == [[0, 1, 2, 3], [4]]


def test_a_model_of_other_ranks_is_refused():
    with pytest.raises(ValueError, match="the number of ranks is 3, but the model has 2"):
        split_for(0, 3, [], make_model(2, replicas=4))


def test_batches_that_are_read_whole_are_cut_along_the_models_dim():
    model = make_model(2, torch.nn.Identity(), replicas=2, dim=1)
    split = split_for(1, 2, [torch.arange(12).view(2, 6)], model)
    assert next(iter(split)).tolist() == [[3, 4, 5], [9, 10, 11]]


def test_a_loader_of_a_subclass_with_other_arguments_stays_what_it_is():
    class Ours(DataLoader):
        def __init__(self, size):
            super().__init__(Rows(size), batch_size=4, collate_fn=self.gather)

        def gather(self, rows):
            return torch.stack([row["x"] for row in rows])

    split = split_for(0, 2, Ours(8))
    assert [batch.shape for batch in split] == [(2, 3), (2, 3)]


def test_what_the_loader_has_is_there():
    class Epochs(RandomSampler):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

    dataset = Rows(10)
    split = split_for(0, 2, DataLoader(dataset, batch_size=3, sampler=Epochs(dataset)))
    assert len(split) == 4
    assert split.batch_size == 3
    assert split.dataset is dataset
    split.sampler.set_epoch(7)
    assert split.loader.sampler.epoch == 7
    with pytest.raises(AttributeError, match="wheels"):
        _ = split.wheels
    assert len(copy.copy(split)) == 4


def test_loops_within_loops_do_not_disturb_each_other():
    split = split_for(1, 2, DataLoader(Rows(5), batch_size=2))
    pairs = [(a["y"].tolist(), b["y"].tolist()) for a in split for b in split]
    assert pairs == list(itertools.product([[1], [3], []], repeat=2))


def test_rows_that_draw_leave_the_ranks_shuffles_alike():
    """Ranks fetch different rows, which here draw; the next epoch is one epoch all the same."""
    start = read_state()
    epochs = []
    for rank in range(3):
        write_state(start)
        split = split_for(rank, 3, DataLoader(Jittered(), batch_size=5, shuffle=True))
        epochs.append([list(split) for _ in range(2)])
        after = read_state()
    drawn = []
    for epoch in range(2):
        batches = [torch.cat(parts) for parts in zip(*(e[epoch] for e in epochs), strict=True)]
        rows = torch.cat(batches)
        assert sorted(rows[:, 0].tolist()) == list(range(12))
        drawn.append(rows[:, 1:4])
    numbers = torch.cat(drawn).flatten().tolist()
    assert len(set(numbers)) == 2 * 12 * 3  # no two rows drew the same, nor one in both epochs
    write_state(start)
    plain = DataLoader(Rows(12), batch_size=5, shuffle=True)
    for _ in range(2):
        list(plain)
    assert not find_moved(after, read_state())


@pytest.mark.slow
def test_workers_fetch_in_order_and_draw_other_numbers_on_each_rank():
    start = read_state()
    plain = [rows["y"] for rows in DataLoader(Rows(12), batch_size=5, shuffle=True)]
    after = read_state()
    parts = []
    for rank in range(2):
        write_state(start)
        loader = DataLoader(
            Jittered(),
            batch_size=5,
            shuffle=True,
            num_workers=1,
            worker_init_fn=note_worker,
            persistent_workers=True,
        )
        split = split_for(rank, 2, loader)
        parts.append(list(split))
        assert not find_moved(after, read_state())
        assert len(list(split)) == 3
        del split, loader
    rows = [torch.cat(pair) for pair in zip(*parts, strict=True)]
    assert all(torch.equal(r[:, 0], p) for r, p in zip(rows, plain, strict=True))
    for column in range(1, 4):
        assert len(set(torch.cat(rows)[:, column].tolist())) == 12
    assert torch.cat(rows)[:, 4].tolist() == [1.0] * 12


@pytest.mark.slow
def test_workers_that_the_plain_loader_keeps_go_on_with_its_own_rows():
    loader = DataLoader(Rows(6), batch_size=4, num_workers=1, persistent_workers=True)
    before = [batch["y"].tolist() for batch in loader]
    assert [batch["y"].tolist() for batch in split_for(1, 2, loader)] == [[2, 3], [5]]
    assert [batch["y"].tolist() for batch in loader] == before


def note_worker(worker):
    assert get_worker_info().id == worker
    INITIALISED.append(worker)


# --------------------------------------------------------------------------------------------------
# The position
# --------------------------------------------------------------------------------------------------


def train(split, seen, *, stop=None):
    """Two epochs of a script that draws at every step; stop after so many batches in all."""
    while len(seen) < TOTAL[0]:
        for batch in split:
            seen.append((batch, torch.rand(2), random.random(), numpy.random.rand()))
            if len(seen) == stop:
                return


TOTAL = [0]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (1, 2)])
def test_a_loader_resumes_after_any_batch(name, rank, num_ranks, tmp_path):
    def make():
        return split_for(rank, num_ranks, LOADERS[name](), replicas=2)

    num_batches = sum(1 for _ in make())
    TOTAL[0] = 2 * num_batches
    start = read_state()
    expected = []
    train(make(), expected)
    after = read_state()
    for stop in range(1, TOTAL[0]):
        write_state(start)
        seen, split = [], make()
        train(split, seen, stop=stop)
        samestep.save(tmp_path / "last.pt", loader=split, step=stop)
        torch.rand(3), random.random(), numpy.random.rand()
        del split
        resumed = make()
        assert samestep.load(tmp_path / "last.pt", loader=resumed) == {"step": stop}
        train(resumed, seen)
        assert len(seen) == len(expected)
        for (batch, *draws), (wanted, *numbers) in zip(seen, expected, strict=True):
            assert same(batch, wanted)
            assert torch.equal(draws[0], numbers[0])
            assert draws[1:] == numbers[1:]
        assert not find_moved(after, read_state())


def test_rows_that_draw_on_a_rank_draw_the_same_after_resuming():
    def make():
        return split_for(1, 2, DataLoader(Jittered(), batch_size=3, shuffle=True))

    start, split = read_state(), make()
    expected = list(split)
    write_state(start)
    split = make()
    found = [next(iter(split))]
    state = split.state_dict()
    torch.rand(9)
    resumed = make()
    resumed.load_state_dict(state)
    found += resumed
    assert same(torch.cat(found), torch.cat(expected))


def test_after_an_epoch_comes_a_whole_one():
    split = split_loader(shuffled(3))
    list(split)
    state, now = split.state_dict(), read_state()
    assert state["batches"] == 0
    expected = [batch["y"].tolist() for batch in split]
    resumed = split_loader(shuffled(8))
    resumed.load_state_dict(state)
    write_state(now)
    assert [batch["y"].tolist() for batch in resumed] == expected


@pytest.mark.parametrize("name", ["shuffled", "draws at each batch"])
def test_a_resumed_epoch_of_which_nothing_was_asked_yet_keeps_its_place(name):
    split = split_loader(LOADERS[name]())
    torch.manual_seed(4)
    expected = [row["y"].tolist() for row in split]
    torch.manual_seed(4)
    iterator = iter(split)
    next(iterator), next(iterator)
    now = read_state()
    for seed in range(2):
        torch.manual_seed(seed)
        resumed = split_loader(LOADERS[name]())
        resumed.load_state_dict(split.state_dict())
        iterator, split = iter(resumed), resumed
    write_state(now)
    assert [row["y"].tolist() for row in iterator] == expected[2:]


def test_delivered_batches_are_not_fetched_again():
    split = split_loader(DataLoader(Rows(10), batch_size=2))
    iterator = iter(split)
    next(iterator), next(iterator), next(iterator)
    dataset = Rows(10)
    resumed = split_loader(DataLoader(dataset, batch_size=2))
    resumed.load_state_dict(split.state_dict())
    assert len(list(resumed)) == 2
    assert dataset.fetched == [6, 7, 8, 9]
    assert len(list(resumed)) == 5  # the next epoch is a whole one


def test_a_position_that_was_loaded_and_not_used_is_kept():
    split = split_loader(DataLoader(Rows(10), batch_size=2, shuffle=True))
    next(iter(split))
    state = split.state_dict()
    other = split_loader(DataLoader(Rows(10), batch_size=2, shuffle=True))
    other.load_state_dict(state)
    assert other.state_dict()["batches"] == 1
    expected = [batch["y"].tolist() for batch in other]
    third = split_loader(DataLoader(Rows(10), batch_size=2, shuffle=True))
    third.load_state_dict(state)
    assert [batch["y"].tolist() for batch in third] == expected


def test_a_resumed_epoch_can_be_left_and_resumed_again():
    expected = [row["y"].tolist() for row in split_loader(shuffled(3))]
    split, found = split_loader(shuffled(3)), []
    for _ in range(len(expected)):
        found.append(next(iter(split))["y"].tolist())
        state = split.state_dict()
        split = split_loader(shuffled(99))
        split.load_state_dict(state)
        torch.rand(1)
    assert found == expected
    assert list(split) == []


def shuffled(seed):
    torch.manual_seed(seed)
    return DataLoader(Rows(10), batch_size=3, shuffle=True)


def test_a_position_is_the_same_on_every_rank_and_loads_on_another_number_of_them():
    states = []
    for rank in range(2):
        split = split_for(rank, 2, shuffled(4))
        iterator = iter(split)
        next(iterator), next(iterator)
        states.append(split.state_dict())
    assert {k: v for k, v in states[0].items() if k in ("batches", "drawn", "seed")} == {
        k: v for k, v in states[1].items() if k in ("batches", "drawn", "seed")
    }
    expected = [batch["y"].tolist() for batch in shuffled(4)][2:]
    alone = split_loader(shuffled(77))
    alone.load_state_dict(states[1])
    assert [batch["y"].tolist() for batch in alone] == expected


@pytest.mark.slow
def test_a_loader_with_workers_resumes_although_it_drew_ahead():
    def make():
        return split_loader(DataLoader(Rows(20), batch_sampler=Moody(), num_workers=1))

    start = read_state()
    expected = [(batch["y"], torch.rand(1)) for batch in make()]
    after = read_state()
    write_state(start)
    split = make()
    iterator = iter(split)
    seen = [(next(iterator)["y"], torch.rand(1)) for _ in range(2)]
    state, now = split.state_dict(), read_state()
    del iterator, split
    torch.rand(5)
    resumed = make()
    resumed.load_state_dict(state)
    write_state(now)
    seen += [(batch["y"], torch.rand(1)) for batch in resumed]
    assert len(seen) == len(expected)
    for left, right in zip(seen, expected, strict=True):
        assert torch.equal(left[0], right[0])
        assert torch.equal(left[1], right[1])
    assert not find_moved(after, read_state())


@pytest.mark.slow
def test_another_number_of_workers_can_go_on():
    def make(num_workers):
        return split_loader(DataLoader(Rows(20), 3, shuffle=True, num_workers=num_workers))

    start = read_state()
    expected = [batch["y"].tolist() for batch in make(0)]
    for first, second in ((0, 1), (1, 0)):
        write_state(start)
        split = make(first)
        iterator = iter(split)
        found = [next(iterator)["y"].tolist() for _ in range(2)]
        state = split.state_dict()
        del iterator, split
        resumed = make(second)
        resumed.load_state_dict(state)
        assert found + [batch["y"].tolist() for batch in resumed] == expected


@pytest.mark.slow
def test_a_stream_that_workers_shuffle_resumes():
    def make():
        return split_loader(DataLoader(ShuffledByWorkers(), batch_size=5, num_workers=1))

    start = read_state()
    expected = [batch.tolist() for batch in make()]
    write_state(start)
    split = make()
    iterator = iter(split)
    found = [next(iterator).tolist()]
    state = split.state_dict()
    del iterator, split
    torch.rand(3)
    resumed = make()
    resumed.load_state_dict(state)
    assert found + [batch.tolist() for batch in resumed] == expected


def test_a_loader_that_keeps_its_own_position_is_asked_for_it():
    class Stateful:
        def __init__(self):
            self.at = 0

        def __iter__(self):
            while self.at < 4:
                self.at += 1
                yield torch.arange(self.at * 2)
            self.at = 0

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    split = split_for(1, 2, Stateful())
    iterator = iter(split)
    next(iterator)
    assert split.state_dict() == {"loader": {"at": 1}}
    resumed = split_for(1, 2, Stateful())
    resumed.load_state_dict(split.state_dict())
    assert [batch.tolist() for batch in resumed] == [[2, 3], [3, 4, 5], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="keeps its own"):
        resumed.load_state_dict({"batches": 1})


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_torchdatas_loader_keeps_its_own_position():
    data = pytest.importorskip("torchdata.stateful_dataloader")

    def make(rank):
        torch.manual_seed(3)
        loader = data.StatefulDataLoader(Rows(10), batch_size=3, shuffle=True)
        return split_for(rank, 2, loader)

    expected = [[batch["y"].tolist() for batch in make(rank)] for rank in range(2)]
    for rank in range(2):
        split = make(rank)
        iterator = iter(split)
        next(iterator)
        resumed = make(rank)
        resumed.load_state_dict(split.state_dict())
        assert [batch["y"].tolist() for batch in resumed] == expected[rank][1:]


# --------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------


class TheirSampler(Sampler):
    num_replicas, rank = 4, 1

    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Rows(8), sampler=DistributedSampler(Rows(8), 2, 0)),
        lambda: DataLoader(Rows(8), sampler=TheirSampler()),
        lambda: DataLoader(
            Rows(8), batch_sampler=BatchSampler(DistributedSampler(Rows(8), 1, 0), 2, False)
        ),
    ],
)
def test_a_sampler_that_is_cut_for_ranks_already_is_refused(make):
    with pytest.raises(ValueError, match=r"already gives each rank.*leave it out"):
        split_loader(make())


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (TypeError, "iterable of batches, got int", {"loader": 3}),
        (
            TypeError,
            "must be a samestep.DataParallel, got Linear",
            {"model": torch.nn.Linear(2, 2)},
        ),
        (ValueError, "replicas is 3, but the model has 2", {"replicas": 3, "model": None}),
        (ValueError, "split is 'balanced', but the model", {"split": "balanced", "model": None}),
        (ValueError, r"split is \(1, 2\), but the model", {"split": [1, 2], "model": None}),
        (ValueError, "split is 'even'", {"split": "even"}),
        (ValueError, "at least one slot", {"replicas": 0}),
        (ValueError, "in_order=False", {"loader": DataLoader(Rows(4), in_order=False)}),
        (TypeError, "from split_loader already", {"loader": split_loader([])}),
    ],
)
def test_what_cannot_be_is_refused_at_once(error, text, arguments):
    if "model" in arguments and arguments["model"] is None:
        arguments["model"] = samestep.DataParallel(torch.nn.Linear(2, 2), replicas=2)
    with pytest.raises(error, match=text):
        split_loader(**{"loader": [], **arguments})


def test_a_position_from_elsewhere_is_refused():
    with pytest.raises(ValueError, match="no position of split_loader"):
        split_loader([]).load_state_dict({"epoch": 3})
