"""What a supervisor and a monitoring system ask the shim: /livez, /readyz, /metrics.

job.py       counts errors and transactions in the answers that pass
metrics.py   all counts as Prometheus metrics (extra `metrics`)
http.py      the three paths
"""

from eos.shim.health.http import serve
from eos.shim.health.job import CountingJob
from eos.shim.health.metrics import Sources

__all__ = ["CountingJob", "Sources", "serve"]
