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


def test_a_call_returns_its_result_and_gets_its_arguments(watchdog: Watchdog) -> None:
    assert watchdog.call(divmod, 7, 2, timeout_s=10) == (3, 1)
    assert not watchdog.hung


def test_a_call_runs_on_the_watchdogs_own_daemon_thread_and_never_two_at_once(watchdog: Watchdog) -> None:
    first = watchdog.call(threading.current_thread, timeout_s=10)
    assert first is watchdog.call(threading.current_thread, timeout_s=10)
    assert first is not threading.current_thread()
    assert (first.name, first.daemon) == ("eos-test", True)


def test_a_call_that_ends_a_moment_behind_its_deadline_is_no_hang(watchdog: Watchdog) -> None:
    """A process that stood still finds the deadline passed, and its call about to return."""
    assert watchdog.call(threading.Event().wait, 0.1, timeout_s=0.0) is False
    assert not watchdog.hung


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_an_exception_of_the_call_is_raised_to_the_caller_and_the_next_call_works(
    watchdog: Watchdog, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        watchdog.call(fail, timeout_s=10)
    assert raised.value is error
    assert not watchdog.hung
    assert watchdog.call(int, "7", timeout_s=10) == 7


def test_a_call_that_does_not_return_is_given_up_in_time(watchdog: Watchdog, hang: threading.Event) -> None:
    began = time.monotonic()
    with pytest.raises(CallHung, match=r"wait did not return within 0\.1 s"):
        watchdog.call(hang.wait, timeout_s=0.1)
    assert 0.1 <= time.monotonic() - began < 5
    assert watchdog.hung


def test_after_a_hang_every_call_is_refused_and_none_runs_later(watchdog: Watchdog, hang: threading.Event) -> None:
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


def test_a_hung_call_that_returns_after_all_is_not_forgiven(watchdog: Watchdog, hang: threading.Event) -> None:
    with pytest.raises(CallHung):
        watchdog.call(hang.wait, timeout_s=0.05)
    hang.set()
    with pytest.raises(CallHung):
        watchdog.call(int, timeout_s=10)


def test_a_signal_ends_the_wait_and_the_call_counts_as_hung(watchdog: Watchdog, hang: threading.Event) -> None:
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


def test_a_signal_that_raises_nothing_lets_the_call_go_on(watchdog: Watchdog) -> None:
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


def test_a_closed_watchdog_ends_its_thread_after_what_was_asked_before() -> None:
    watchdog = Watchdog("eos-test")
    assert watchdog.call(int, "7", timeout_s=10) == 7
    watchdog.close()
    watchdog._thread.join(10)
    assert not watchdog._thread.is_alive()


class Failing:
    def call(self) -> None:
        raise ValueError("no")


@pytest.mark.usefixtures("uncollected")
def test_a_call_that_raised_is_not_held_once_its_error_was_dealt_with(watchdog: Watchdog) -> None:
    failing = Failing()
    gone = weakref.ref(failing)
    with contextlib.suppress(ValueError):
        watchdog.call(failing.call, timeout_s=10)
    del failing
    watchdog.call(int, timeout_s=10)
    assert gone() is None, "the error's traceback and the job hold each other"


@pytest.mark.usefixtures("uncollected")
def test_a_job_that_raised_is_not_held_while_the_next_one_is_waited_for(watchdog: Watchdog) -> None:
    failing = Failing()
    gone = weakref.ref(failing)
    job = watchdog.start(failing.call)
    assert job.done.wait(10)
    assert isinstance(job.error, ValueError)
    del failing, job
    wait_until("the watchdog's thread gives up the job it has done", lambda: gone() is None, 10)
