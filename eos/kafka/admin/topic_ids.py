"""Detects that a topic was deleted and recreated while a worker runs, by its topic id (KIP-516).

With a recreated source, the client continues at the old topic's offset and would silently skip the new topic's records
before it (measured: librdkafka 2.16 on 4.3.1). With a recreated changelog, the App's state is lost, and a restore would
find only later changes. A changelog that is deleted and not recreated is detected too; without its source a worker
ends by itself. Owns the check, once a second on the watcher's thread, and the error message. It never touches the
consumer; the caller decides what to do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable

from eos import log
from eos.errors import ConfigurationError, EosError, InputGone
from eos.kafka.admin.watcher import Check, Watcher
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World

INTERVAL_S = 1.0
_MISSING_S, _PAUSE_S = 5.0, 0.2  # a broker learns of topics only a moment after its start
_REQUEST_TIMEOUT_S = 5.0


class TopicIds:
    """Checks the ids of `topics` and `changelogs` until `stop`, and calls `changed` once, on the watcher's thread.

    `known` has the ids of earlier checks, and receives later ones."""

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
        self._settings, self._on_change, self._changelogs = settings, changed, frozenset(changelogs)
        self._known_ids: dict[str, str] = {} if known is None else known
        self._missing_since: dict[str, float] = {}
        self._check = Check(self._run, self._on_error)
        self.watch(topics)

    def watch(self, topics: Iterable[str]) -> None:
        """Check these topics and the changelogs from the next check on."""
        self._topics = sorted(self._changelogs.union(topics))

    def learn_changelog_ids(self, admin: ClusterAdmin) -> None:
        """Learn the ids of the changelogs, if the cluster answers."""
        if self._changelogs:
            with contextlib.suppress(EosError):
                self._find_changed(admin)

    def check_now(self) -> None:
        """Check on the caller's thread. Raise InputGone if a topic was recreated or a changelog deleted.

        Waits up to 5 s for a missing changelog. Returns if nothing changed or the cluster does not answer."""
        try:
            with self._world.admin(self._settings, timeout_ms=round(_REQUEST_TIMEOUT_S * 1000)) as admin:
                while (gone := self._find_changed(admin)) is None and self._missing_since:
                    self._world.sleep(_PAUSE_S)
        except EosError as error:
            log.debug("topic ids unavailable", error=str(error))
            return
        if gone is not None:
            raise gone

    def start(self, watcher: Watcher) -> None:
        watcher.add(self._check, 0.0)

    def stop(self, watcher: Watcher) -> None:
        watcher.remove(self._check)

    def _run(self, admin: ClusterAdmin) -> float | None:
        if (gone := self._find_changed(admin)) is None:
            return INTERVAL_S
        self._on_change(gone)
        return None

    def _on_error(self, error: Exception) -> float | None:
        # If the cluster does not answer, the consumer reports the outage where it matters.
        log.debug("topic ids unavailable", error=str(error))
        return None if isinstance(error, ConfigurationError) else INTERVAL_S

    def _find_changed(self, admin: ClusterAdmin) -> InputGone | None:
        # The answer omits sources that are missing.
        found = admin.topic_ids(self._topics)
        for topic, now in found.items():
            if (known := self._known_ids.setdefault(topic, now)) != now:
                return self._recreated(topic, f"its id was {known}, is {now}")
        unseen = (self._changelogs & self._known_ids.keys()) - found.keys()
        missing = admin.missing_topics(unseen) if unseen else set[str]()
        now_s = self._world.now()
        self._missing_since = {topic: self._missing_since.get(topic, now_s) for topic in missing}
        for topic, since in self._missing_since.items():
            if now_s - since >= _MISSING_S:
                return _state_lost(f"the changelog {topic} was deleted while this worker ran")
        return None

    def _recreated(self, topic: str, ids: str) -> InputGone:
        if topic in self._changelogs:
            what = f"the changelog {topic} was deleted and recreated while this worker ran ({ids})"
            return _state_lost(what, "delete the new topic, then ")
        return InputGone(
            f"the input is gone: topic {topic} was deleted and recreated while this worker ran ({ids}), and offsets of "
            "the old topic are invalid in the new one: `eos reset --from earliest` reads it from its beginning"
        )


def _state_lost(what: str, first: str = "") -> InputGone:
    return InputGone(
        f"state is gone: {what}",
        remedy=f"{first}restore the old one, or continue without the lost state by `eos reset MODULE:APP "
        "--accept-changelog`",
    )
