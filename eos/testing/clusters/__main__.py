"""`python -m eos.testing.clusters` prints which brokers tests get on this machine, and why."""

from eos.testing.clusters import choose

print(f"eos: {choose().reason}")
