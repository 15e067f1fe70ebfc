"""Questions that only the cluster can answer, asked by a consumer: offsets of its group, ends of its topics.

Owns which answers are waited for and which end the session. It never moves the consumer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from eos import log
from eos.errors import Action, Call, CallFailed, EosError, Unavailable, describe_error, no_broker, stop_error
from eos.kafka.admin import tail
from eos.kafka.admin.facts import NEW_TOPIC_S, connect
from eos.kafka.admin.transactions import explain_unstable_offsets
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.failures import classify, explain_denied, explain_other_strategy
from eos.kafka.client.security import require_reachable
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World
from eos.session.observe import Pulse
from eos.session.positions import TopicPartition as Partition

T = TypeVar("T")

_RESOLVE_TIMEOUT_S = 0.3
_ASK_S = 5.0
LOOK_S = 1.0  # of a question for which the group waits
_WAIT_LOG_INTERVAL_S = 10.0
_DONE_PAUSE_S = 0.25


class NotNow(Exception):
    """The cluster cannot answer at this moment; what is waited for."""


class Stopped(Exception):
    """A stop was asked for while the cluster was waited for."""


class Asking:
    """`topics`: those that are read; more may come into it. `stopping`: whether a stop was asked for, which ends what
    waits for the cluster."""

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
        """What ends the session."""
        right = explain_denied(error, group=self._group, topic=topic or ", ".join(self._topics))
        return stop_error(
            CallFailed(call, classify(call, error), error, right or explain_other_strategy(error, self._group))
        )

    # ---- ends -------------------------------------------------------------------------------------------------

    def stable_ends(self) -> dict[Partition, int]:
        """Last stable offsets of all input partitions now; those without a readable offset are left out. Waits for
        partitions without a leader. Raises Stopped."""
        ends = {}
        for topic in self._topics:
            for partition in self._when_possible(functools.partial(self.partitions_of, topic)):
                low, end = self._when_possible(functools.partial(self.watermarks, partition))
                if end > low:
                    ends[partition] = end
        return ends

    def watermarks(self, partition: Partition, timeout_s: float = _ASK_S) -> tuple[int, int]:
        """Low watermark and last stable offset of a partition (a read_committed consumer's end). Raises NotNow."""
        at = TopicPartition(*partition)
        low, high = self._ask(
            "list_offsets", partition[0], lambda: self._consumer.get_watermark_offsets(at, timeout=timeout_s)
        )
        return low, high

    def _ask(self, name: str, topic: str, ask: Callable[[], Any]) -> Any:
        """What only the cluster can answer. NotNow: not at this moment; EosError for what is refused for good."""
        self._pulse.beat("calling", name)
        try:
            return ask()
        except KafkaException as error:
            if classify("consume", error.args[0]) is Action.RETRY:
                raise NotNow(describe_error(error)) from error
            raise self.refusal("consume", error.args[0], topic) from error

    def _when_possible(self, question: Callable[[], T]) -> T:
        """Its answer, asked for until there is one; only while this member is not in the group, which must be polled.
        Raises Stopped."""
        told = self._world.now()
        while not self._stopping():
            try:
                return question()
            except NotNow as error:
                if self._world.now() - told > _WAIT_LOG_INTERVAL_S:
                    told = self._world.now()
                    log.warning("waiting for the cluster", error=str(error), group=self._group)
                self._world.sleep(0.1)
        raise Stopped

    def partitions_of(self, topic: str) -> list[Partition]:
        found = self._ask("metadata", topic, lambda: self._consumer.list_topics(topic, timeout=_ASK_S))
        return [(topic, partition) for partition in found.topics[topic].partitions]

    # ---- the group's offsets ----------------------------------------------------------------------------------

    def topics_with_commits(self, admin: ClusterAdmin) -> set[str]:
        """Those of which the group has committed offsets. Other members' open transactions are not waited for: their
        first commit of a topic, if it is one, does not make it older. Raises Stopped."""

        def ask() -> set[str]:
            try:
                return admin.committed_topics(self._group)
            except Unavailable as error:
                raise NotNow(str(error)) from error

        return self._when_possible(ask)

    def stable_committed(self, partitions: Sequence[Partition]) -> dict[Partition, TopicPartition]:
        """The group's committed offsets once no transaction pends on them (KIP-447); waits for them.

        CallFailed(REJOIN): another client gets them, this one's consumer does not. Seen with librdkafka 2.16 after the
        only broker came back: in 1 of 6 restarts it never asked for its group coordinator again.
        """
        told = self._world.now()
        while (found := self.try_committed(partitions, _ASK_S)) is None:
            if self._another_client_gets(partitions):
                raise CallFailed("committed", Action.REJOIN, TimeoutError("the consumer cannot reach its coordinator"))
            if self._world.now() - told > _WAIT_LOG_INTERVAL_S:
                told = self._world.now()
                self.warn_of_waiting()
            self._world.sleep(0.05)
        return found

    def _another_client_gets(self, partitions: Sequence[Partition]) -> bool:
        """Whether these offsets are stable and to be had, asked by a client of its own that joins nothing."""
        configuration = self._settings.consumer() | {"log_level": 0}
        for name in ("group.instance.id", "group.protocol", "session.timeout.ms", "heartbeat.interval.ms"):
            configuration.pop(name, None)
        asking = self._world.consumer(configuration)
        try:
            found = asking.committed([TopicPartition(*p) for p in partitions], timeout=_ASK_S)
            return all(tp.error is None for tp in found)
        except KafkaException as error:
            log.debug("another client cannot have them either", error=describe_error(error), group=self._group)
            return False
        finally:
            asking.close()

    def try_committed(
        self, partitions: Sequence[Partition], timeout_s: float = _RESOLVE_TIMEOUT_S
    ) -> dict[Partition, TopicPartition] | None:
        """Stable committed offsets, or None if they cannot be had yet."""
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
        action = classify("committed", error)
        if action is not Action.RETRY:
            raise self.refusal("committed", error)
        log.debug("committed offsets cannot be had yet", error=describe_error(error), group=self._group)
        return None

    def warn_of_waiting(self) -> None:
        """Says whose transaction keeps the group's offsets from being stable."""
        cause = explain_unstable_offsets(self._settings, self._group, self._world)
        log.warning(
            "waiting for stable committed offsets",
            group=self._group,
            because=cause.reason,
            command=f"`{cause.command}`",
        )


class Finish:
    """Whether the whole group, other members included, is committed up to where the input ended at the start, and up to
    what that led to in those of its topics that it writes itself: `chained`, as often as there are such topics."""

    def __init__(self, asking: Asking, settings: Settings, chained: Collection[str], world: World) -> None:
        self._targets, self._world, self._next_look = asking.stable_ends(), world, 0.0
        self._settings, self._chained, self._rounds = settings, sorted(chained), len(chained)

    def reached(self, asking: Asking) -> bool:
        if self._world.now() < self._next_look:
            return False
        self._next_look = self._world.now() + _DONE_PAUSE_S
        # Asked, not waited for: another member's open transaction may keep its offsets unstable up to its timeout, and
        # meanwhile this one must go on polling, or it could not take that member's partitions over.
        committed = asking.try_committed(list(self._targets))
        if committed is None:
            return False
        self._targets = {p: end for p, end in self._targets.items() if committed[p].offset < end}
        if self._targets or not self._rounds:
            return not self._targets
        try:
            self._targets = self._written()
        except Unavailable as error:
            log.debug("what was written cannot be looked for yet", error=str(error))
        else:
            self._rounds -= 1
        return False

    def _written(self) -> dict[Partition, int]:
        """Where the chained topics end now, behind the outputs of all that was committed: their markers may be on their
        way."""
        client = connect(self._settings, _ASK_S, self._world)
        return {
            (topic, partition): span.end
            for topic in self._chained
            for partition, span in tail.topic_offsets_with(client, self._settings, topic).items()
            if span.end > span.low
        }


def check_topics(client: Any, servers: str, topics: Iterable[str], deadline: float, world: World = REAL) -> None:
    """Every topic named exists, or Unavailable with the name; so does an unreachable cluster. `client`: any of
    confluent-kafka's that has `list_topics`."""
    patience = world.now() + NEW_TOPIC_S
    while (missing := _missing(client, servers, topics, max(1.0, deadline - world.now()))) and world.now() < patience:
        world.sleep(0.1)
    if missing:
        raise Unavailable(missing)


def _missing(client: Any, servers: str, topics: Iterable[str], timeout_s: float) -> str:
    """The sentence about the first topic that is not there, by the broker that is asked; "" when all are."""
    try:
        found = client.list_topics(timeout=timeout_s)
    except KafkaException as error:
        action = classify("consume", error.args[0])
        if action is Action.UNAUTHORISED:
            raise stop_error(CallFailed("consume", action, error)) from error
        sentence = f"{servers} cannot be reached: {describe_error(error)}"
        raise Unavailable(sentence, remedy=no_broker(servers)) from error
    require_reachable(servers, found)
    known = found.topics
    for topic in topics:
        if topic not in known or known[topic].error is not None:
            detail = f" ({known[topic].error.str()})" if topic in known and known[topic].error else ""
            return f"topic {topic} does not exist at {servers}{detail}"
    return ""
