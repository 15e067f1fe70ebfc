"""Prints which brokers tests get on this machine, and why: `python -m eos.testing.clusters`."""

from eos.testing.clusters import choose

print(f"eos: {choose().reason}")
