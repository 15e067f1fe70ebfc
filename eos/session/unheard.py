"""Notices partitions that the group gave to this member and of which its client does not know.

Under group.protocol=consumer (KIP-848) the coordinator names what a member has where it changes, in the answer to a
heartbeat. librdkafka (2.16.0) gives up an answer that takes longer than the heartbeat's interval, and the heartbeat
behind it does not ask for what it missed: nobody ever reads those partitions, and nothing says so (docs/findings.md).
So behind each answer that was too late the coordinator is asked what this member has, with a client of its own.

Owns when it is asked, and the comparison. It never touches the consumer; what to do about it is the caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import NamedTuple

from eos import log
from eos.errors import EosError, NotAuthorised
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.session.positions import TopicPartition as Partition

_PAUSE_S = 5.0
# What the coordinator gave a moment ago is on its way. Brokers allow heartbeats every 15 s at the most
# (group.consumer.max.heartbeat.interval.ms).
_PATIENCE_S = 20.0


class Given(NamedTuple):
    """What the coordinator says that the member has. `asked_at`: World.now()."""

    asked_at: float
    partitions: frozenset[Partition]


class Unheard:
    def __init__(self, settings: Settings, group: str, world: World) -> None:
        self._settings, self._group, self._world = settings, group, world
        self._late = 0
        self._looking = False
        self._since = 0.0  # answers to what was asked before do not count
        self._missing: dict[Partition, float] = {}  # when it was asked for the first answer of a row that named it
        self._given: Given | None = None  # not looked at yet
        self._asking = False
        self._stopped = threading.Event()

    def note(self, late: int) -> None:
        """So many answers of the coordinator came too late so far."""
        if late > self._late and not self._settings.classic_group:
            self._looking = True
            self.heard()  # a coordinator that is slow is waited for: the next answers may come in time
        self._late = late

    def heard(self) -> None:
        """The client told of partitions that were given or taken: it knows all that the member has."""
        self._since, self._missing = self._world.now(), {}

    def look(self, member_id: Callable[[], str | None], known: Callable[[], Collection[Partition]]) -> set[Partition]:
        """What the member has and its client has not heard of for a while. For the thread that polls, behind a poll:
        what waited there is `known` now."""
        if not self._looking:
            return set()
        if not self._asking and not self._stopped.is_set() and (member := member_id()):
            self._asking = True
            self._world.background("eos-unheard", lambda: self._ask(member))
        given, self._given = self._given, None
        if given is None or given.asked_at < self._since:
            return set()
        missing = given.partitions.difference(known())
        self._missing = {partition: self._missing.get(partition, given.asked_at) for partition in missing}
        self._looking = bool(missing) or given.asked_at - self._since < _PATIENCE_S
        return {p for p, first in self._missing.items() if given.asked_at - first >= _PATIENCE_S}

    def stop(self) -> None:
        self._stopped.set()

    def _ask(self, member_id: str) -> None:
        try:
            with self._world.admin(self._settings) as admin:
                while self._looking and not self._stopped.is_set():
                    asked_at = self._world.now()
                    self._given = Given(asked_at, admin.assigned_partitions(self._group, member_id))
                    self._stopped.wait(_PAUSE_S)
        except NotAuthorised as error:
            log.warning("partitions that this client was not told of cannot be noticed", error=str(error))
            self.stop()
        except EosError as error:
            # Nobody answers: it is asked again.
            log.debug("what the group gave cannot be had", error=str(error), group=self._group)
            self._stopped.wait(_PAUSE_S)
        except Exception as error:  # noqa: BLE001 - a fault of this thread's must not end the session
            log.warning("what the group gave cannot be had", error=repr(error), group=self._group)
            self._stopped.wait(_PAUSE_S)
        finally:
            self._asking = False
