"""Ctrl-C at a chosen moment."""

import contextlib
import os
import signal
import threading


@contextlib.contextmanager
def interrupting(interrupt, after_s):
    """Call ``interrupt`` in a while; if the test then hangs, end it after some seconds."""
    late = []
    timer = threading.Timer(after_s, interrupt)
    rescue = [threading.Timer(5 + n, os.kill, (os.getpid(), signal.SIGINT)) for n in range(2)]
    rescue.append(threading.Timer(4.9, late.append, (True,)))
    for each in (timer, *rescue):
        each.start()
    try:
        yield
    finally:
        for each in (timer, *rescue):
            each.cancel()
            each.join()
        assert not late, "the caller went on waiting after Ctrl-C"
