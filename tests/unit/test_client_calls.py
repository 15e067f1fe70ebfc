"""What confluent-kafka raises is an exception by the time anybody else sees it."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from eos.kafka.client.client_calls import call_client
from eos.kafka.client.watchdog import Watchdog


def bare() -> None:
    error: Any = KafkaError(KafkaError._FENCED, "a newer instance", fatal=True)
    raise error  # as confluent-kafka does from C


def test_a_bare_error_of_the_client_becomes_an_exception_that_can_be_caught() -> None:
    with pytest.raises(KafkaException) as raised:
        call_client(bare)
    error = raised.value.args[0]
    assert (error.code(), error.fatal()) == (KafkaError._FENCED, True)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError, SystemError])
def test_every_exception_passes_as_it_is(kind: type[BaseException]) -> None:
    def fails() -> None:
        raise kind("as it is")

    with pytest.raises(kind, match="as it is"):
        call_client(fails)


def test_a_signals_exception_that_was_left_lying_is_raised_and_not_what_it_made_of_the_next_call() -> None:
    def left(by: BaseException) -> None:
        raise SystemError("<method 'items' of 'dict' objects> returned a result with an exception set") from by

    with pytest.raises(KeyboardInterrupt):
        call_client(left, KeyboardInterrupt())
    with pytest.raises(SystemError):  # a fatal error shows so too; it is the caller's to look into
        call_client(left, ValueError())


def test_a_result_and_arguments_pass() -> None:
    assert call_client(max, 1, 3, 2) == 3


def test_a_watched_call_that_raises_a_bare_error_has_returned_and_does_not_hang() -> None:
    watchdog = Watchdog("test")
    with pytest.raises(KafkaException):
        watchdog.call(bare, timeout_s=5.0)
    assert not watchdog.hung
    watchdog.close()
