"""Sends a consumer's queries to the cluster: offsets of its group, ends of its topics.

Decides which answers to wait for, and which errors end the session. It never moves the consumer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from eos import log
from eos.errors import Action, Call, CallFailed, EosError, Unavailable, describe_error, stop_error
from eos.kafka.admin import tail
from eos.kafka.admin.facts import connect
from eos.kafka.admin.transactions import explain_unstable_offsets
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.failures import classify, explain_denied, explain_other_strategy
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.observe import Pulse
from eos.session.consumer.positions import TopicPartition as Partition

T = TypeVar("T")

_TRY_TIMEOUT_S = 0.3
_QUERY_S = 5.0
LOOK_S = 1.0  # timeout of a query during which the group is not polled
_END_LOOK_S = 0.25


class NotNow(Exception):
    """Reports that the cluster cannot answer yet; the message says what the caller waits for."""


class Stopped(Exception):
    """Reports that a stop was requested during a wait for the cluster."""


class ClusterQueries:
    """Sends the queries of one consumer. `topics`: the input topics; the caller may add more. `stopping` returns True
    once a stop was requested, which ends waits for the cluster."""

    def __init__(
        self,
        consumer: Consumer,
        settings: Settings,
        topics: Sequence[str],
        pulse: Pulse,
        world: World,
        stopping: Callable[[], bool],
    ) -> None:
        self._consumer, self._settings, self._topics = consumer, settings, topics
        self._pulse, self._world, self._stopping = pulse, world, stopping
        self._group: str = settings["group.id"]

    def refusal(self, call: Call, error: KafkaError, topic: str = "") -> EosError:
        """Return the error that ends the session after this permanent refusal."""
        right = explain_denied(error, group=self._group, topic=topic or ", ".join(self._topics))
        return stop_error(
            CallFailed(call, classify(call, error), error, right or explain_other_strategy(error, self._group))
        )

    # ---- ends -------------------------------------------------------------------------------------------------

    def stable_ends(self) -> dict[Partition, int]:
        """Return the last stable offsets of all input partitions that have readable offsets. Wait for partitions
        without a leader. Raises Stopped."""
        ends = {}
        for topic in self._topics:
            for partition in self._wait_for(functools.partial(self.partitions_of, topic)):
                low, end = self._wait_for(functools.partial(self.watermarks, partition))
                if end > low:
                    ends[partition] = end
        return ends

    def watermarks(self, partition: Partition, timeout_s: float = _QUERY_S) -> tuple[int, int]:
        """Return the low watermark and the last stable offset of a partition. Raises NotNow."""
        at = TopicPartition(*partition)
        low, high = self._query(
            "list_offsets", partition[0], lambda: self._consumer.get_watermark_offsets(at, timeout=timeout_s)
        )
        return low, high

    def partitions_of(self, topic: str) -> list[Partition]:
        """Return the partitions of a topic. Raises NotNow."""
        found = self._query("metadata", topic, lambda: self._consumer.list_topics(topic, timeout=_QUERY_S))
        return [(topic, partition) for partition in found.topics[topic].partitions]

    def _query(self, name: str, topic: str, query: Callable[[], Any]) -> Any:
        """Return the cluster's answer. Raises NotNow for retriable errors, an EosError for permanent refusals."""
        self._pulse.beat("calling", name)
        try:
            return query()
        except KafkaException as error:
            if classify("consume", error.args[0]) is Action.RETRY:
                raise NotNow(describe_error(error)) from error
            raise self.refusal("consume", error.args[0], topic) from error

    def _wait_for(self, query: Callable[[], T]) -> T:
        """Repeat a query until it is answered. Only for a consumer outside its group, which needs no polls meanwhile.
        Raises Stopped."""
        waits = log.Reminder(self._world.now)
        while not self._stopping():
            try:
                return query()
            except NotNow as error:
                if waits.tick():
                    log.warning("waiting for the cluster", error=str(error), group=self._group)
                self._world.sleep(0.1)
        raise Stopped

    # ---- the group's offsets ----------------------------------------------------------------------------------

    def topics_with_commits(self, admin: ClusterAdmin) -> set[str]:
        """Return the topics for which the group has committed offsets, without a wait for open transactions of other
        members. A topic's first commit, if it is still open, does not show that the group has read the topic before.
        Raises Stopped."""

        def query() -> set[str]:
            try:
                return admin.committed_topics(self._group)
            except Unavailable as error:
                raise NotNow(str(error)) from error

        return self._wait_for(query)

    def stable_committed(self, partitions: Sequence[Partition]) -> dict[Partition, TopicPartition]:
        """Return the group's committed offsets; wait until no open transaction has pending ones (KIP-447).

        Raises CallFailed(REJOIN) if another client gets the offsets and this consumer does not. This happened with
        librdkafka 2.16 after the only broker had restarted: in 1 of 6 restarts the consumer never looked for its group
        coordinator again.
        """
        waits = log.Reminder(self._world.now)
        while (found := self.try_committed(partitions, _QUERY_S)) is None:
            if self._is_answered_to_another_client(partitions):
                raise CallFailed("committed", Action.REJOIN, TimeoutError("the consumer cannot reach its coordinator"))
            if waits.tick():
                self.warn_of_open_transaction()
            self._world.sleep(0.05)
        return found

    def _is_answered_to_another_client(self, partitions: Sequence[Partition]) -> bool:
        """Return whether a new client outside the group gets stable offsets of these partitions."""
        configuration = self._settings.consumer() | {"log_level": 0}
        for name in ("group.instance.id", "group.protocol", "session.timeout.ms", "heartbeat.interval.ms"):
            configuration.pop(name, None)
        client = self._world.consumer(configuration)
        try:
            found = client.committed([TopicPartition(*p) for p in partitions], timeout=_QUERY_S)
            return all(tp.error is None for tp in found)
        except KafkaException as error:
            log.debug("committed offsets unavailable to a new client", error=describe_error(error), group=self._group)
            return False
        finally:
            client.close()

    def try_committed(
        self, partitions: Sequence[Partition], timeout_s: float = _TRY_TIMEOUT_S
    ) -> dict[Partition, TopicPartition] | None:
        """Return the stable committed offsets, or None while they are unavailable."""
        if not partitions:
            return {}
        self._pulse.beat("calling", "committed")
        try:
            found = self._consumer.committed([TopicPartition(*p) for p in partitions], timeout=timeout_s)
            error = next((tp.error for tp in found if tp.error is not None), None)
            if error is None:
                return {(tp.topic, tp.partition): tp for tp in found}
        except KafkaException as raised:
            error = raised.args[0]
        if classify("committed", error) is not Action.RETRY:
            raise self.refusal("committed", error)
        log.debug("committed offsets unavailable", error=describe_error(error), group=self._group)
        return None

    def warn_of_open_transaction(self) -> None:
        """Log which transaction keeps the group's offsets from being stable."""
        cause = explain_unstable_offsets(self._settings, self._group, self._world)
        log.warning(
            "waiting for stable committed offsets",
            group=self._group,
            because=cause.reason,
            command=f"`{cause.command}`",
        )


class EndOfInput:
    """Detects the end of a run with `until_end`. The run ends once the whole group, other members included, has
    committed all records that were readable at the start. If the session itself writes some of its input topics
    (`chained`), the group must also have committed the records that resulted there."""

    def __init__(self, queries: ClusterQueries, settings: Settings, chained: Collection[str], world: World) -> None:
        self._targets, self._world, self._next_query_at = queries.stable_ends(), world, 0.0
        self._settings, self._chained = settings, sorted(chained)
        self._rounds = len(chained)  # a record passes each chained topic at most once

    def query_reached(self, queries: ClusterQueries) -> bool:
        """Query whether the end is reached. Return False without a query if the last one is recent."""
        if self._world.now() < self._next_query_at:
            return False
        self._next_query_at = self._world.now() + _END_LOOK_S
        # Try only once: another member's open transaction may keep its offsets unstable up to its timeout. Meanwhile
        # this member must go on polling, or it could not take over that member's partitions.
        committed = queries.try_committed(list(self._targets))
        if committed is None:
            return False
        self._targets = {p: end for p, end in self._targets.items() if committed[p].offset < end}
        if self._targets or not self._rounds:
            return not self._targets
        try:
            self._targets = self._chained_topic_ends()
        except Unavailable as error:
            log.debug("chained topics unavailable", error=str(error))
        else:
            self._rounds -= 1
        return False

    def _chained_topic_ends(self) -> dict[Partition, int]:
        """Return the current log ends of the chained topics.

        They include all committed outputs, even those whose markers are not written yet.
        """
        client = connect(self._settings, _QUERY_S, self._world)
        return {
            (topic, partition): span.end
            for topic in self._chained
            for partition, span in tail.topic_offsets_with(client, self._settings, topic).items()
            if span.end > span.low
        }
