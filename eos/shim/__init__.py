"""Proxy the Kafka wire protocol in front of real brokers.

Clients connect to the shim as to Kafka. It owns one local port per upstream broker, every forwarded byte, and the
changes that its jobs make to frames. It must never import another part of `eos` than codes, errors, log and probes,
never answer for a broker unless a job says so, and never let a client learn an upstream address.

    wire/          frames, headers and fields of the protocol: pure
    addresses/     finds and replaces broker addresses in responses; maps brokers to local ports: pure
    pipeline.py    the interface of a job, and which frames are decoded at all
    link.py        one client connection and its upstream connection: I/O
    server.py      listeners, discovery, draining: I/O
    send_queue.py  one direction of a link, in which a frame can be held: pure
    chain.py       several shims in sequence, with faults on either side of the others
    trace/         the job that shows transactions
    faults/        the job that injects the faults of a plan
    guard/         the job that refuses the requests that a policy forbids
    protect/       the job that keeps late requests out of the next transaction
    health/        /livez, /readyz and /metrics
"""

from __future__ import annotations

from eos.shim.server import Shim
from eos.shim.settings import ShimSettings

__all__ = ["Shim", "ShimSettings"]
