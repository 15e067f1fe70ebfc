"""Names of error codes are those of Kafka, even where kafka-python has older names."""

from __future__ import annotations

import pytest

from eos.codes import CODES, RETRIABLE, error_name


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (-1, "UNKNOWN_SERVER_ERROR"),
        (0, "ok"),
        (6, "NOT_LEADER_OR_FOLLOWER"),
        (10, "MESSAGE_TOO_LARGE"),
        (51, "CONCURRENT_TRANSACTIONS"),
        (128, "INVALID_REGULAR_EXPRESSION"),
        (999, "error 999"),
    ],
)
def test_error_code_has_its_kafka_name(code: int, name: str) -> None:
    assert error_name(code) == name


def test_retriable_errors_are_known_by_name() -> None:
    assert {"NOT_LEADER_OR_FOLLOWER", "CONCURRENT_TRANSACTIONS"} <= RETRIABLE < set(map(error_name, CODES))
    assert not {"ok", "MESSAGE_TOO_LARGE", "PRODUCER_FENCED"} & RETRIABLE
