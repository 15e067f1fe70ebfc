"""Run an `eos` program that sends SIGKILL at a step of its transactions, to itself or to the process VICTIM.

`-c KILLED STEP before|during|behind N ARGUMENT...` kills before the N-th call, during it, or after (`behind`) the first
call from the N-th on that returns. STEP is a method of its producer or of its state storage, or of the class Connection
of a module: `MODULE:METHOD`. VICTIM is a variable of the environment. The program waits until the parent of that
process has reaped it, and goes on.
"""

from __future__ import annotations

KILLED = """
import importlib, os, random, signal, sys, threading, time
from eos import cli
from eos.session.producer.producer import TransactionalProducer
from eos.state.keeper import Keeper
step, when, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
victim = int(os.environ.get("VICTIM", os.getpid()))
owner = Keeper if hasattr(Keeper, step) else TransactionalProducer
if ":" in step:
    module, step = step.split(":")
    owner = importlib.import_module(module).Connection
call, calls, kills = getattr(owner, step), [], []
def kill():
    kills.append(1)
    os.kill(victim, signal.SIGKILL)
    try:
        while True:
            os.kill(victim, 0)
            time.sleep(0.01)
    except ProcessLookupError:
        pass
def killing(self, *arguments, **more):
    calls.append(1)
    if len(calls) == number and when == "before":
        kill()
    if len(calls) == number and when == "during":
        threading.Timer(random.uniform(0, 0.003), kill).start()
    result = call(self, *arguments, **more)
    if len(calls) >= number and when == "behind" and not kills:  # an earlier call may have raised
        kill()
    return result
setattr(owner, step, killing)
sys.exit(cli.invoke(sys.argv[4:]))
"""
