"""Serve /livez, /readyz and /metrics for supervisors and monitoring systems.

job.py       counts errors and transactions in responses
metrics.py   returns all counts as Prometheus metrics (extra `metrics`)
http.py      the three paths
"""

from eos.shim.health.http import serve
from eos.shim.health.job import CountingJob
from eos.shim.health.metrics import Sources

__all__ = ["CountingJob", "Sources", "serve"]
