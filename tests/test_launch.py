"""``samestep run``: ranks, their output, the first failure, and that nothing is left behind."""

import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from samestep.cli import main
from samestep.endings import ECHO, Ending, choose_first, find_report, find_traceback, read_ending
from samestep.launch import Launch, run
from samestep.output import Tail


def spmd(test):
    """Starts processes, and so takes its time."""
    return pytest.mark.slow(pytest.mark.spmd(test))


LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
HUNG = "RuntimeError: Timed out waiting 1800000ms for recv operation to complete"
OURS = "samestep.errors.RankError: rank 1 is gone"
CAUSE = "Traceback (most recent call last):\nValueError: the cause"


class Script:
    """A script in a folder of its own, to be run by the command."""

    def __init__(self, folder, text):
        self.folder = folder
        self.path = folder / "script.py"
        self.path.write_text(text)
        self.started = []

    def start(self, *options, arguments=(), **more):
        words = [sys.executable, "-m", "samestep", "run", "--log-dir", self.folder / "logs"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        given = pipes | {"text": True, "cwd": self.folder} | more
        self.started.append(subprocess.Popen([*words, *options, self.path, *arguments], **given))
        return self.started[-1]

    def run(self, *options, arguments=(), typed="", **more):
        process = self.start(*options, arguments=arguments, **more)
        out, err = process.communicate(typed, timeout=100)
        return process.returncode, out, err

    def read(self, name):
        (path,) = self.folder.glob(f"logs/*/{name}")
        return path.read_text()

    def wait_for(self, pattern, count=1):
        """The files of that name, once there are so many."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = list(self.folder.glob(pattern))
            if len(found) == count:
                return found
            time.sleep(0.02)  # another process is awaited, there is no event to wait for
        raise AssertionError(f"{count} x {pattern} expected, there are {found}")

    def find_pids(self, count):
        """The processes that wrote their number into a file's name, once there are so many."""
        return [int(path.suffix[1:]) for path in self.wait_for("pid.*", count)]


@pytest.fixture
def script(tmp_path):
    made = []
    yield lambda text: made.append(Script(tmp_path, text)) or made[-1]
    for process in (process for one in made for process in one.started):
        process.kill()  # after a test that failed half-way; the ranks notice
        process.communicate()


def is_running(pid):
    """Whether a process is there and not merely waiting to be collected by its parent."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(is_running, pids)):
        time.sleep(0.02)
    return [pid for pid in pids if is_running(pid)]


def find_free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def last_line(text):
    return text.rstrip().splitlines()[-1]


# ---------------------------------------------------------------------------
# Which failure was first: plain data
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endings", "rank"),
    [
        ([Ending(0, 1, 5.0), Ending(1, 1, 4.9)], 1),
        ([Ending(0, 1, 4.0, report=LOST), Ending(1, 1, 5.0, report=CAUSE)], 1),
        ([Ending(0, 1, 4.0, report=OURS), Ending(1, 3, 5.0)], 1),
        ([Ending(0, 1, 4.0, report=LOST), Ending(1, -9, 5.0)], 1),
        ([Ending(0, 1, 4.0, report=HUNG), Ending(1, 2, 5.0)], 1),
        ([Ending(0, -15, 4.0, told=True), Ending(1, 1, 5.0, report=LOST)], 1),
        ([Ending(0, 1, 4.0, report=LOST), Ending(1, 1, 5.0, told=True, report=CAUSE)], 1),
        ([Ending(0, 1, 5.0), Ending(1, 1, 4.0, told=True, report=CAUSE)], 0),
        ([Ending(0, 1, 5.0, report=LOST), Ending(1, 1, 4.0, report=OURS)], 1),
        ([Ending(0, 0, 1.0), Ending(1, -15, 4.0, told=True)], 1),
    ],
)
def test_the_first_failure_is_the_earliest_that_is_no_consequence(endings, rank):
    assert choose_first(endings).rank == rank
    assert choose_first(reversed(endings)).rank == rank


def test_without_a_failure_nobody_is_to_blame():
    assert choose_first([Ending(0, 0, 1.0), Ending(1, 0, 2.0)]) is None


@pytest.mark.parametrize(("status", "shown"), [(3, 3), (-9, 137), (-15, 143)])
def test_a_signal_is_shown_as_a_shell_shows_it(status, shown):
    assert Ending(0, status, 1.0).exit_status == shown


@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
def test_a_traceback_is_shown_with_its_causes_and_without_what_was_handled_before(prefix):
    head = "Traceback (most recent call last):"
    handled = [head, '  File "a.py", line 1, in <module>', "OSError: tried again", "going on"]
    chain = [
        head,
        '  File "a.py", line 2, in <module>',
        "KeyError: 'a'",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        head,
        '  File "a.py", line 3, in <module>',
        "ValueError: b",
    ]
    text = "\n".join(prefix + line if line else line for line in [*handled, *chain])
    found = find_report(text + "\n", status=1)
    assert found == "\n".join(prefix + line if line else line for line in chain)


def test_a_group_of_exceptions_is_shown_whole():
    try:
        raise ExceptionGroup("two", [ValueError("a"), ExceptionGroup("more", [KeyError("b")])])
    except ExceptionGroup as error:
        text = "".join(traceback.format_exception(error))
    assert find_traceback("a warning\n" + text) == text.rstrip()


def test_a_handled_exception_is_not_the_reason_for_another_exit_status():
    text = "\n".join([CAUSE, *(f"line {number}" for number in range(30))])
    assert find_report(text, status=3).splitlines() == [
        f"line {number}" for number in range(10, 30)
    ]


def test_a_long_traceback_keeps_both_ends():
    lines = ["Traceback (most recent call last):", *map(str, range(1000)), "ValueError: b"]
    found = find_traceback("\n".join(lines)).splitlines()
    assert len(found) == 201
    assert found[0] == lines[0]
    assert found[-1] == lines[-1]


@pytest.mark.parametrize(("written", "status"), [(99.0, 1), (101.0, -15)])
def test_a_rank_told_to_stop_failed_by_itself_only_if_its_traceback_is_older(
    tmp_path, written, status
):
    record, log = tmp_path / "exit.json", tmp_path / "stderr.log"
    record.write_text(json.dumps({"status": -15, "time": 102.0, "told": 100.0}))
    log.write_text(CAUSE)
    os.utime(log, (written, written))
    ending = read_ending(1, record, log)
    assert (ending.status, ending.told) == (status, True)
    assert ending.report == (CAUSE if status == 1 else "")


@pytest.mark.parametrize("text", [None, "", "{", "{}", "[]", '{"status": "x", "time": 1}'])
def test_what_was_not_written_down_is_unknown(tmp_path, text):
    record = tmp_path / "exit.json"
    if text is not None:
        record.write_text(text)
    assert read_ending(0, record, tmp_path / "missing") is None


# ---------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "required: script.py"),
        ("missing.py", "no such script: missing.py"),
        ("--no-python missing-program", "no such program: missing-program"),
        ("--workers 0 SCRIPT", "--workers: '0' is not a whole number of at least 1"),
        ("--threads-per-worker two SCRIPT", "--threads-per-worker: 'two' is not a whole"),
        ("--max-restarts -1 SCRIPT", "'-1' is not a whole number of at least 0"),
        ("--nnodes 1:4 SCRIPT", "--nnodes: '1:4' is not a whole number"),
        ("--nnodes 2 SCRIPT", "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        ("--rdzv-id a SCRIPT", "--rdzv-id a needs --rdzv-endpoint"),
        ("--local-addr a SCRIPT", "--local-addr a needs --rdzv-endpoint"),
        ("--rdzv-backend c10d SCRIPT", "--rdzv-backend c10d needs --rdzv-endpoint"),
        ("--node-rank 1 SCRIPT", "--node-rank 1 needs --rdzv-endpoint"),
        ("--nnodes 2 --node-rank 2 --rdzv-endpoint h:1 SCRIPT", "--node-rank 2, --nnodes 2"),
        ("--nnodes 2 --node-rank 0 --rdzv-endpoint h SCRIPT", "needs a port (got h)"),
        (
            "--nnodes 2 --node-rank 0 --rdzv-endpoint h:1 --rdzv-backend c10d SCRIPT",
            "leave out --node-rank",
        ),
        (
            "--nnodes 2 --rdzv-endpoint h:1 --rdzv-backend static SCRIPT",
            "static needs --node-rank",
        ),
        ("--rdzv-backend etcd SCRIPT", "invalid choice: 'etcd'"),
        ("--grace 60 SCRIPT", "--grace must be from 0 to 25 seconds, got 60"),
        ("--grace nan SCRIPT", "--grace must be from 0 to 25 seconds, got nan"),
        ("--log-dir SCRIPT SCRIPT", "is there and is not a folder"),
        ("-m --no-python SCRIPT", "not allowed with argument"),
    ],
)
def test_wrong_words_end_with_a_message_and_status_2(script, words, message, capsys):
    path = str(script("").path)
    with pytest.raises(SystemExit) as stop:
        main(["run", *words.replace("SCRIPT", path).split()])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def make_launch(**options):
    return Launch((sys.executable, "a"), "program", **options)


def test_without_accelerators_there_are_as_many_ranks_as_the_cores_allow(monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("samestep.launch.count_cores", lambda: 9)
    assert make_launch(threads_per_worker=1).num_ranks == 9
    assert make_launch(threads_per_worker=2).num_ranks == 4
    assert make_launch(threads_per_worker=10).num_ranks == 1


def test_each_accelerator_has_a_rank(monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 3)
    assert make_launch().num_ranks == 3
    assert make_launch(workers=2).num_ranks == 2


@pytest.mark.parametrize(("given", "threads"), [("3", 3), ("", 1), ("4,2", 1)])
def test_threads_come_from_the_environment_unless_they_are_given(monkeypatch, given, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert make_launch().threads == threads
    assert make_launch(threads_per_worker=2).threads == 2


def test_what_the_user_has_set_stays():
    given = {"OMP_WAIT_POLICY": "active", "PYTHONFAULTHANDLER": ""}
    assert not make_launch().make_environment(given).keys() & given.keys()
    assert make_launch().make_environment({})["OMP_WAIT_POLICY"] == "passive"


# ---------------------------------------------------------------------------
# Ranks and their output
# ---------------------------------------------------------------------------


@spmd
def test_ranks_have_their_environment_and_a_file_each_and_rank_0_the_terminal(script):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"]
    asked = script(f"""if True:
        import os, sys
        print(*map(os.environ.get, {names}), sys.argv[1:], "SAMESTEP_EXIT_FILE" in os.environ)
        print(bool(os.environ["MASTER_ADDR"]), int(os.environ["MASTER_PORT"]) > 0)
        sys.stderr.write(f"1%\\r99% {{sys.stdin.readline()!r}}")
    """)
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    process = asked.start(
        *("--workers", "2", "--threads-per-worker", "2"),
        arguments=["--workers", "7"],
        env=environment,
        text=False,
    )
    lines = [f"{rank} {rank} 2 2 passive ['--workers', '7'] False\nTrue True\n" for rank in (0, 1)]
    assert process.stdout.readline() + process.stdout.readline() == lines[0].encode()
    asked.wait_for("logs/*/rank1.exit.json")  # it did not wait for the line that is rank 0's
    out, err = process.communicate(b"yes\n", timeout=60)
    assert (process.returncode, out) == (0, b"")
    first, rest = err.decode().split("\n", 1)
    assert re.fullmatch(rf"samestep run: 2 ranks on \S+, output in {asked.folder}/logs/\S+", first)
    assert rest == "1%\r99% 'yes\\n'"
    assert [asked.read(f"rank{rank}.stdout.log") for rank in (0, 1)] == lines
    assert asked.read("rank1.stderr.log") == "1%\n99% ''"  # read as text


@spmd
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-m"], ["json.tool", "--version"]),
        (["--no-python"], ["sh", "-c", "echo $RANK $0", "--version"]),
    ],
    ids=["module", "program"],
)
def test_a_module_and_a_program_run_as_in_torchrun(tmp_path, options, words):
    (tmp_path / "given.json").write_text("[1]")
    words = [word if word != "--version" or options != ["-m"] else "given.json" for word in words]
    command = [sys.executable, "-m", "samestep", "run", "--workers", "1", "--log-dir", "logs"]
    done = subprocess.run(
        [*command, *options, *words], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    expected = "[\n    1\n]\n" if options == ["-m"] else "0 --version\n"
    assert (done.returncode, done.stdout) == (0, expected)


@spmd
def test_two_launches_at_once_do_not_meet(script):
    asked = script("import os; print(os.environ['WORLD_SIZE'], os.environ['MASTER_PORT'])")
    processes = [asked.start("--workers", "1") for _ in range(2)]
    outs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [size for size, _ in outs] == ["1", "1"]
    assert outs[0] != outs[1]
    assert len(list(asked.folder.glob("logs/*/rank0.stdout.log"))) == 2


@spmd
def test_ranks_start_again_if_asked_and_the_last_try_counts(script):
    asked = script("""if True:
        import os
        assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1", "not yet"
        print("now")
    """)
    status, out, _ = asked.run("--workers", "1", "--max-restarts", "1")
    assert (status, out) == (0, "now\n")
    assert "not yet" in asked.read("rank0.stderr.log")
    assert asked.read("rank0.restart1.stdout.log") == "now\n"


class Agent:
    """In place of torch's agent: rank 0 writes, and the agent ends in some way at once."""

    def __init__(self, outcome):
        self.outcome = outcome

    def __call__(self, config, entrypoint):
        return lambda *arguments: self.run(config.logs_specs)

    def run(self, logs):
        env = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
        destination = logs.reify({0: env})
        Path(destination.stderrs[0]).write_bytes(b"rank 0 says \xff\r\n")
        if self.outcome is not None:
            raise self.outcome


@pytest.fixture
def agent(monkeypatch):
    """Replace torch's agent; a look at the files each minute, so that only the last one counts."""
    handler = signal.getsignal(signal.SIGINT)
    loggers = [logging.getLogger(f"torch.distributed.{name}") for name in ("elastic", "launcher")]
    before = [(logger.handlers[:], logger.propagate) for logger in loggers]
    monkeypatch.setattr("samestep.output.TAIL_INTERVAL", 60)
    yield lambda outcome: monkeypatch.setattr("samestep.launch.elastic_launch", Agent(outcome))
    signal.signal(signal.SIGINT, handler)
    for logger, (handlers, propagate) in zip(loggers, before, strict=True):
        for added in set(logger.handlers) - set(handlers):
            added.close()
        logger.handlers[:], logger.propagate = handlers, propagate


FAILED = ChildFailedError("a", {0: ProcessFailure(0, pid=1, exitcode=-6, error_file="")})


@pytest.mark.parametrize(
    ("outcome", "status", "words"),
    [
        (None, 0, ""),
        (FAILED, 134, "rank 0 of 1 on HOST failed first: killed by SIGABRT"),
        (SignalException("", signal.SIGTERM), 143, "stopped by SIGTERM"),
        (RuntimeError("no route"), 1, "did not meet or lost each other: RuntimeError: no route"),
    ],
)
def test_all_that_rank_0_wrote_comes_before_the_last_words(
    agent, tmp_path, capfdbinary, outcome, status, words
):
    agent(outcome)
    assert run(make_launch(log_dir=str(tmp_path))) == status
    captured = capfdbinary.readouterr()
    first, written, *last = captured.err.split(b"\n")
    assert b"output in" in first
    assert written == b"rank 0 says \xff\r"
    assert words.replace("HOST", socket.gethostname()) in last[0].decode()
    assert captured.out == b""


def test_the_rest_is_shown_when_nobody_reads_one_of_the_streams(tmp_path):
    class Closed:
        def write(self, data):
            raise BrokenPipeError

    left = io.BytesIO()
    tail = Tail({tmp_path / "a": Closed(), tmp_path / "b": left})
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    tail.start()
    tail.stop()
    assert left.getvalue() == b"b"


# ---------------------------------------------------------------------------
# Failures
# ---------------------------------------------------------------------------

# Rank 1 loses its connections at once, but is still there when rank 0 has died of that.
LINGER = """if True:
    import atexit, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    print(value.item())
    if dist.get_rank() == 1:
        atexit.register(time.sleep, 60)
        atexit.register(dist.destroy_process_group)
        raise ValueError("the cause")
    dist.all_reduce(value)
"""


@spmd
def test_the_traceback_of_the_cause_is_last_although_another_rank_died_before(script):
    asked = script(LINGER)
    status, out, err = asked.run("--workers", "2")
    assert (status, out) == (1, "2.0\n")
    assert ECHO.search(asked.read("rank0.stderr.log"))  # it did die of that
    *report, last = err.splitlines()
    assert report[-1] == "[rank1]: ValueError: the cause"
    assert sum("Traceback" in line for line in report) == 2
    (log,) = asked.folder.glob("logs/*/rank1.stderr.log")
    host = socket.gethostname()
    assert last == (
        f"samestep run: rank 1 of 2 on {host} failed first: exit status 1, its output: {log}"
    )


@spmd
@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("sys.exit(3)", 3, "exit status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
        ("ctypes.string_at(0)", 139, "killed by SIGSEGV"),
    ],
)
def test_the_exit_status_is_that_of_the_rank_that_failed_first(script, line, status, words):
    asked = script(f"""if True:
        import ctypes, os, signal, sys, time
        if os.environ["RANK"] == "1":
            sys.stderr.write("last words\\n")
            {line}
        time.sleep(60)
    """)
    found, out, err = asked.run("--workers", "2")
    assert found == status
    assert out == ""
    assert "rank 1 of 2" in last_line(err)
    assert f"failed first: {words}, " in last_line(err)
    assert "last words" in err
    assert ("Segmentation fault" in err) == (status == 139)


@spmd
def test_what_a_failed_rank_has_started_is_ended(script):
    asked = script("""if True:
        import os, subprocess, sys
        child = subprocess.Popen(["sleep", "1000"])
        open(f"pid.{child.pid}", "w").close()
        sys.exit(3)
    """)
    assert asked.run("--workers", "1")[0] == 3
    assert wait_until_gone(asked.find_pids(1), seconds=5) == []


# ---------------------------------------------------------------------------
# Being stopped
# ---------------------------------------------------------------------------

# Two ranks with a child each, that write down their numbers when they are ready.
STAY = """if True:
    import os, signal, subprocess, sys, time
    child = subprocess.Popen(["sleep", "1000"])
    for name in sys.argv[1:]:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    for pid in (os.getpid(), child.pid):
        open(f"pid.{pid}", "w").close()
    time.sleep(1000)
"""


@spmd
@pytest.mark.parametrize(
    ("signum", "status", "ignored"),
    [
        (signal.SIGINT, 130, []),
        (signal.SIGINT, 130, ["SIGINT", "SIGTERM"]),
        (signal.SIGTERM, 143, []),
    ],
)
def test_a_stopped_launcher_leaves_no_process(script, signum, status, ignored):
    asked = script(STAY)
    process = asked.start("--workers", "2", "--grace", "0.5", arguments=ignored)
    pids = asked.find_pids(4)
    start = time.monotonic()
    process.send_signal(signum)
    _, err = process.communicate(timeout=30)
    assert process.returncode == status
    # Torch would wait for half a minute; a rank that ignores signals is killed after its grace.
    assert time.monotonic() - start < 25
    assert wait_until_gone(pids, seconds=5) == []
    assert last_line(err) == f"samestep run: stopped by {signum.name}"


@spmd
def test_a_killed_launcher_leaves_no_process(script):
    asked = script(STAY)
    process = asked.start("--workers", "2", "--grace", "0.5", arguments=["SIGTERM"])
    pids = asked.find_pids(4)
    process.kill()
    process.communicate(timeout=30)
    # Half a second until it is noticed, half a second of grace, and a margin for a busy machine.
    assert wait_until_gone(pids, seconds=10) == []


# ---------------------------------------------------------------------------
# Several machines
# ---------------------------------------------------------------------------


@spmd
def test_machines_meet_and_form_one_group(script):
    asked = script("""if True:
        import os
        names = "RANK LOCAL_RANK WORLD_SIZE GROUP_RANK"
        open("saw." + "-".join(map(os.environ.get, names.split())), "w").close()
    """)
    meet = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{find_free_port()}")
    processes = [asked.start(*meet, "--workers", "2", "--node-rank", str(k)) for k in (1, 0)]
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0]
    saw = sorted(path.suffix[1:] for path in asked.folder.glob("saw.*"))
    assert saw == ["0-0-4-0", "1-1-4-0", "2-0-4-1", "3-1-4-1"]


@spmd
def test_a_failure_on_another_machine_is_told_as_such(script):
    asked = script(LINGER.replace("60", "0"))
    meet = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{find_free_port()}")
    processes = [
        asked.start(*meet, "--workers", "1", "--local-addr", "localhost") for _ in range(2)
    ]
    errs = [process.communicate(timeout=90)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    lost, cause = sorted(errs, key=lambda err: "the cause" in err)
    assert "failed first: exit status 1" in last_line(cause)
    assert "rank 1 of 2" in last_line(cause)
    assert "lost" in last_line(lost)
    assert "failed first:" not in last_line(lost)


@spmd
def test_machines_that_cannot_meet_are_an_error_without_a_traceback(script):
    asked = script("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        meet = ("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", endpoint)
        status, out, err = asked.run(*meet, "--workers", "1")
    assert (status, out) == (1, "")
    assert "Traceback" not in err
    assert "did not meet" in err
    assert "Traceback" in asked.read("agent.log")


@spmd
def test_a_launcher_that_waits_for_other_machines_can_be_stopped(script):
    asked = script("")
    meet = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{find_free_port()}")
    process = asked.start(*meet, "--workers", "1")
    assert "output in" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert err == ""
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT)  # the same to a shell
