"""Shows transactions as they pass: KIP-98's steps, live, per transactional.id. It never changes a byte.

decode.py   from request and response bytes to what a step says
model.py    steps, and the transactions they make up
job.py      the job in the pipeline
text.py     one line per step
    printer.py  prints them without holding up the traffic
page.py     one HTML page with a sequence diagram per transaction
"""

from __future__ import annotations

from eos.shim.trace.job import TraceJob
from eos.shim.trace.model import History, Step

__all__ = ["History", "Step", "TraceJob"]
