"""A training goes on from its file as if never stopped, and no crash leaves it without one."""

import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections import Counter, OrderedDict

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samestep
from samestep import checkpoint, comm, handover, load, save, sealed, split_loader
from samestep.errors import RankError
from samestep.plain import to_plain
from samestep.randomness import (
    find_moved,
    read_accelerators,
    read_state,
    write_accelerators,
    write_state,
)
from samestep.sealed import DamagedError, find_candidates, read_sealed, write_sealed


def same(left, right):
    """Bit for bit, in containers too."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


class Net(nn.Module):
    """Draws, keeps running statistics and returns a loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        )

    def forward(self, rows):
        return self.layers(rows).square().mean()


class Training:
    """Everything a script has, and a step that draws from every generator."""

    def __init__(self, **options):
        torch.manual_seed(5)
        random.seed(5)
        numpy.random.seed(5)
        self.model = samestep.DataParallel(Net(), **{"replicas": 2, **options})
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        rows = TensorDataset(torch.randn(14, 4))
        self.loader = split_loader(DataLoader(rows, batch_size=5, shuffle=True), self.model)
        self.num_steps, self.losses = 0, []

    @property
    def parts(self):
        return {
            name: vars(self)[name]
            for name in ("model", "optimizer", "scheduler", "scaler", "loader")
        }

    def run(self, until):
        while self.num_steps < until:
            for (rows,) in self.loader:
                self.step(rows + random.random() + float(numpy.random.rand()))
                if self.num_steps == until:
                    return

    def step(self, rows):
        self.optimizer.zero_grad()
        loss = self.model(rows)  # of the whole batch, also if these are a rank's own rows
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.num_steps += 1
        self.losses.append(loss.item())


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_training_goes_on_as_if_it_had_never_stopped(tmp_path, stop, background):
    whole = Training()
    start = read_state()
    whole.run(8)
    after = read_state()

    first = Training()
    write_state(start)
    first.run(stop)
    pending = save(
        tmp_path / "last.pt", **first.parts, step=stop, best=[0.5], background=background
    )
    first.run(8)  # what comes after a save is not in it
    if background:
        pending.wait()

    second = Training()
    torch.rand(7), random.random(), numpy.random.rand()
    found = load(tmp_path / "last.pt", **second.parts)
    assert found == {"step": stop, "best": [0.5]}
    second.num_steps = found["step"]
    second.run(8)
    assert second.losses == whole.losses[stop:]
    assert same(second.model.state_dict(), whole.model.state_dict())
    assert same(second.optimizer.state_dict(), whole.optimizer.state_dict())
    assert second.scheduler.state_dict() == whole.scheduler.state_dict()
    assert not find_moved(after, read_state())


def test_one_script_starts_and_resumes(tmp_path):
    path = tmp_path / "last.pt"
    assert load(path, missing_ok=True) is None
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*last\.pt"):
        load(path)
    save(path, step=3)
    assert load(path, missing_ok=True) == {"step": 3}


def test_torch_reads_the_file_without_us(tmp_path):
    model = samestep.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), replicas=2)
    save(tmp_path / "last.pt", model=model, note="text", table={"a": torch.ones(2)})
    found = torch.load(tmp_path / "last.pt", weights_only=True)
    assert found["samestep"] == 1
    assert found["values"] == {"step": None, "note": "text", "table": {"a": found_table(found)}}
    state = found["objects"]["model"]
    assert list(state) == list(model.module.state_dict())
    assert state._metadata["1"] == {"version": 2}  # what tells old BatchNorms from new ones
    nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).load_state_dict(state)


def found_table(found):
    return found["values"]["table"]["a"]


def test_any_object_with_a_state_and_any_plain_value_goes_along(tmp_path):
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    values = {
        "history": [1.5, float("nan")],
        "names": ("a", b"b", None, 2j),
        "shape": torch.Size([2, 3]),
        "kind": torch.float16,
        "seen": {1, 2},
        "counts": Counter("aab"),
        "by number": {3: torch.arange(3)},
    }
    save(tmp_path / "last.pt", teacher=first, **values)
    found = load(tmp_path / "last.pt", teacher=second)
    assert same(second.state_dict(), first.state_dict())
    assert numpy.isnan(found.pop("history")[1])
    values.pop("history")
    assert same(found, {"step": None, **values})


# --------------------------------------------------------------------------------------------------
# What is refused
# --------------------------------------------------------------------------------------------------


class Thing:
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Thing(), r"^extra is of class test_checkpoint.Thing, which"),
        ({"a": [1, Thing()]}, r"^extra\['a'\]\[1\] is of class test_checkpoint.Thing"),
        ({Thing: 1}, r"^the key .* of extra is of class type"),
        (numpy.ones(1), r"^extra is of class numpy.ndarray"),
        (numpy.datetime64("2026-01-01"), r"^extra is of class numpy.datetime64"),
        (nn.Linear(2, 2, device="meta").state_dict(), r"^extra\['weight'\] is on the meta device"),
        (lambda: 0, "^extra is of class function"),
        ([nn.Linear(1, 1)], r"^extra\[0\] is of class torch.nn.modules.linear.Linear"),
    ],
)
def test_what_could_not_be_read_back_is_refused_before_anything_is_written(tmp_path, value, text):
    path = tmp_path / "last.pt"
    for background in (False, True):
        with pytest.raises(TypeError, match=text):
            save(path, extra=value, background=background)
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_could_not_be_read_back_is_refused_by_its_place(tmp_path):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=numpy.ones(()))
    with pytest.raises(
        TypeError, match=r"optimizer\['param_groups'\]\[0\]\['lr'\] is of class numpy"
    ):
        save(tmp_path / "last.pt", optimizer=optimizer)


@pytest.mark.parametrize("background", [False, True])
def test_numbers_of_numpy_come_back_as_pythons(tmp_path, background):
    values = [numpy.int64(3), numpy.float64(0.1), numpy.float32(0.5), numpy.bool_(True)]
    values += [numpy.complex64(2j), numpy.str_("a"), {numpy.int32(4): 5}]
    save(tmp_path / "last.pt", best=numpy.float64(0.1), values=values, background=background)
    found = load(tmp_path / "last.pt")
    assert (found["best"], found["values"]) == (0.1, [3, 0.1, 0.5, True, 2j, "a", {4: 5}])
    kinds = [float, int, float, float, bool, complex, str]
    assert [type(v) for v in [found["best"], *found["values"][:-1]]] == kinds
    assert type(next(iter(found["values"][-1]))) is int


@pytest.mark.parametrize("background", [False, True])
def test_a_small_part_of_a_large_tensor_makes_a_small_file(tmp_path, background):
    table = torch.randn(1000, 1000)
    row, column = table[3], table.T[5][:10]
    save(tmp_path / "last.pt", row=row, column=column, background=background)
    found = load(tmp_path / "last.pt")
    assert torch.equal(found["row"], row)
    assert torch.equal(found["column"], column)
    assert (tmp_path / "last.pt").stat().st_size < 20_000


def test_tied_parts_of_a_large_tensor_stay_tied(tmp_path):
    flat = torch.randn(100)
    save(tmp_path / "last.pt", pair=[flat[:10], flat[:10]], whole=flat)
    one, other = load(tmp_path / "last.pt")["pair"]
    assert one.data_ptr() == other.data_ptr()


def test_a_value_that_holds_itself_is_refused(tmp_path):
    value = []
    value.append(value)
    with pytest.raises(ValueError, match="nested deeper than 100"):
        save(tmp_path / "last.pt", extra=value)


@pytest.mark.parametrize(
    ("function", "text", "arguments"),
    [
        (save, r"samestep\.split_loader\(loader\)", {"loader": DataLoader([1, 2])}),
        (save, r"model \(a int\) has no state_dict", {"model": 3}),
        (load, r"samestep\.split_loader\(loader\)", {"loader": DataLoader([1, 2])}),
        (load, "read values from what load returns", {"epoch": 3}),
        (load, "has no load_state_dict", {"model": nn.Linear}),
    ],
)
def test_what_has_no_state_is_refused_with_the_remedy(tmp_path, function, text, arguments):
    with pytest.raises(TypeError, match=text):
        function(tmp_path / "last.pt", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_an_object_that_was_not_saved_is_named(tmp_path):
    save(tmp_path / "last.pt", model=nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"no state of teacher \(it has: model\)"):
        load(tmp_path / "last.pt", teacher=nn.Linear(1, 1))


def test_a_later_format_is_refused(tmp_path):
    write_sealed({"samestep": 2}, tmp_path / "last.pt")
    with pytest.raises(ValueError, match="has format 2, this samestep reads 1"):
        load(tmp_path / "last.pt")


# --------------------------------------------------------------------------------------------------
# All or nothing
# --------------------------------------------------------------------------------------------------


class Refuses:
    def __init__(self, error=KeyError):
        self.error = error

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        torch.rand(1)
        error, self.error = self.error, KeyError  # nobody presses Ctrl-C at each call
        raise error("not today")


@pytest.mark.parametrize("last", ["refuses", "Ctrl-C", "wrong shape", "wrong name"])
def test_when_one_object_refuses_all_are_as_they_were(tmp_path, last):
    first = Training()
    first.run(3)
    bad = {
        "refuses": Refuses(),
        "Ctrl-C": Refuses(KeyboardInterrupt),
        "wrong shape": nn.Linear(2, 2),
        "wrong name": nn.Sequential(nn.Linear(1, 1)),
    }[last]
    saved = bad if isinstance(bad, Refuses) else nn.Linear(1, 1)
    save(tmp_path / "last.pt", **first.parts, last=saved)
    second = Training()
    second.run(2)
    states = {name: part.state_dict() for name, part in {**second.parts, "last": bad}.items()}
    before, now = checkpoint._keep(states), read_state()
    with pytest.raises(
        (KeyError, KeyboardInterrupt, RuntimeError), match=r"not today|Linear|Sequential"
    ):
        load(tmp_path / "last.pt", **second.parts, last=bad)
    for name, part in {**second.parts, "last": bad}.items():
        assert same(part.state_dict(), before[name])
    assert not find_moved(now, read_state())


def test_what_cannot_be_put_back_is_told(tmp_path):
    save(tmp_path / "last.pt", last=Refuses())
    with pytest.raises(KeyError) as caught:
        load(tmp_path / "last.pt", last=Refuses())
    assert caught.value.__notes__ == ["Refuses could not be put back: 'not today'"]


# --------------------------------------------------------------------------------------------------
# Damage
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """Two saves: steps 1 and 2."""
    path = tmp_path / "last.pt"
    save(path, step=1, table=torch.arange(50))
    save(path, step=2, table=torch.arange(50))
    return path


def flip(path, place, bit=0):
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ (1 << bit)]))


def test_the_file_before_is_kept(files):
    assert load(files) == {"step": 2, "table": pytest.approx(torch.arange(50))}
    assert load(files.with_name("last.pt.previous"))["step"] == 1
    assert len(list(files.parent.iterdir())) == 2


def test_a_bit_that_flipped_anywhere_is_noticed(tmp_path):
    path = tmp_path / "last.pt"
    write_sealed({"table": torch.arange(50), "text": "x"}, path)
    size = path.stat().st_size
    for place in range(size):
        bit = place % 8
        flip(path, place, bit)
        with pytest.raises(DamagedError):
            read_sealed(path)
        flip(path, place, bit)
    assert len(read_sealed(path)) == size


def test_a_file_cut_short_anywhere_is_noticed(tmp_path):
    path = tmp_path / "last.pt"
    write_sealed({"table": torch.arange(50)}, path)
    for size in reversed(range(path.stat().st_size)):
        os.truncate(path, size)
        with pytest.raises(DamagedError):
            read_sealed(path)


def test_a_damaged_file_is_replaced_by_the_one_before_with_a_warning(files):
    flip(files, 400)
    with pytest.warns(UserWarning, match=r"using .*last\.pt\.previous in place of .*its bytes are"):
        assert load(files)["step"] == 1
    os.truncate(files, 1000)
    with pytest.warns(UserWarning, match=r"cut short \(1000 bytes\)"):
        assert load(files)["step"] == 1
    files.unlink()
    with pytest.warns(UserWarning, match="it is not there, which a crash can leave"):
        assert load(files)["step"] == 1


def test_when_every_file_is_damaged_the_error_says_how(files):
    flip(files, 400)
    os.truncate(files.with_name("last.pt.previous"), 10)
    with pytest.raises(
        RuntimeError, match=r"no whole checkpoint.*its bytes.*cut short \(10 bytes\)"
    ):
        load(files, missing_ok=True)


def test_a_file_of_another_kind_is_not_taken_for_one(tmp_path):
    torch.save({}, tmp_path / "other.pt")
    with pytest.raises(RuntimeError, match=r"was not written by samestep\.save"):
        load(tmp_path / "other.pt")


@pytest.mark.parametrize("fault", ["bit", "cut", "empty", "foreign"])
def test_a_damaged_file_does_not_take_the_place_of_the_whole_one_before(files, fault):
    sealed._whole.clear()  # as another process comes to the files
    if fault == "bit":
        flip(files, 400)
    elif fault == "foreign":
        torch.save({}, files)
    else:
        os.truncate(files, 1000 if fault == "cut" else 0)
    save(files, step=3)
    assert load(files)["step"] == 3
    assert load(files.with_name("last.pt.previous"))["step"] == 1
    save(files, step=4)
    assert load(files.with_name("last.pt.previous"))["step"] == 3


def test_damage_since_this_process_wrote_the_file_is_seen(files):
    before = files.stat().st_mtime_ns
    flip(files, 400)
    os.utime(files, ns=(before, before + 1))
    save(files, step=3)
    assert load(files.with_name("last.pt.previous"))["step"] == 1


@pytest.mark.parametrize("how", ["written", "loaded"])
def test_a_file_known_to_be_whole_is_not_read_again(files, monkeypatch, how):
    if how == "loaded":
        sealed._whole.clear()
        load(files)
    monkeypatch.setattr(sealed, "_has_seal", lambda file: pytest.fail("it was read"))
    save(files, step=3)
    assert load(files.with_name("last.pt.previous"))["step"] == 2


def test_a_whole_file_of_another_process_is_kept(files):
    sealed._whole.clear()
    save(files, step=3)
    assert load(files.with_name("last.pt.previous"))["step"] == 2


def test_a_file_that_nothing_came_before_is_kept_whatever_it_is(tmp_path):
    torch.save({"mine": 1}, tmp_path / "last.pt")
    save(tmp_path / "last.pt", step=1)
    assert torch.load(tmp_path / "last.pt.previous") == {"mine": 1}


@pytest.mark.parametrize("background", [False, True])
def test_a_folder_is_no_file_and_stays_where_it_is(tmp_path, background):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes").write_text("mine")
    (tmp_path / "link").symlink_to(folder)
    for path in (folder, tmp_path / "link"):
        with pytest.raises(IsADirectoryError, match=r"a checkpoint is a file: .*run/last\.pt"):
            save_and_wait(path, background)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["link", "notes", "run"]


@pytest.mark.parametrize("background", [False, True])
def test_a_missing_folder_is_named_with_the_remedy(tmp_path, background):
    with pytest.raises(FileNotFoundError, match=r"no folder .*runs to write last\.pt.*makedirs"):
        save_and_wait(tmp_path / "runs" / "last.pt", background)


def save_and_wait(path, background):
    pending = save(path, step=1, background=background)
    if background:
        pending.wait()


def test_a_link_is_written_through_and_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    target, link = tmp_path / "disk" / "real.pt", tmp_path / "last.pt"
    link.symlink_to(target)
    for step in (1, 2):
        save(link, step=step)
    assert link.is_symlink()
    assert load(link)["step"] == load(target)["step"] == 2
    assert sorted(p.name for p in target.parent.iterdir()) == ["real.pt", "real.pt.previous"]
    flip(target, 400)
    with pytest.warns(UserWarning, match=r"using .*real\.pt\.previous in place of .*last\.pt"):
        assert load(link)["step"] == 1


class Crash(BaseException):
    pass


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("place", range(10))
def test_a_crash_between_any_two_actions_on_files_loses_nothing(files, monkeypatch, place, damaged):
    """The process stops dead before its n-th action: nothing happens later, no cleaning up."""
    if damaged:
        flip(files, 400)
    sealed._whole.clear()  # the old file is read, to see whether it may be kept
    count, num_actions = [0], 8 if damaged else 9

    def stopping(action):
        def act(*args, **kwargs):
            count[0] += 1
            if count[0] > place:
                raise Crash
            return action(*args, **kwargs)

        return act

    for name in ("fsync", "replace", "open"):
        monkeypatch.setattr(sealed.os, name, stopping(getattr(os, name)))
    for name in ("open", "unlink"):
        cls = type(files)
        monkeypatch.setattr(cls, name, stopping(getattr(cls, name)))
    monkeypatch.setattr(sealed._Sealing, "close", stopping(sealed._Sealing.close))
    try:
        write_sealed(
            {"samestep": 1, "objects": {}, "values": {"step": 3}, "random": NO_STATE}, files
        )
        assert count[0] == num_actions <= place  # all that there are: there was no crash
    except Crash:
        assert place < num_actions
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = load(files)["step"]
    assert step in ((1, 3) if damaged else (2, 3))
    save(files, step=4)
    assert load(files)["step"] == 4
    assert not find_candidates(files)[1].exists()


NO_STATE = {"accelerators": {}}


def full_disk(*args):
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_old_file_and_no_litter(files, monkeypatch):
    monkeypatch.setattr(sealed.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(files, step=3)
    monkeypatch.undo()
    assert load(files)["step"] == 2
    assert len(list(files.parent.iterdir())) == 2


def test_a_file_that_a_crash_left_beside_is_safe_from_the_next_failure(tmp_path, monkeypatch):
    """The first save died before its renaming: what it wrote is all there is."""
    path = tmp_path / "last.pt"

    def crash(*args):
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(sealed.os, "replace", crash)
        with pytest.raises(Crash):
            save(path, step=1)
    with monkeypatch.context() as patch:
        patch.setattr(sealed.os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space left"):
            save(path, step=2)
    assert load(path) == {"step": 1}
    save(path, step=3)
    assert load(path) == {"step": 3}


def run_python(code, *arguments, **kwargs):
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **kwargs,
    )


@pytest.mark.slow
@pytest.mark.spmd
@pytest.mark.parametrize("background", [False, True])
def test_killed_at_any_moment_there_is_a_checkpoint_of_the_last_two(tmp_path, background):
    path = tmp_path / "last.pt"
    code = """
        import sys, torch, samestep
        path, background, step = sys.argv[1], sys.argv[2] == "True", int(sys.argv[3])
        table = torch.zeros(200_000)
        while True:
            step += 1
            samestep.save(path, step=step, table=table.fill_(step), background=background)
            print(step, flush=True)
    """
    step, chance = 0, random.Random(7)
    for _ in range(6):
        process = run_python(code, path, background, step)
        for _ in range(3):
            process.stdout.readline()
        time.sleep(chance.random() * 0.05)  # not for an order: the moment is to be any
        process.send_signal(signal.SIGKILL)
        told, _ = process.communicate()
        last = int(told.split()[-1]) if told.split() else step + 3
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # killed between two renamings
            found = load(path)
        step = found["step"]
        # What was told is on the disk; in the background it may still be the one before. The one
        # after it may have been finished but not told.
        assert last - background <= step <= last + 1
        assert torch.equal(found["table"], torch.full((200_000,), float(step)))


# --------------------------------------------------------------------------------------------------
# In the background
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch):
    """Writing waits until the gate is opened."""
    opened, write = threading.Event(), checkpoint.write_sealed

    def wait_and_write(content, path):
        assert opened.wait(20)
        write(content, path)

    monkeypatch.setattr(checkpoint, "write_sealed", wait_and_write)
    yield opened
    opened.set()


def test_what_is_saved_is_what_was_when_save_returned(tmp_path, gate):
    model, rows = nn.Linear(3, 1), torch.zeros(2)
    optimizer = torch.optim.Adam(model.parameters())
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    history = [1]
    pending = save(
        tmp_path / "last.pt", model=model, optimizer=optimizer, rows=rows, history=history,
        background=True,
    )  # fmt: skip
    assert not pending.done()
    nn.init.zeros_(model.weight)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    rows += 1
    history.append(2)
    gate.set()
    pending.wait()
    assert pending.done()
    other = nn.Linear(3, 1)
    found = load(tmp_path / "last.pt", model=other)
    assert same(dict(other.state_dict()), expected)
    assert same(found["rows"], torch.zeros(2))
    assert found["history"] == [1]


def test_a_second_save_and_a_load_wait_for_the_first(tmp_path, gate):
    path = tmp_path / "last.pt"
    save(path, step=1, background=True)
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    save(path, step=2, background=True)  # would be overtaken by the first, if it did not wait
    assert load(path) == {"step": 2}
    opener.join()


@pytest.mark.parametrize("how", ["wait", "save", "load"])
def test_an_error_in_the_background_is_raised_once_where_the_script_comes_next(tmp_path, how):
    path = tmp_path / "no folder" / "last.pt"
    pending = save(path, step=1, background=True)
    good = tmp_path / "good.pt"
    then = {"wait": pending.wait, "save": lambda: save(good), "load": lambda: load(good)}[how]
    with pytest.raises(FileNotFoundError, match="no folder"):
        then()
    pending.wait()
    save(good, step=2)
    assert load(good) == {"step": 2}


def test_whatever_ends_the_writing_is_raised(tmp_path, monkeypatch):
    class Ended(BaseException):
        pass

    def end(*args):
        raise Ended

    monkeypatch.setattr(checkpoint, "write_sealed", end)
    with pytest.raises(Ended):
        save(tmp_path / "last.pt", step=1)


@pytest.mark.slow
@pytest.mark.spmd
def test_a_script_that_ends_waits_for_its_checkpoint_and_prints_what_went_wrong(tmp_path):
    code = """
        import sys, time, samestep
        from samestep import checkpoint
        write = checkpoint.write_sealed
        def slowly(*args):
            time.sleep(0.5)  # longer than the script takes to end
            write(*args)
        checkpoint.write_sealed = slowly
        samestep.save(sys.argv[1], step=1, background=True)
    """
    process = run_python(code, tmp_path / "last.pt")
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    assert load(tmp_path / "last.pt") == {"step": 1}
    _, errors = run_python(code, tmp_path / "no folder" / "last.pt").communicate(timeout=120)
    assert "FileNotFoundError" in errors


def test_a_snapshot_shares_nothing_but_what_was_shared():
    weight = torch.zeros(3)
    state = OrderedDict(a=weight, b=weight.detach(), c=weight[:2], d=nn.Parameter(weight))
    plain = to_plain(state, "model", copy=True)
    weight += 1
    assert all(value.sum() == 0 for value in plain.values())
    assert plain["a"] is plain["b"]
    assert to_plain(state, "model")["a"].data_ptr() == weight.data_ptr()


# --------------------------------------------------------------------------------------------------
# Ranks
# --------------------------------------------------------------------------------------------------


class Line:
    """Ranks as threads: everyone's values meet at a barrier."""

    def __init__(self, num_ranks, monkeypatch, timeout=60.0):
        self.values, self.kinds = [None] * num_ranks, []
        self.barrier = threading.Barrier(num_ranks, timeout=20)
        self.own = threading.local()
        self.timeout, self.num_ranks = timeout, num_ranks
        monkeypatch.setattr(checkpoint, "find_comm", lambda group: self.own.comm)
        # In real ranks these are one per process.
        monkeypatch.setattr(checkpoint, "_lock", NoLock())

    def run(self, function):
        """Run function(rank) on every rank and return what each returned or raised."""
        results = [None] * self.num_ranks

        def work(rank):
            self.own.comm = End(self, rank)
            try:
                results[rank] = function(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(r,)) for r in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class NoLock:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


class End:
    def __init__(self, line, rank):
        self.line, self.rank = line, rank
        self.num_ranks, self.timeout = line.num_ranks, line.timeout

    def exchange(self, kind, value):
        self.line.values[self.rank] = (kind, value)
        self.line.kinds.append(kind)
        self.line.barrier.wait()
        told = list(self.line.values)
        self.line.barrier.wait()
        assert {said for said, _ in told} == {kind}
        if not isinstance(value, comm.Failure):
            comm._check_failures([comm.Message(*said, 0, False) for said in told])
        return [value for _, value in told]

    def gather(self, kind, value, tensors):
        told = self.exchange(kind, (value, [tensor.clone() for tensor in tensors]))
        return [value for value, _ in told], [tensors for _, tensors in told]


def test_rank_0_writes_and_every_rank_gets_the_same(tmp_path, monkeypatch):
    line = Line(3, monkeypatch)
    monkeypatch.setattr(handover, "PIECE", 1000)  # several pieces
    models = [nn.Linear(3, 2) for _ in range(3)]
    path = tmp_path / "last.pt"
    line.run(lambda rank: save(path if rank == 0 else "/nowhere/x", model=models[rank], step=rank))
    targets = [nn.Linear(3, 2) for _ in range(3)]
    # Only rank 0 sees the file.
    found = line.run(lambda rank: load(path if rank == 0 else "/nowhere/x", model=targets[rank]))
    assert found == [{"step": 0}] * 3
    assert all(same(target.state_dict(), models[0].state_dict()) for target in targets)
    missing = line.run(lambda rank: load(tmp_path / "none.pt", missing_ok=True))
    assert missing == [None] * 3
    missing = line.run(lambda rank: load(tmp_path / "none.pt"))
    assert all(isinstance(error, FileNotFoundError) for error in missing)


@pytest.mark.parametrize("background", [False, True])
def test_every_rank_learns_that_rank_0_could_not_write(tmp_path, monkeypatch, background):
    line = Line(2, monkeypatch)

    def work(rank):
        monkeypatch.setattr(checkpoint, "_pending", None)
        pending = save(tmp_path / "no folder" / "x.pt", step=1, background=background)
        pending.wait()

    found = line.run(work)
    assert isinstance(found[0], FileNotFoundError)
    assert isinstance(found[1], RankError)
    assert "rank 0 failed at 'save': FileNotFoundError" in str(found[1])


def test_when_one_rank_refuses_all_ranks_put_back(tmp_path, monkeypatch):
    line = Line(2, monkeypatch)
    save_alone(tmp_path / "last.pt", monkeypatch, line)
    targets = [nn.Linear(3, 2), nn.Linear(4, 4)]
    before = [target.weight.clone() for target in targets]
    found = line.run(lambda rank: load(tmp_path / "last.pt", model=targets[rank]))
    assert "rank 1 failed at 'load': RuntimeError" in str(found[0])
    assert "size mismatch" in str(found[1])
    assert all(map(torch.equal, before, (target.weight for target in targets)))


def save_alone(path, monkeypatch, line):
    model = nn.Linear(3, 2)
    line.run(lambda rank: save(path, model=model))


def test_ranks_hear_of_rank_0_while_it_writes_for_longer_than_they_would_wait(
    tmp_path, monkeypatch
):
    line = Line(2, monkeypatch, timeout=0.04)
    write, met = checkpoint.write_sealed, threading.Event()

    def slow(content, path):
        assert met.wait(20)
        write(content, path)

    exchange = End.exchange

    def counting(self, kind, value):
        if line.kinds.count("file") > 6:
            met.set()
        return exchange(self, kind, value)

    monkeypatch.setattr(checkpoint, "write_sealed", slow)
    monkeypatch.setattr(End, "exchange", counting)
    assert line.run(lambda rank: save(tmp_path / "last.pt", step=1)) == [None, None]
    assert line.kinds.count("file") > 6


def run_ranks(code, *arguments):
    """Run code on two ranks and return what each printed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    processes = [
        run_python(code, *arguments, env={**shared, "RANK": str(rank)}) for rank in range(2)
    ]
    told = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    return [text for text, _ in told]


@pytest.mark.slow
@pytest.mark.spmd
def test_real_ranks_save_once_and_resume_alike(tmp_path):
    code = """
        import os, sys, torch, samestep
        from torch.utils.data import DataLoader, TensorDataset
        rank, path = int(os.environ["RANK"]), sys.argv[1]
        folder = path if rank == 0 else "/nowhere/x.pt"
        def make():
            torch.manual_seed(3)
            rows = TensorDataset(torch.arange(11.0))
            return samestep.split_loader(DataLoader(rows, 4, shuffle=True), replicas=3)
        expected = [rows.tolist() for (rows,) in make()]
        model, loader = torch.nn.Linear(2, 2), make()
        next(iter(loader))
        pending = samestep.save(folder, model=model, loader=loader, step=1, background=True)
        pending.wait()
        torch.rand(rank + 1)
        loader, model = make(), torch.nn.Linear(2, 2)
        torch.nn.init.zeros_(model.weight)
        assert samestep.load(folder, model=model, loader=loader) == {"step": 1}
        assert [rows.tolist() for (rows,) in loader] == expected[1:]
        print(expected, model.weight.tolist(), torch.rand(1).item())
    """
    told = run_ranks(code, tmp_path / "last.pt")
    rows, rest = zip(*(text.split("]] ", 1) for text in told), strict=True)
    assert rest[0] == rest[1]  # the model and the next random number
    assert rows[0] != rows[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.pt"]


@pytest.mark.slow
@pytest.mark.spmd
def test_a_training_of_two_ranks_goes_on_with_one(tmp_path):
    """The losses that one rank would have had all along, to the bit."""
    whole = Training()
    whole.run(8)
    code = """
        import sys
        sys.path.insert(0, sys.argv[2])
        import samestep
        from test_checkpoint import Training
        training = Training(batch="local")
        training.run(5)
        samestep.save(sys.argv[1], **training.parts, step=5)
        print(training.losses)
    """
    told = run_ranks(code, tmp_path / "last.pt", os.path.dirname(__file__))
    assert told[0] == told[1] == f"{whole.losses[:5]}\n"
    alone = Training()
    alone.num_steps = load(tmp_path / "last.pt", **alone.parts)["step"]
    alone.run(8)
    assert alone.losses == whole.losses[5:]
    assert same(alone.model.state_dict(), whole.model.state_dict())


# --------------------------------------------------------------------------------------------------
# Accelerators, which this machine need not have
# --------------------------------------------------------------------------------------------------


class Devices:
    """Stands for torch.cuda: a state per device."""

    def __init__(self, *states):
        self.states = list(states)

    def device_count(self):
        return len(self.states)

    def get_rng_state_all(self):
        return list(self.states)

    def set_rng_state(self, state, device):
        self.states[device] = state


def use_devices(patch, devices, current=0):
    patch.setattr(torch.accelerator, "current_accelerator", lambda check_available: CUDA)
    patch.setattr(torch.accelerator, "current_device_index", lambda: current)
    patch.setattr(torch, "get_device_module", lambda device: devices)


CUDA = torch.device("cuda")


@pytest.mark.parametrize("there", [["x"], ["x", "x"], ["x", "x", "x"]])
def test_the_accelerators_that_are_there_get_their_states(monkeypatch, there):
    use_devices(monkeypatch, Devices("a", "b"))
    state = read_accelerators()
    devices = Devices(*there)
    use_devices(monkeypatch, devices)
    write_accelerators(state)
    assert devices.states == ["a", "b", "x"][: len(there)]


def test_each_ranks_own_accelerator_gets_the_state_of_rank_0s(monkeypatch):
    use_devices(monkeypatch, Devices("a", "b", "c"), current=1)
    state = read_accelerators()
    devices = Devices("x", "x", "x")
    use_devices(monkeypatch, devices, current=2)
    write_accelerators(state, only_current=True)
    assert devices.states == ["x", "x", "b"]


def test_a_state_of_another_kind_of_accelerator_is_left(monkeypatch):
    devices = Devices("x")
    use_devices(monkeypatch, devices)
    write_accelerators({})
    write_accelerators({"kind": "xpu", "states": ["a"], "current": 0})
    assert devices.states == ["x"]
