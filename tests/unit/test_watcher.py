"""The background thread that checks the cluster: when its checks run, and the effect of a failed check."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from eos.errors import Unavailable
from eos.kafka.admin.watcher import Check, Watcher
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from tests.support import reading

wait_until = functools.partial(reading.wait_until, timeout=30)


class Cluster:
    """Counts the clients that are open."""

    def __init__(self) -> None:
        self.opened = self.closed = 0
        self.is_away = False

    @contextlib.contextmanager
    def admin(self, settings: Settings, timeout_ms: int) -> Iterator[Any]:
        if self.is_away:
            raise Unavailable("no broker")
        self.opened += 1
        yield self
        self.closed += 1


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def watcher(cluster: Cluster) -> Iterator[Watcher]:
    made = Watcher(Settings({}), World(admin=cluster.admin))  # type: ignore[arg-type]
    yield made
    made.stop()
    wait_until("its thread ends", lambda: all(t.name != "eos-watcher" for t in threading.enumerate()))


def counting(pause_s: float | None, ran: list[str], name: str = "") -> Check:
    def run(admin: Any) -> float | None:
        ran.append(name)
        return pause_s

    return Check(run, lambda error: ran.append(f"{name}{error}"))  # type: ignore[func-returns-value]


def test_checks_repeat_and_share_one_client(watcher: Watcher, cluster: Cluster) -> None:
    ran: list[str] = []
    watcher.add(counting(0.001, ran, "a"), 0.0)
    watcher.add(counting(0.001, ran, "b"), 0.0)
    wait_until("both run again and again", lambda: ran.count("a") > 5 and ran.count("b") > 5)
    assert (cluster.opened, cluster.closed) == (1, 0)


def test_check_without_a_due_time_runs_when_it_is_woken(watcher: Watcher) -> None:
    ran: list[str] = []
    resting = counting(None, ran)
    watcher.add(resting)
    for times in (1, 2):
        watcher.wake(resting)
        wait_until("it runs", lambda times=times: len(ran) == times)


def test_check_woken_while_running_runs_again(watcher: Watcher) -> None:
    ran: list[int] = []

    def run(admin: Any) -> None:
        ran.append(1)
        if len(ran) == 1:
            watcher.wake(check)

    check = Check(run, lambda error: None)
    watcher.add(check, 0.0)
    wait_until("it runs again", lambda: len(ran) == 2)


def test_failed_check_closes_the_client_but_stops_no_other_check(watcher: Watcher, cluster: Cluster) -> None:
    ran: list[str] = []

    def fails(admin: Any) -> None:
        raise KeyError("a bug")

    watcher.add(Check(fails, lambda error: ran.append(repr(error))), 0.0)  # type: ignore[func-returns-value]
    watcher.add(counting(0.001, ran, "b"), 0.0)
    wait_until("the other goes on", lambda: ran.count("b") > 5)
    assert ran.count("KeyError('a bug')") == 1
    assert cluster.opened - cluster.closed == 1


def test_check_decides_when_an_unreachable_cluster_is_queried_again(watcher: Watcher, cluster: Cluster) -> None:
    ran: list[str] = []
    cluster.is_away = True

    def on_error(error: Exception) -> float:
        ran.append(str(error))
        return 0.001

    watcher.add(Check(lambda admin: ran.append("ran"), on_error), 0.0)  # type: ignore[func-returns-value]
    wait_until("it was asked for twice", lambda: ran.count("no broker") > 1)
    cluster.is_away = False
    wait_until("it runs", lambda: ran[-1] == "ran")


def test_removed_check_does_not_run_again(watcher: Watcher) -> None:
    ran: list[str] = []
    first, second = counting(0.001, ran, "a"), counting(0.001, ran, "b")
    watcher.add(first, 0.0)
    watcher.add(second, 0.0)
    wait_until("both run", lambda: {"a", "b"} <= set(ran))
    watcher.remove(first)
    wait_until("the other runs alone", lambda: len(ran) > 10 and "a" not in ran[-10:])


def test_stopped_watcher_starts_nothing(watcher: Watcher) -> None:
    ran: list[str] = []
    watcher.stop()
    watcher.add(counting(0.001, ran), 0.0)
    assert ran == []
    assert all(t.name != "eos-watcher" for t in threading.enumerate())
