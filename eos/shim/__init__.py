"""The shim: a Kafka-wire-compatible proxy in front of real brokers.

Clients connect to it as to Kafka. It owns one local port per upstream broker, every byte that passes, and what its
jobs do to the frames they ask for. It must never import another part of `eos` than codes, errors, log and probes, never
answer for a broker unless a job says so, and never let a client learn an upstream address.

    wire/        frames, headers and fields of the protocol: pure
    addresses/   where addresses hide in responses, and which local port stands for which broker: pure
    pipeline.py  what a job is, and which frames are decoded at all
    link.py      one client connection and its upstream connection: I/O
    server.py    listeners, discovery, draining: I/O
    lane.py      one direction of a link, in which a frame can be held: pure
    chain.py     shims behind one another, faults on either side of the rest
    trace/       the job that shows transactions
    faults/      the job that breaks what a plan names
    guard/       the job that refuses what a policy forbids
    protect/     the job that keeps late requests out of the next transaction
    health/      /livez, /readyz and /metrics
"""

from __future__ import annotations

from eos.shim.server import Shim
from eos.shim.settings import ShimSettings

__all__ = ["Shim", "ShimSettings"]
