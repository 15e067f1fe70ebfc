"""Who took our transactional.id over: what exit 79 says of it, as far as the cluster tells.

Owns what a session commits beside each offset about itself (docs/reference/formats.md) and reads it of others.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from eos import log
from eos.encoding.lineage import OFFSET_FORMAT
from eos.errors import EosError
from eos.kafka.client.cluster import TransactionalIdState
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.records import parse_metadata
from eos.session.producer import TransactionalProducer


class Successor:
    def __init__(self, settings: Settings, world: World) -> None:
        self._settings, self._world = settings, world
        self._transactional_id: str = settings["transactional.id"]
        self._started_at_ms = int(world.unix() * 1000)
        self.ours("our start")

    def ours(self, by: str) -> None:
        """Nobody newer owns the transactional.id now, as `by` shows."""
        self._ours_until, self._ours_by = self._world.unix(), by

    def owner(self, producer: TransactionalProducer) -> dict[str, object]:
        """Committed beside each offset, so that a fenced instance can say who replaced it."""
        identity = producer.client.identity
        return {
            "v": OFFSET_FORMAT,
            "instance": self._transactional_id,
            "host": socket.gethostname(),
            "since": self._started_at_ms,
            "epoch": identity.epoch if identity else None,
        }

    def told(self, producer: TransactionalProducer, answer: TransactionalIdState | None) -> tuple[str, str]:
        """Who took over and since when, and the numbers of both."""
        mine = producer.identity()
        who = ""
        try:
            with self._world.admin(self._settings) as admin:
                answer = answer or admin.describe(producer.transactional_id)
                metadata = admin.committed_metadata(self._settings["group.id"])
                who = successor_of(self._transactional_id, self._started_at_ms, metadata)
        except EosError as error:
            log.debug("the owner could not be asked", error=str(error))
        theirs = ""
        if answer is not None:
            since = f" since {_clock(answer.start_ms / 1000)}" if answer.start_ms > 0 else ""
            theirs = f"; now producer id {answer.producer_id} epoch {answer.epoch} in state {answer.state}{since}"
        if not who and (answer is None or answer.start_ms <= 0):
            who = f"; initialised after {_clock(self._ours_until)} ({self._ours_by})"
        ours = f"producer id {mine.producer_id} epoch {mine.epoch}" if mine else "its epoch was not known yet"
        return who, f"ours: {ours}{theirs}"


def successor_of(transactional_id: str, our_start_ms: int, metadata: Sequence[str]) -> str:
    """The process that was started after ours under the same transactional.id and has committed, from the committed
    offsets' metadata: "; the last commit is by ..."; "" when there is none, as before its first commit."""
    owners = []
    for text in metadata:
        owner = parse_metadata(text)
        try:
            if owner["instance"] == transactional_id and owner["since"] > our_start_ms:
                owners.append((owner["since"], owner["host"]))
        except (KeyError, TypeError):
            continue  # somebody else's metadata
    if not owners:
        return ""
    since, host = max(owners)
    return f"; the last commit is by {transactional_id} on {host}, started {_clock(since / 1000)}"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
