"""Calls with a deadline: result, exception, hang, and a signal in between."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from eos.kafka.client.watchdog import CallHung, Watchdog
from tests.support.reading import wait_until


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    made = Watchdog("eos-test")
    yield made
    made.close()


@pytest.fixture
def hang() -> Iterator[threading.Event]:
    """A call of `hang.wait` does not return before the test's end."""
    event = threading.Event()
    yield event
    event.set()


def test_call_gets_arguments_and_returns_result(watchdog: Watchdog) -> None:
    assert watchdog.call(divmod, 7, 2, timeout_s=10) == (3, 1)
    assert not watchdog.hung


def test_calls_run_one_by_one_on_own_daemon_thread(watchdog: Watchdog) -> None:
    first = watchdog.call(threading.current_thread, timeout_s=10)
    assert first is watchdog.call(threading.current_thread, timeout_s=10)
    assert first is not threading.current_thread()
    assert (first.name, first.daemon) == ("eos-test", True)


def test_call_ending_just_after_deadline_is_not_a_hang(watchdog: Watchdog) -> None:
    """A process that was paused finds the deadline passed while its call is about to return."""
    assert watchdog.call(threading.Event().wait, 0.1, timeout_s=0.0) is False
    assert not watchdog.hung


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_call_exception_is_raised_and_next_call_works(watchdog: Watchdog, error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        watchdog.call(fail, timeout_s=10)
    assert raised.value is error
    assert not watchdog.hung
    assert watchdog.call(int, "7", timeout_s=10) == 7


def test_call_that_does_not_return_is_abandoned_in_time(watchdog: Watchdog, hang: threading.Event) -> None:
    began = time.monotonic()
    with pytest.raises(CallHung, match=r"wait did not return within 0\.1 s"):
        watchdog.call(hang.wait, timeout_s=0.1)
    assert 0.1 <= time.monotonic() - began < 5
    assert watchdog.hung


def test_calls_after_a_hang_are_refused_and_never_run(watchdog: Watchdog, hang: threading.Event) -> None:
    ran: list[str] = []
    with pytest.raises(CallHung):
        watchdog.call(hang.wait, timeout_s=0.05)
    with pytest.raises(CallHung, match="an earlier call on this producer still hangs"):
        watchdog.call(ran.append, "x", timeout_s=10)
    hang.set()
    watchdog.close()
    watchdog._thread.join(10)
    assert not watchdog._thread.is_alive()
    assert ran == []


def test_hung_call_returning_later_stays_hung(watchdog: Watchdog, hang: threading.Event) -> None:
    with pytest.raises(CallHung):
        watchdog.call(hang.wait, timeout_s=0.05)
    hang.set()
    with pytest.raises(CallHung):
        watchdog.call(int, timeout_s=10)


def test_signal_ends_the_wait_and_counts_as_hang(watchdog: Watchdog, hang: threading.Event) -> None:
    class Stop(BaseException):
        pass

    def stop(*_: object) -> None:
        raise Stop

    running = threading.Event()

    def call() -> None:
        running.set()
        hang.wait()

    def interrupt() -> None:
        running.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(Stop):
            watchdog.call(call, timeout_s=3600)  # the test times out if the signal is only seen at its end
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert watchdog.hung
    with pytest.raises(CallHung):
        watchdog.call(int, timeout_s=10)


def test_signal_without_exception_lets_the_call_continue(watchdog: Watchdog) -> None:
    seen: list[int] = []
    went_on = threading.Event()

    def call() -> str:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        went_on.wait(10)
        return "done"

    def note(number: int, _: object) -> None:
        seen.append(number)
        went_on.set()

    before = signal.signal(signal.SIGUSR1, note)
    try:
        assert watchdog.call(call, timeout_s=60) == "done"
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (seen, watchdog.hung) == ([signal.SIGUSR1], False)


def test_closed_watchdog_ends_after_queued_calls() -> None:
    watchdog = Watchdog("eos-test")
    assert watchdog.call(int, "7", timeout_s=10) == 7
    watchdog.close()
    watchdog._thread.join(10)
    assert not watchdog._thread.is_alive()


class Failing:
    def call(self) -> None:
        raise ValueError("no")


@pytest.mark.usefixtures("uncollected")
def test_failed_call_is_not_referenced_after_handling(watchdog: Watchdog) -> None:
    failing = Failing()
    gone = weakref.ref(failing)
    with contextlib.suppress(ValueError):
        watchdog.call(failing.call, timeout_s=10)
    del failing
    watchdog.call(int, timeout_s=10)
    assert gone() is None, "the error's traceback and the job hold each other"


@pytest.mark.usefixtures("uncollected")
def test_failed_job_is_not_referenced_while_waiting(watchdog: Watchdog) -> None:
    failing = Failing()
    gone = weakref.ref(failing)
    job = watchdog.start(failing.call)
    assert job.done.wait(10)
    assert isinstance(job.error, ValueError)
    del failing, job
    wait_until("the watchdog's thread gives up the job it has done", lambda: gone() is None, 10)
