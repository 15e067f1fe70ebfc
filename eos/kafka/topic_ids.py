"""Notices that a source topic was deleted and made anew under a running worker (KIP-516: a topic has an id of its own).

The client goes on at the old topic's offset in the new one: what the new topic holds before it would be skipped without
a word (measured: librdkafka 2.16 on 4.3.1). Owns the looking, once a second on a thread of its own, and the sentence.
It never touches the consumer; what to do about it is the caller's.

It asks with kafka-python, which asks any broker and waits between two attempts to connect. librdkafka's AdminClient
asks the broker that the answer before named as the controller: in KRaft any that was thought alive. While that one is
down, it connects at every change of a connection's state, the failure of its own attempt before too, and
reconnect.backoff.ms does not hold (RD_KAFKA_OP_CONNECT sets rkb_ts_reconnect to 0): measured with each of three brokers
killed, 3,500 attempts and 0.4 s of CPU a second, and no answer until it is back or five minutes are over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from eos import log
from eos.errors import ConfigurationError, EosError, InputGone
from eos.kafka.cluster import ClusterAdmin
from eos.kafka.settings import Settings
from eos.kafka.world import REAL, World

INTERVAL_S = 1.0
_ASK_S = 5.0


class TopicIds:
    """Looks at the ids of `topics` until `stop`; calls `changed` once, from its thread."""

    def __init__(
        self,
        settings: Settings,
        topics: Iterable[str],
        changed: Callable[[InputGone], None],
        world: World = REAL,
    ) -> None:
        self._world = world
        self._settings, self._topics, self._changed = settings, sorted(topics), changed
        self._known: dict[str, str] = {}
        self._stopped = threading.Event()

    def watch(self, topics: Iterable[str]) -> None:
        """Looks at these from its next look on."""
        self._topics = sorted(topics)

    def start(self) -> None:
        self._world.background("eos-topic-ids", self._run)

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                # One connection for as long as it answers.
                with self._world.admin(self._settings, timeout_ms=round(_ASK_S * 1000)) as admin:
                    gone = self._watch(admin)
            except ConfigurationError as error:
                log.debug("topics' ids cannot be had", error=str(error))
                return
            except EosError as error:
                # Nobody answers: the consumer says so where it matters.
                log.debug("topics' ids cannot be had", error=str(error))
                self._stopped.wait(INTERVAL_S)
            else:
                if gone is not None:
                    self._changed(gone)
                return

    def _watch(self, admin: ClusterAdmin) -> InputGone | None:
        """Looks until a topic was made anew, or `stop`."""
        while not self._stopped.is_set():
            if (gone := self._look(admin)) is not None:
                return gone
            self._stopped.wait(INTERVAL_S)
        return None

    def _look(self, admin: ClusterAdmin) -> InputGone | None:
        # A topic that is missing for now is left out.
        for topic, now in admin.topic_ids(self._topics).items():
            if self._known.setdefault(topic, now) != now:
                return InputGone(
                    f"the input is gone: topic {topic} was deleted and made anew while this worker ran (its id was "
                    f"{self._known[topic]}, is {now}), and offsets of the old one mean nothing in it; "
                    "`eos reset --from earliest` reads the new one from its beginning"
                )
        return None
