"""What of the membership can be said without Kafka."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eos.app import Record
from eos.membership import Membership
from eos.positions import Positions
from eos.settings import Settings

SETTINGS = {"bootstrap.servers": "127.0.0.1:9", "group.id": "g", "transactional.id": "t"}


class _Message:
    """As much of confluent-kafka's Message, which only a consumer can make, as a poll reads."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def __getattr__(self, name: str) -> Any:
        known = {"topic": "in", "partition": 0, "offset": self._offset, "timestamp": (1, 7)}
        return lambda: known.get(name)


def test_what_was_fetched_when_a_callback_failed_is_handed_out_to_who_goes_on_all_the_same() -> None:
    """The consumer does not fetch it again: dropped, it would be skipped, and a later commit would make that a loss."""
    positions: Positions[Record] = Positions()
    membership = Membership(Settings(SETTINGS), ["in"], positions, None, with_ends=False)
    real = membership.consumer

    def consume(most: int, timeout_s: float) -> list[Any]:
        membership._note_statistics("no JSON")  # as librdkafka does out of a poll
        return [_Message(5), _Message(6)]

    membership.consumer = SimpleNamespace(consume=consume)  # type: ignore[assignment]
    try:
        with pytest.raises(Exception, match="JSON"):
            membership.poll(10, 0.0)
    finally:
        membership.consumer = real
        membership.close(leave=False)
    assert [record.offset for record in positions.take(10)] == [5, 6]
