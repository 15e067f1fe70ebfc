"""Inject the faults of a plan into requests, as a bad network or a failing broker would.

plan.py       the rules: which request, when, which fault; from Python or TOML: pure
facts.py      the facts of a request that rules match: pure
job.py        counts requests, decides, and holds frames until an event
injection.py  one fault of one request, and copies of its bytes on a separate connection
reset.py, blackhole.py, delay.py, error.py, duplicate.py, throttle.py    one fault each
"""

from eos.shim.faults.job import FaultJob
from eos.shim.faults.plan import Event, Phase, Plan, Rule, read_plan

__all__ = ["Event", "FaultJob", "Phase", "Plan", "Rule", "read_plan"]
