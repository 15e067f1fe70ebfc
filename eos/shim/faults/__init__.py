"""Faults: what a bad network or a failing broker does to named requests, as a plan that must come true.

plan.py       rules: which request, when, what happens to it; from Python or TOML: pure
said.py       what a request says of itself, for rules to match: pure
job.py        counts requests, decides, holds frames until an event
strike.py     one fault that happens to one request; its bytes on a connection of their own: late ones, duplicates
reset.py, blackhole.py, delay.py, error.py, duplicate.py, throttle.py    one fault each
"""

from eos.shim.faults.job import FaultJob
from eos.shim.faults.plan import Event, Phase, Plan, Rule, read_plan

__all__ = ["Event", "FaultJob", "Phase", "Plan", "Rule", "read_plan"]
