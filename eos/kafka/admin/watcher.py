"""Check the cluster periodically, on one background thread with one admin client.

Owns the thread, the client and the times of the checks. Each check owns its requests and their consequences. The client
is kafka-python's: it asks any broker, and waits between two attempts to connect. librdkafka's AdminClient asks the
broker that the last answer named as the controller: in KRaft any broker that was alive. While that broker is down,
librdkafka connects again at every change of a connection's state, its own failed attempt included, and
reconnect.backoff.ms has no effect (RD_KAFKA_OP_CONNECT sets rkb_ts_reconnect to 0). Measured with each of three brokers
killed: 3,500 attempts and 0.4 s of CPU per second, and no answer until the broker is back or five minutes are over.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World

_REQUEST_TIMEOUT_MS = 5_000


@dataclass(eq=False)
class Check:
    """Describes one kind of check. `run` gets the client, `on_error` the exception of a failed check. Both return the
    seconds until the next check, or None to wait for `Watcher.wake`."""

    run: Callable[[ClusterAdmin], float | None]
    on_error: Callable[[Exception], float | None]
    due: float = math.inf
    is_woken: bool = False


class Watcher:
    """Runs checks one at a time. All methods return at once and may be called on any thread."""

    def __init__(self, settings: Settings, world: World = REAL) -> None:
        self._settings, self._world = settings, world
        self._checks: list[Check] = []
        self._changed = threading.Condition()
        self._is_running = self._is_stopped = False

    def add(self, check: Check, delay_s: float | None = None) -> None:
        """Run this check after `delay_s`, or once it is woken."""
        with self._changed:
            self._checks.append(check)
            if delay_s is not None:
                check.due = self._world.now() + delay_s
                self._start()

    def remove(self, check: Check) -> None:
        """Stop running this check; a run in progress finishes."""
        with self._changed:
            if check in self._checks:
                self._checks.remove(check)
            self._changed.notify()

    def wake(self, check: Check) -> None:
        """Run this check now, or again if it is running."""
        with self._changed:
            check.due, check.is_woken = self._world.now(), True
            self._start()

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def _start(self) -> None:
        self._changed.notify()
        if not self._is_running and not self._is_stopped:
            self._is_running = True
            self._world.background("eos-watcher", self._run)

    def _run(self) -> None:
        with contextlib.ExitStack() as connection:
            admin: ClusterAdmin | None = None  # the client, kept as long as the cluster answers
            while (check := self._wait_for_check()) is not None:
                try:
                    if admin is None:
                        made = self._world.admin(self._settings, timeout_ms=_REQUEST_TIMEOUT_MS)
                        admin = connection.enter_context(made)
                    pause_s = check.run(admin)
                except Exception as error:  # noqa: BLE001 - the check's on_error decides, and other checks continue
                    connection.close()
                    admin, pause_s = None, check.on_error(error)
                self._schedule(check, pause_s)

    def _wait_for_check(self) -> Check | None:
        """Wait until a check is due, and return it; None after `stop`."""
        with self._changed:
            while not self._is_stopped:
                first = min(self._checks, key=lambda check: check.due, default=None)
                left_s = math.inf if first is None else first.due - self._world.now()
                if first is not None and left_s <= 0:
                    first.is_woken = False
                    return first
                self._changed.wait(None if math.isinf(left_s) else left_s)
        return None

    def _schedule(self, check: Check, pause_s: float | None) -> None:
        with self._changed:
            if not check.is_woken:
                check.due = math.inf if pause_s is None else self._world.now() + pause_s
