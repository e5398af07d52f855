"""K21. An error in forward is the user's own error."""

import traceback

import pytest
from compare import rows
from reports import beyond, report
from torch import nn

from samestep import DataParallel, current_shard


class MyError(Exception):
    def __init__(self, code, detail):
        super().__init__(code, detail)
        self.code = code


class Failing(nn.Module):
    def __init__(self, in_shard=(1,)):
        super().__init__()
        self.in_shard = in_shard

    def forward(self, x):
        wanted = current_shard().index
        if wanted in self.in_shard:
            secret = x * wanted  # noqa: F841  looked at from outside
            raise MyError(wanted, "bad rows")  # the line that must be in the traceback
        return x


@report("P130", "pytorch/pytorch#18055")
def test_the_users_own_exception_comes_back_with_its_line_and_a_note():
    with pytest.raises(MyError) as caught:
        DataParallel(Failing(), replicas=3)(rows(7, 3))
    error = caught.value
    assert (type(error), error.code, error.args) == (MyError, 1, (1, "bad rows"))
    assert error.__notes__ == ["in shard 1 of 3 (rows 3-5 of 7, cpu)"]
    last = traceback.extract_tb(error.__traceback__)[-1]
    assert "the line that must be in the traceback" in last.line
    # A debugger can go there: the frame and its variables are alive.
    frame = error.__traceback__
    while frame.tb_next is not None:
        frame = frame.tb_next
    assert frame.tb_frame.f_locals["secret"].shape == (3, 3)


@beyond("K21")
def test_several_failures_are_one_error_with_a_note_for_each_of_the_others():
    with pytest.raises(MyError) as caught:
        DataParallel(Failing((1, 2)), replicas=3)(rows(7, 3))
    assert caught.value.code == 1
    notes = caught.value.__notes__
    assert notes[0] == "in shard 1 of 3 (rows 3-5 of 7, cpu)"
    assert "MyError in shard 2 of 3 (rows 6-6 of 7, cpu)" in notes[1]


@beyond("K21")
def test_a_wrong_number_of_arguments_and_a_wrong_shape_read_like_a_plain_call():
    module = nn.Linear(3, 2).double()
    model = DataParallel(module, replicas=3)
    for args, kwargs in (((rows(7, 3), 1), {}), ((), {"no_such": rows(7, 3)}), ((rows(7, 4),), {})):
        with pytest.raises(Exception) as plain:  # noqa: PT011  compared with the wrapped one
            module(*args, **kwargs)
        with pytest.raises(type(plain.value)) as wrapped:
            model(*args, **kwargs)
        message = str(wrapped.value).replace("(1x4", "(7x4").replace("(3x4", "(7x4")
        assert message == str(plain.value)


@beyond("K21")
def test_serial_mode_runs_forward_in_the_callers_thread(monkeypatch):
    import threading

    monkeypatch.setenv("SAMESTEP_SERIAL", "1")
    threads = []

    class Looking(nn.Module):
        def forward(self, x):
            threads.append(threading.current_thread())
            return x

    DataParallel(Looking(), replicas=3)(rows(7, 3))
    assert set(threads) == {threading.main_thread()}
