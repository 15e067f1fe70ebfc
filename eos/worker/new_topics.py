"""Finds topics that an App's patterns match, at the start and while a worker runs.

Owns the queries, which run on the watcher's thread while a worker runs, and the rule that decides when a topic may be
read. Every broker must know the topic with its leaders. librdkafka queries any broker, and reports a topic that this
broker does not know yet as an error, which ends the worker. If the topic's function has dead letters, the dead-letter
topic must exist too; otherwise the first dead letter would end the worker. This module never touches the consumer or
the worker's own App: new topics wait until the worker takes them with `arrived`.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Collection, Mapping
from types import MappingProxyType

from eos import log
from eos.app.definition import App
from eos.encoding.dead_letters import dead_letter_topic
from eos.errors import ConfigurationError, EosError, Unavailable
from eos.kafka.admin.facts import check_clients, cluster_metadata, connect, create_topics
from eos.kafka.admin.watcher import Check, Watcher
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World

_ASK_S = 5.0
_SOON_S = 0.5  # pause before the next check of a topic that some broker does not know yet
_LOOKS = 20  # checks of a topic that lacks leaders, before it is checked only at the normal interval
_REFRESH_MS = 300_000  # librdkafka's default, for new partitions


def topic_names(settings: Settings, timeout_s: float, world: World = REAL) -> set[str]:
    """Return the names of all visible topics. Raise Unavailable, NotAuthorised, ConfigurationError."""
    check_clients(settings, world)
    known = cluster_metadata(connect(settings, timeout_s, world), settings.bootstrap_servers, _ASK_S).topics
    return {name for name, topic in known.items() if topic.error is None}


def find_missing_dead_letter_topics(app: App, there: Collection[str]) -> dict[str, str]:
    """Return the matching topics that cannot be read yet, each with its missing dead-letter topic."""
    dead = {name: dead_letter_topic(name) for name, r in app.match_topics(there).items() if r.on_error.verdict == "dlq"}
    return {name: letters for name, letters in dead.items() if letters not in there}


def explain_unread(topic: str, letters: str) -> str:
    return f"topic {topic} matches a pattern, but its dead-letter topic {letters} does not exist, so it is not read"


def require_topics(app: App, servers: str, waiting: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise Unavailable if an App has nothing to read, with the pattern or the first missing dead-letter topic."""
    if not app.topics:
        for topic, letters in waiting.items():
            raise Unavailable(f"{explain_unread(topic, letters)}; create it, or let --create-topics do so")
        patterns = " or ".join(repr(pattern.pattern) for pattern in app.patterns)
        raise Unavailable(f"no topic at {servers} matches {patterns}, and the App {app.id!r} names none")


class NewTopics:
    """Searches for new topics of one App every `topic.metadata.refresh.interval.ms`, and reports each topic once."""

    def __init__(self, settings: Settings, app: App, world: World = REAL) -> None:
        self._settings, self._app, self._world = settings, copy.copy(app), world
        self._interval_s = int(settings.get("topic.metadata.refresh.interval.ms", _REFRESH_MS)) / 1000
        self._new_topics: deque[list[str] | ConfigurationError] = deque()
        self._warned_topics: set[str] = set()
        self._check_counts: Counter[str] = Counter()  # how often each topic was checked and some broker did not know it
        self._check = Check(self._search, self._on_error)

    def now(self) -> list[str]:
        """Return the topics that can be read at the start; the session waits for brokers that do not know all of them
        yet.

        Raises NotAuthorised, ConfigurationError, and Unavailable (also if the App has nothing to read).
        """
        there = topic_names(self._settings, self._settings["eos.startup.timeout.ms"] / 1000, self._world)
        if self._settings["eos.create.topics"]:
            there |= self._try_to_create_topics(find_missing_dead_letter_topics(self._app, there))
        waiting = self._warn_of_waiting(there)
        names = self._app.add_topics(there - waiting.keys())
        require_topics(self._app, self._settings.bootstrap_servers, waiting)
        return names

    def watch(self, watcher: Watcher) -> None:
        """Search until the watcher stops, unless the client's own metadata refresh is off (an interval of -1)."""
        if self._interval_s > 0:
            watcher.add(self._check, self._interval_s)

    def arrived(self) -> list[str]:
        """Return the topics found since the last call; any thread may call this.

        Raises ConfigurationError if two functions match one topic.
        """
        found: list[str] = []
        while self._new_topics:
            topics = self._new_topics.popleft()
            if isinstance(topics, ConfigurationError):
                raise topics
            found += topics
        return found

    def _warn_of_waiting(self, there: set[str]) -> dict[str, str]:
        """Return the topics that lack a dead-letter topic, and warn once about each."""
        waiting = find_missing_dead_letter_topics(self._app, there)
        for topic in waiting.keys() - self._warned_topics:
            log.warning(explain_unread(topic, waiting[topic]), function=self._app.match_topics([topic])[topic].name)
        self._warned_topics |= waiting.keys()
        return waiting

    def _create_topics(self, letters: dict[str, str]) -> set[str]:
        """Create dead-letter topics with as many partitions as their sources."""
        if not letters:
            return set()
        client = connect(self._settings, _ASK_S, self._world)
        known = cluster_metadata(client, self._settings.bootstrap_servers, _ASK_S)
        wanted = {dead: len(known.topics[topic].partitions) for topic, dead in letters.items() if topic in known.topics}
        create_topics(self._settings, wanted, len(known.brokers), world=self._world)
        return set(wanted)

    # ---- while the worker runs ------------------------------------------------------------------------------------

    def _on_error(self, error: Exception) -> float | None:
        if isinstance(error, ConfigurationError):
            self._new_topics.append(error)  # two functions match the same topic, and nothing decides between them
            return None
        # If no broker responds, the consumer reports the outage where it matters.
        level = log.debug if isinstance(error, EosError) else log.warning
        level("topics cannot be listed", error=f"{type(error).__name__}: {error}")
        return self._interval_s

    def _search(self, admin: ClusterAdmin) -> float:
        """Search once, and return the seconds until the next search."""
        there = admin.topics()
        if not (found := self._app.match_topics(there)):
            return self._interval_s
        everywhere = admin.known_to_all_brokers(found)
        soon = self._may_become_readable(found.keys() - everywhere)
        if self._settings["eos.create.topics"]:
            there |= self._try_to_create_topics(
                find_missing_dead_letter_topics(self._app, everywhere | (there - found.keys()))
            )
        if new := self._app.add_topics(everywhere - self._warn_of_waiting(there).keys()):
            self._new_topics.append(new)
        return min(_SOON_S, self._interval_s) if soon else self._interval_s

    def _may_become_readable(self, topics: Collection[str]) -> bool:
        """Return whether one of these topics may become readable soon. They are unknown to a broker or lack a
        leader."""
        for topic in topics:
            self._check_counts[topic] += 1
            if self._check_counts[topic] == _LOOKS:
                log.warning("matching topic not known to all brokers", topic=topic)
        return any(self._check_counts[topic] < _LOOKS for topic in topics)

    def _try_to_create_topics(self, letters: dict[str, str]) -> set[str]:
        try:
            return self._create_topics(letters)
        except EosError as error:
            if not letters.keys() <= self._warned_topics:
                log.warning("topics of dead letters cannot be created", error=str(error))
            return set()
