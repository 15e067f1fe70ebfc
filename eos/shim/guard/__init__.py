"""Guard: what clients may not do behind this shim, as a policy of a file. Denies nothing that the policy does not name.

policy.py   the rules and their TOML form: pure
job.py      who a connection logged in as (SASL PLAIN, SCRAM); refuses with Kafka's own errors, and says so in the log
"""

from eos.shim.guard.job import GuardJob
from eos.shim.guard.policy import Policy, read_policy

__all__ = ["GuardJob", "Policy", "read_policy"]
