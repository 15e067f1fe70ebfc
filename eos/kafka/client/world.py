"""Collects everything outside the process that a session uses: clients, clocks, sleeps and threads.

`REAL` is the default. A test or a simulation passes another World, with some or all of the fields replaced. Sessions,
plain transactions and queries to the cluster take it as an argument, and none of them creates a client, starts a thread
or reads a clock by itself (tests/unit/test_world.py checks the sources).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient

from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.watchdog import Watchdog

# The clock for Linux, then the one for macOS, whose CLOCK_MONOTONIC counts sleep.
_CLOCKS = [getattr(time, name) for name in ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC") if hasattr(time, name)]


def read_boot_clock() -> float:
    """Return seconds since a fixed moment, including time while the host was suspended.

    Use it for timeouts that another machine's clock decides, such as a transaction's timeout at the broker.
    `time.monotonic` stops while a host is suspended (CLOCK_MONOTONIC on Linux, mach_absolute_time on macOS). In a
    paused virtual machine every clock stops, so a decision by this clock must stay correct if it shows too little time.
    """
    return time.clock_gettime(_CLOCKS[0]) if _CLOCKS else time.monotonic()


def _start_thread(name: str, run: Callable[[], None]) -> None:
    threading.Thread(target=run, name=name, daemon=True).start()


@dataclass(frozen=True)
class World:
    """Creates clients, reads clocks in seconds, and starts threads; each field is a function."""

    consumer: Callable[[dict[str, Any]], Consumer] = Consumer
    producer: Callable[[dict[str, Any]], Producer] = Producer
    client: Callable[[dict[str, Any]], AdminClient] = AdminClient
    """confluent-kafka's admin client."""
    admin: Callable[..., ClusterAdmin] = ClusterAdmin
    """`admin(settings, timeout_ms=10_000)`: connects kafka-python's admin client; `timeout_ms` limits each request."""

    now: Callable[[], float] = time.monotonic
    """Seconds for our own deadlines; stops while the host is suspended."""
    boot_clock: Callable[[], float] = read_boot_clock
    """Seconds for timeouts that another machine's clock decides."""
    unix: Callable[[], float] = time.time
    """Seconds since the Unix epoch."""
    sleep: Callable[[float], None] = time.sleep

    watchdog: Callable[..., Watchdog] = Watchdog
    """`watchdog(name, idle)`: runs calls that can hang on its own thread (eos/kafka/client/watchdog.py)."""
    step: Callable[[str], None] = lambda name: None
    """Receives the name of each step of a session's start and transactions before the step, on the step's thread.
    A test waits, observes or injects a fault there."""
    background: Callable[[str, Callable[[], None]], None] = _start_thread
    """`background(name, run)`: runs it on a daemon thread that nothing waits for."""


REAL = World()
