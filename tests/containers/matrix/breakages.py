"""Rules of the product taken out on purpose, one at a time, and the verdict that must find each.

Applied in a worker's process by patching; the product has no switch for any of it but `eos.replace.producer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Breakage:
    """`expected`: the rules of the checker of which at least one must be red; any other red does not count."""

    what: str
    expected: frozenset[str]
    apply: Callable[[], None]


def _offsets_outside_the_transaction() -> None:
    from eos.session import TransactSession

    def commit_by_the_consumer(self: TransactSession, producer: Any, offsets: list[Any], metadata: Any) -> float:
        if offsets:
            self.consumer.commit(offsets=offsets, asynchronous=False)
        self._step("offsets sent")
        producer.commit()
        self._step("committed")
        return time.monotonic()

    TransactSession._send_and_commit = commit_by_the_consumer  # type: ignore[method-assign]


def _rewind_missing() -> None:
    from eos.membership import Membership

    Membership.go_back = lambda self, targets: None  # type: ignore[method-assign,assignment]


def _no_ownership_check() -> None:
    from eos.membership import Membership
    from eos.positions import Positions

    def unchecked(self: Membership, offsets: Mapping[Any, int]) -> Any:
        return self.consumer.consumer_group_metadata()

    Membership.metadata_to_commit = unchecked  # type: ignore[method-assign]
    Membership.check_not_lost = lambda self: None  # type: ignore[method-assign]
    Positions.forget = lambda self, partitions: False  # type: ignore[method-assign]


def _metadata_of_nobody() -> None:
    from eos.membership import Membership

    def without_generation(self: Membership, offsets: Mapping[Any, int]) -> Any:
        from confluent_kafka import Consumer

        # A consumer that never joined: generation -1 and no member id, which the broker does not check.
        outsider = Consumer({"bootstrap.servers": self._settings.bootstrap_servers, "group.id": self.group})
        return outsider.consumer_group_metadata()

    Membership.metadata_to_commit = without_generation  # type: ignore[method-assign]
    Membership.check_not_lost = lambda self: None  # type: ignore[method-assign]


def _outputs_before_the_function_returned() -> None:
    """Every 97th record fails half way in its first run: its first output is out by then."""
    from eos.app import Fed, Record, Route, put
    from eos.policies import retry

    original = Route.__init__

    def eager(self: Route, *arguments: Any) -> None:
        original(self, *arguments)
        seen: set[tuple[str, int, int]] = set()

        def feed(records: list[Record], produce: Any, refused: Any) -> Fed:
            sent = 0
            for handled, record in enumerate(records):
                place = (record.topic, record.partition, record.offset)
                for number, send in enumerate(self.outputs(record)):
                    put(send, produce, refused)
                    sent += 1
                    if number == 0 and record.offset % 97 == 96 and place not in seen:
                        seen.add(place)
                        return Fed(sent, handled, BlockingIOError("the function failed half way"))
            return Fed(sent, len(records), None)

        self.feed = feed

        self.on_error = retry(100, backoff_ms=1)

    Route.__init__ = eager  # type: ignore[method-assign]


def _rewind_to_the_committed_offset_of_the_assignment() -> None:
    from eos.membership import Membership
    from eos.positions import Positions

    starts: dict[Any, int] = {}
    assigned, go_back = Positions.assigned, Membership.go_back

    def remember(self: Positions[Any], new: Mapping[Any, int]) -> None:
        starts.update(new)
        assigned(self, new)

    Positions.assigned = remember  # type: ignore[method-assign]
    Membership.go_back = lambda self, targets: go_back(self, {p: starts[p] for p in targets})  # type: ignore[method-assign]


DOUBLED, LOST, TORN = frozenset({"no_duplicates"}), frozenset({"no_losses"}), frozenset({"atomic"})

ALL: dict[str, Breakage] = {
    "offsets outside the transaction": Breakage(
        "the consumer commits the offsets before the transaction ends", LOST, _offsets_outside_the_transaction
    ),
    "rewind missing": Breakage("after an abort the consumer goes on where it is", LOST, _rewind_missing),
    "rewind to the committed offset": Breakage(
        "a rewind goes to what was committed when the partition was assigned, not to the transaction's start",
        DOUBLED,
        _rewind_to_the_committed_offset_of_the_assignment,
    ),
    "no ownership check": Breakage(
        "revoked partitions stay in the transaction and nothing is checked before the commit",
        DOUBLED,
        _no_ownership_check,
    ),
    "metadata of nobody": Breakage(
        "offsets are sent for a member without generation, which the broker does not check",
        DOUBLED,
        _metadata_of_nobody,
    ),
    "outputs before the function returned": Breakage(
        "each output goes out as the function yields it; a function that fails half way is run again",
        DOUBLED | TORN,
        _outputs_before_the_function_returned,
    ),
}
