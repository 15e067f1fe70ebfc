"""Reports the health of a worker and its numbers: probes, metrics and a page (`eos run --http-port`).

status.py      the status of a worker at one moment, and the rule for live and ready (no I/O)
observer.py    makes a worker's status, the one source of the live line, the metrics and the page
incidents.py   the last log events that an operator should see
report.py      sends a supervised worker's status to its supervisor through a pipe
metrics.py     converts statuses to Prometheus metrics (extra `metrics`)
board.py       keeps the last minutes of all statuses, for the page
server.py      /livez /readyz /metrics / over HTTP (eos/probes.py); page.html is the page

Nothing here may delay a worker. The worker's thread only writes plain numbers (eos/observe.py) and, twice a
second, samples the values that only it can read. All else happens on daemon threads. docs/howto/watch.md explains the
probes.
"""
