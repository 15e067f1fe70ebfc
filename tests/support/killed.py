"""Run an `eos` program that kills itself at a step of its transactions.

`-c KILLED STEP before|behind N ARGUMENT...` kills it before the N-th call, or after (`behind`) the first call from the
N-th on that returns. STEP is a method of its producer or of its state storage, or of the class Connection of a module:
`MODULE:METHOD`.
"""

from __future__ import annotations

KILLED = """
import importlib, os, signal, sys
from eos import cli
from eos.session.producer.producer import TransactionalProducer
from eos.state.keeper import Keeper
step, when, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
owner = Keeper if hasattr(Keeper, step) else TransactionalProducer
if ":" in step:
    module, step = step.split(":")
    owner = importlib.import_module(module).Connection
call, calls = getattr(owner, step), []
def killing(self, *arguments, **more):
    calls.append(1)
    if len(calls) == number and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = call(self, *arguments, **more)
    if len(calls) >= number:  # an earlier call may have raised
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(owner, step, killing)
sys.exit(cli.invoke(sys.argv[4:]))
"""
