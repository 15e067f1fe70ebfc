"""Reject the requests that a policy file forbids, and allow all others.

policy.py   the rules and their TOML form: pure
job.py      learns each connection's login (SASL PLAIN, SCRAM), and rejects and logs requests with Kafka's errors
"""

from eos.shim.guard.job import GuardJob
from eos.shim.guard.policy import Policy, read_policy

__all__ = ["GuardJob", "Policy", "read_policy"]
