"""Everything outside of the process that a session touches, in one place: clients, clocks, pauses, threads.

`REAL` is the world that everybody is given unless told otherwise. A test or a simulation hands another one down, with
some or all of these replaced: sessions, plain transactions and what they ask of the cluster take it as an argument, and
none of them makes a client, starts a thread or looks at a clock by itself (tests/unit/test_world.py reads the sources).
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

# Linux; macOS, whose CLOCK_MONOTONIC counts sleep.
_CLOCKS = [getattr(time, name) for name in ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC") if hasattr(time, name)]


def elapsing() -> float:
    """Seconds since some moment, those in which the host was suspended too: for what somebody else's clock decides.

    `time.monotonic` stands still while a host is suspended (CLOCK_MONOTONIC on Linux, mach_absolute_time on macOS), and
    a transaction's timeout at the broker does not. A virtual machine that is paused has no clock at all that goes on:
    what is decided by this one must stay right when it shows too little.
    """
    return time.clock_gettime(_CLOCKS[0]) if _CLOCKS else time.monotonic()


def _background(name: str, run: Callable[[], None]) -> None:
    threading.Thread(target=run, name=name, daemon=True).start()


@dataclass(frozen=True)
class World:
    """Clients, then clocks in seconds, then threads; each is called."""

    consumer: Callable[[dict[str, Any]], Consumer] = Consumer
    producer: Callable[[dict[str, Any]], Producer] = Producer
    client: Callable[[dict[str, Any]], AdminClient] = AdminClient
    """confluent-kafka's admin client."""
    admin: Callable[..., ClusterAdmin] = ClusterAdmin
    """Settings, and the time that one question may take in milliseconds: `admin(settings, timeout_ms=10_000)`."""

    now: Callable[[], float] = time.monotonic
    """For deadlines of ours; stands still while the host is suspended."""
    elapsing: Callable[[], float] = elapsing
    """For what somebody else's clock decides."""
    unix: Callable[[], float] = time.time
    """Since the epoch."""
    sleep: Callable[[float], None] = time.sleep

    caller: Callable[..., Watchdog] = Watchdog
    """`caller(name, idle)`: runs calls that can hang on a thread of its own (eos/kafka/client/watchdog.py)."""
    step: Callable[[str], None] = lambda name: None
    """Hears the name of each step of a session's transactions before it happens, on the thread that takes it. A test
    waits, looks or breaks something there."""
    background: Callable[[str, Callable[[], None]], None] = _background
    """`background(name, run)`: runs it beside everything else; nobody waits for its end."""


REAL = World()
