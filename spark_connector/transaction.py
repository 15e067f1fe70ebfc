"""Runs one transaction of the sink at its coordinator: InitProducerId, AddPartitionsToTxn, EndTxn.

Owns the three requests and their retries. It must never decide whether a batch is to be written (marker.py does), and
never end a transaction with another identity than the one that began it: a delayed copy of a request meets a newer
epoch and is refused.

A whole transaction uses one protocol level (KIP-890 part 2 begins at Produce 12 and EndTxn 5 and bumps the epoch at
each end): no request exceeds the versions below, on any broker.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kafka.protocol.producer.transaction import AddPartitionsToTxnRequest, EndTxnRequest, InitProducerIdRequest

from eos.codes import error_name
from eos.kafka.admin.ownership import Identity
from spark_connector.answers import Answer, Stopped, judge
from spark_connector.wire import Broken, Wire

_INIT_MAX_VERSION = 4
_ADD_PARTITIONS_MAX_VERSION = 3
_END_MAX_VERSION = 4


class Transaction:
    """Runs the successive transactions of one transactional id. `timeout_s`: the seconds to retry a call."""

    def __init__(self, wire: Wire, transactional_id: str, transaction_timeout_ms: int, timeout_s: float) -> None:
        self._wire, self.transactional_id = wire, transactional_id
        self._transaction_timeout_ms, self._timeout_s = transaction_timeout_ms, timeout_s
        self.identity = Identity(-1, -1)

    @property
    def initialised(self) -> bool:
        return self.identity.producer_id >= 0

    def init(self) -> Identity:
        """Get a new epoch. It fences every earlier one, and the call waits until their open transaction has ended.

        If this object has an identity from an earlier init, the request contains it, and the coordinator refuses a
        driver that no longer owns the id (KIP-360). Otherwise a driver that was suspended for long would take the id
        back from its successor.
        """
        answer = self._until_done(
            "InitProducerId",
            lambda: InitProducerIdRequest(
                transactional_id=self.transactional_id,
                transaction_timeout_ms=self._transaction_timeout_ms,
                producer_id=self.identity.producer_id,
                producer_epoch=self.identity.epoch,
                max_version=_INIT_MAX_VERSION,
            ),
            lambda answer: [answer.error_code],
        )
        self.identity = Identity(answer.producer_id, answer.producer_epoch)
        return self.identity

    def add(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Add these partitions to the transaction; the first call begins it."""
        topics: dict[str, list[int]] = {}
        for topic, partition in partitions:
            topics.setdefault(topic, []).append(partition)

        def request() -> Any:
            return AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=self.transactional_id,
                v3_and_below_producer_id=self.identity.producer_id,
                v3_and_below_producer_epoch=self.identity.epoch,
                v3_and_below_topics=[
                    AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=topic, partitions=indexes)
                    for topic, indexes in topics.items()
                ],
                max_version=_ADD_PARTITIONS_MAX_VERSION,
            )

        self._until_done(
            "AddPartitionsToTxn",
            request,
            lambda answer: [
                partition.partition_error_code
                for topic in answer.results_by_topic_v3_and_below
                for partition in topic.results_by_partition
            ],
        )

    def end(self, commit: bool) -> None:
        """End the transaction. After Unreachable from a commit the outcome is unknown: init, then read the marker."""
        self._until_done(
            "EndTxn",
            lambda: EndTxnRequest(
                transactional_id=self.transactional_id,
                producer_id=self.identity.producer_id,
                producer_epoch=self.identity.epoch,
                committed=commit,
                max_version=_END_MAX_VERSION,
            ),
            lambda answer: [answer.error_code],
        )

    def _until_done(self, what: str, request: Any, codes: Any) -> Any:
        """Send the request until every code in the coordinator's answer means DONE. Raise Stopped if no retry helps."""

        def attempt() -> Any:
            try:
                answer = self._wire.ask(request(), self._wire.coordinator(self.transactional_id))
            except Broken:
                self._wire.forget_coordinator(self.transactional_id)
                raise
            verdicts = {code: judge(code) for code in codes(answer)}
            for code, verdict in verdicts.items():
                if verdict not in (Answer.DONE, Answer.RETRY):
                    raise Stopped(verdict, f"{what} for {self.transactional_id} was answered with {error_name(code)}")
            retried = [code for code, verdict in verdicts.items() if verdict is Answer.RETRY]
            if retried and retried != [_CONCURRENT_TRANSACTIONS]:
                self._wire.forget_coordinator(self.transactional_id)
            return None if retried else answer

        return self._wire.retry_until_answered(f"{what} for {self.transactional_id}", attempt, self._timeout_s)


_CONCURRENT_TRANSACTIONS = 51
