"""Show the steps of KIP-98 live, per transactional.id, as requests are forwarded. Tracing never changes a byte.

decode.py   reads requests and responses into steps
model.py    defines steps, and groups them into transactions
job.py      the job in the pipeline
text.py     one line per step
    printer.py  prints the lines without delaying traffic
page.py     one HTML page with a sequence diagram per transaction
"""

from __future__ import annotations

from eos.shim.trace.job import TraceJob
from eos.shim.trace.model import History, Step

__all__ = ["History", "Step", "TraceJob"]
