"""Bare errors raised by confluent-kafka become exceptions before any caller sees them."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from eos.kafka.client.client_calls import call_client
from eos.kafka.client.watchdog import Watchdog


def bare() -> None:
    error: Any = KafkaError(KafkaError._FENCED, "a newer instance", fatal=True)
    raise error  # like confluent-kafka from C


def test_bare_client_error_becomes_an_exception() -> None:
    with pytest.raises(KafkaException) as raised:
        call_client(bare)
    error = raised.value.args[0]
    assert (error.code(), error.fatal()) == (KafkaError._FENCED, True)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError, SystemError])
def test_exceptions_pass_unchanged(kind: type[BaseException]) -> None:
    def fails() -> None:
        raise kind("as it is")

    with pytest.raises(kind, match="as it is"):
        call_client(fails)


def test_pending_signal_exception_is_raised_instead_of_system_error() -> None:
    def left(by: BaseException) -> None:
        raise SystemError("<method 'items' of 'dict' objects> returned a result with an exception set") from by

    with pytest.raises(KeyboardInterrupt):
        call_client(left, KeyboardInterrupt())
    with pytest.raises(SystemError):  # a fatal error looks the same; the caller must examine it
        call_client(left, ValueError())


def test_call_passes_arguments_and_returns_result() -> None:
    assert call_client(max, 1, 3, 2) == 3


def test_watched_call_with_bare_error_does_not_hang() -> None:
    watchdog = Watchdog("test")
    with pytest.raises(KafkaException):
        watchdog.call(bare, timeout_s=5.0)
    assert not watchdog.hung
    watchdog.close()
