"""Notices that a topic was deleted and recreated under a running worker (KIP-516: a topic has an id of its own).

A source: the client goes on at the old topic's offset in the new one, and what the new topic holds before it would be
skipped without a word (measured: librdkafka 2.16 on 4.3.1). A changelog: the state that the App kept is gone, and what
it changes from then on would be all that a restore finds. One that is deleted and not recreated is noticed too; without
its source a worker ends by itself. Owns the looking, once a second on a thread of its own, and the sentence.
It never touches the consumer; what to do about it is the caller's.

It asks with kafka-python, which asks any broker and waits between two attempts to connect. librdkafka's AdminClient
asks the broker that the answer before named as the controller: in KRaft any that was thought alive. While that one is
down, it connects at every change of a connection's state, the failure of its own attempt before too, and
reconnect.backoff.ms does not hold (RD_KAFKA_OP_CONNECT sets rkb_ts_reconnect to 0): measured with each of three brokers
killed, 3,500 attempts and 0.4 s of CPU a second, and no answer until it is back or five minutes are over.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable

from eos import log
from eos.errors import ConfigurationError, EosError, InputGone
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World

INTERVAL_S = 1.0
_DELETED_S, _PAUSE_S = 5.0, 0.2  # a broker that has just started may not know a topic yet
_ASK_S = 5.0


class TopicIds:
    """Looks at the ids of `topics` and `changelogs` until `stop`; calls `changed` once, from its thread. `known` has
    the ids of an earlier look, to which later ones are added."""

    def __init__(
        self,
        settings: Settings,
        topics: Iterable[str],
        changed: Callable[[InputGone], None],
        world: World = REAL,
        changelogs: Collection[str] = (),
        known: dict[str, str] | None = None,
    ) -> None:
        self._world = world
        self._settings, self._changed, self._changelogs = settings, changed, frozenset(changelogs)
        self._known: dict[str, str] = {} if known is None else known
        self._missing_since: dict[str, float] = {}
        self._stopped = threading.Event()
        self.watch(topics)

    def watch(self, topics: Iterable[str]) -> None:
        """Look at these topics, and the changelogs, from the next look on."""
        self._topics = sorted(self._changelogs.union(topics))

    def note(self, admin: ClusterAdmin) -> None:
        """Learn the ids of changelogs, as far as the cluster answers."""
        if self._changelogs:
            with contextlib.suppress(EosError):
                self._look(admin)

    def look_now(self) -> None:
        """Look on the caller's thread. Raises InputGone; waits a moment for a changelog that is missing. Returns where
        nothing changed or the cluster does not answer."""
        try:
            with self._world.admin(self._settings, timeout_ms=round(_ASK_S * 1000)) as admin:
                while (gone := self._look(admin)) is None and self._missing_since:
                    self._world.sleep(_PAUSE_S)
        except EosError as error:
            log.debug("topic ids unavailable", error=str(error))
            return
        if gone is not None:
            raise gone

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
        # A source that is missing for now is left out.
        found = admin.topic_ids(self._topics)
        for topic, now in found.items():
            if (known := self._known.setdefault(topic, now)) != now:
                return self._recreated(topic, f"its id was {known}, is {now}")
        unseen = (self._changelogs & self._known.keys()) - found.keys()
        missing = admin.missing_topics(unseen) if unseen else set[str]()
        now_s = self._world.now()
        self._missing_since = {topic: self._missing_since.get(topic, now_s) for topic in missing}
        for topic, since in self._missing_since.items():
            if now_s - since >= _DELETED_S:
                return _state_gone(f"the changelog {topic} was deleted while this worker ran")
        return None

    def _recreated(self, topic: str, ids: str) -> InputGone:
        if topic in self._changelogs:
            what = f"the changelog {topic} was deleted and recreated while this worker ran ({ids})"
            return _state_gone(what, "delete the new topic, then ")
        return InputGone(
            f"the input is gone: topic {topic} was deleted and recreated while this worker ran ({ids}), and offsets of "
            "the old one mean nothing in it; `eos reset --from earliest` reads the new one from its beginning"
        )


def _state_gone(what: str, first: str = "") -> InputGone:
    return InputGone(
        f"state is gone: {what}",
        remedy=f"{first}bring the old one back, or go on without what was lost by `eos reset MODULE:APP "
        "--accept-changelog`",
    )
