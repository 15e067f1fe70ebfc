"""Signal handlers: a process forked while they are set does not inherit them."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Each sets handlers around the block in which `body` runs, as a worker's function does.
AROUND = {
    "worker": """
from eos.signals import StopSignals
session = SimpleNamespace(stop_requested=False)
session.stop = lambda: vars(session).update(stop_requested=True)
with StopSignals(session, 30.0):
    body()
assert not session.stop_requested
""",
    "worker that stops": """
from eos.signals import StopSignals
session = SimpleNamespace(stop_requested=False)
session.stop = lambda: vars(session).update(stop_requested=True)
with StopSignals(session, 30.0):
    os.kill(os.getpid(), signal.SIGTERM)
    body()
    assert signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL
assert session.stop_requested
""",
    "start": """
from eos.cli.run import _stop_before_start
with _stop_before_start() as begun:
    begun()
    body()
""",
    "supervisor": """
from eos.worker.supervisor import Supervisor
supervisor = Supervisor(["one"], lambda name: [], stop_s=1.0)
with supervisor.hearing_signals():
    body()
assert not supervisor._signals
""",
    "one in the other": """
from eos.cli.run import _stop_before_start
from eos.signals import StopSignals
session = SimpleNamespace(stop_requested=False)
session.stop = lambda: vars(session).update(stop_requested=True)
with _stop_before_start() as begun, StopSignals(session, 30.0):
    body()
assert not session.stop_requested
""",
}
PROGRAM = """
import multiprocessing, os, signal
from types import SimpleNamespace

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
BEFORE = [signal.getsignal(number) for number in NUMBERS]

def is_as_before(_):
    return [signal.getsignal(number) for number in NUMBERS] == BEFORE

def body():
    with multiprocessing.get_context("fork").Pool(2) as pool:  # terminates them with SIGTERM
        print(pool.map(is_as_before, range(2)), flush=True)
    for child in multiprocessing.active_children():
        child.join()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL

"""


@pytest.mark.parametrize("around", AROUND)
def test_forked_child_has_previous_handlers_and_ends_by_sigterm(around: str) -> None:
    code = PROGRAM + AROUND[around] + "\nassert is_as_before(0)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.stdout.strip(), done.returncode) == ("[True, True]", 0), done.stderr
    assert "Traceback" not in done.stderr
