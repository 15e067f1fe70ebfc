"""Notices that a source topic was deleted and made anew under a running worker (KIP-516: a topic has an id of its own).

The client goes on at the old topic's offset in the new one: what the new topic holds before it would be skipped without
a word (measured: librdkafka 2.16 on 4.3.1). Owns the looking, once a second on a thread of its own, and the sentence.
It never touches the consumer; what to do about it is the caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from eos import log
from eos.errors import InputGone, describe_error
from eos.settings import Settings

INTERVAL_S = 1.0
_ASK_S = 5.0


class TopicIds:
    """Looks at the ids of `topics` until `stop`; calls `changed` once, from its thread."""

    def __init__(self, settings: Settings, topics: Iterable[str], changed: Callable[[InputGone], None]) -> None:
        self._settings, self._topics, self._changed = settings, sorted(topics), changed
        self._known: dict[str, str] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eos-topic-ids", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        client = AdminClient(self._settings.admin() | {"logger": log.client_logger})
        while not self._stopped.is_set():
            gone = self._look(client)
            if gone is not None:
                self._changed(gone)
                return
            self._stopped.wait(INTERVAL_S)

    def _look(self, client: Any) -> InputGone | None:
        asked = client.describe_topics(TopicCollection(self._topics), request_timeout=_ASK_S)
        for topic, future in asked.items():
            try:
                now = str(future.result(_ASK_S + 1).topic_id)
            except (KafkaException, TimeoutError) as error:
                # Missing for now, or nobody answers: the consumer says so where it matters.
                log.debug("a topic's id cannot be had", topic=topic, error=describe_error(error))
                continue
            if self._known.setdefault(topic, now) != now:
                return InputGone(
                    f"the input is gone: topic {topic} was deleted and made anew while this worker ran (its id was "
                    f"{self._known[topic]}, is {now}), and offsets of the old one mean nothing in it; "
                    "`eos reset --from earliest` reads the new one from its beginning"
                )
        return None
