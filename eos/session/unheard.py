"""Notices partitions that the group gave to this member and of which its client does not know.

Under group.protocol=consumer (KIP-848) the coordinator names what it gives once, in its answer to a heartbeat.
librdkafka (2.16.0) gives up an answer that takes longer than the heartbeat's interval, and the heartbeat behind it does
not ask for what it missed: nobody ever reads those partitions, and nothing says so (docs/findings.md). So behind each
answer that was too late the coordinator is asked what this member has, with a client of its own.

Owns when it is asked, and the comparison. It never touches the consumer; what to do about it is the caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec

from eos import log
from eos.errors import EosError
from eos.kafka.settings import Settings
from eos.kafka.world import World
from eos.session.positions import TopicPartition as Partition

COORDINATOR = "GroupCoordinator"  # librdkafka's logical broker for it: heartbeats and questions for offsets
_LOOK_S = 60.0  # behind the last late answer
_PAUSE_S = 2.0
_PATIENCE_S = 10.0  # what the coordinator gave a moment ago is on its way to the client


class _Broker(msgspec.Struct):
    req_timeouts: int = 0


class _Statistics(msgspec.Struct):
    brokers: dict[str, _Broker] = {}


class _Given(NamedTuple):
    asked_at: float
    partitions: frozenset[Partition]


_decode = msgspec.json.Decoder(_Statistics).decode


class Unheard:
    def __init__(self, settings: Settings, group: str, world: World) -> None:
        self._settings, self._group, self._world = settings, group, world
        self._late = 0
        self._until = 0.0
        self._given: _Given | None = None  # what the coordinator said last, if it did
        self._missing_since: float | None = None
        self._asking = False
        self._stopped = threading.Event()

    def note(self, text: str) -> None:
        """Statistics, as librdkafka gives them. Raises for what are none."""
        late = _decode(text).brokers.get(COORDINATOR, _Broker()).req_timeouts
        if late > self._late:
            self._until = self._world.now() + _LOOK_S
        self._late = late

    def look(self, member_id: Callable[[], str | None], known: Callable[[], Collection[Partition]]) -> set[Partition]:
        """What the member has and its client has not heard of for a while. For the thread that polls, behind a poll:
        what waited there is `known` now."""
        if self._missing_since is None and self._world.now() >= self._until:
            return set()
        if not self._asking and not self._stopped.is_set() and (member := member_id()):
            self._asking = True
            self._world.background("eos-unheard", lambda: self._ask(member))
        if (given := self._given) is None or not (missing := set(given.partitions).difference(known())):
            self._missing_since = None
            return set()
        if self._missing_since is None:
            self._missing_since = given.asked_at
        return missing if given.asked_at - self._missing_since >= _PATIENCE_S else set()

    def stop(self) -> None:
        self._stopped.set()

    def _ask(self, member_id: str) -> None:
        asked_at = self._world.now()
        try:
            with self._world.admin(self._settings) as admin:
                self._given = _Given(asked_at, admin.given(self._group, member_id))
        except EosError as error:
            self._given = None
            log.debug("what the group gave cannot be had", error=str(error), group=self._group)
        finally:
            self._stopped.wait(_PAUSE_S)
            self._asking = False
