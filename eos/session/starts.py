"""Where a group's partitions begin: at their stable committed offset, else by auto.offset.reset.

Owns the starts that nobody committed yet: under `latest` they must be committed at once, or a death before the first
record would lose what came since.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from eos.errors import Unavailable
from eos.kafka.admin.group_history import offsets_expired, read_notes
from eos.kafka.client.client_calls import call_client
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.session.asking import LOOK_S, Asking, NotNow
from eos.session.positions import TopicPartition as Partition

OTHERS = "another member's open transaction"
NEWER = "the place that another member committed just now"


class Starts:
    """Finds where partitions begin. `from_beginning`: topics that are read from their beginning under `latest` too,
    because they are younger than the group or because the group itself writes them; the caller may add more."""

    def __init__(self, asking: Asking, settings: Settings, from_beginning: Collection[str], world: World) -> None:
        self._asking, self._settings, self._from_beginning, self._world = asking, settings, from_beginning, world
        self._group: str = settings["group.id"]
        self.known: dict[Partition, int] = {}
        """Where a consumer before this one began under `latest`, not committed yet: so does this one."""
        self.uncommitted: dict[Partition, int] = {}
        """Where partitions without a committed offset began under `latest`: to be committed at once."""

    def all_uncommitted(self) -> dict[Partition, int]:
        """For `known` of the one that takes this one's place."""
        return self.known | self.uncommitted

    def gone(self, partitions: Collection[Partition]) -> None:
        """They are not ours any more: they begin where their next owner says."""
        self.uncommitted = {p: offset for p, offset in self.uncommitted.items() if p not in partitions}

    def committed(self) -> None:
        """Note that what was uncommitted is committed."""
        self.uncommitted = {}

    def resolved(self, stable: Mapping[Partition, TopicPartition]) -> None:
        """These are the group's committed offsets now."""
        self.uncommitted = {p: offset for p, offset in self.uncommitted.items() if stable[p].offset < 0}

    def resolve(self, partitions: Collection[Partition]) -> dict[Partition, TopicPartition]:
        """Where each new partition begins: its stable committed offset, else by auto.offset.reset. Raises NotNow, and
        InputGone where there was a committed offset once."""
        starts = self._committed(partitions)
        missing = [p for p, tp in starts.items() if tp.offset < 0]
        reset = str(self._settings.get("auto.offset.reset", "earliest"))
        # Before the notes, which take clients of their own: a partition may have no leader for hours.
        ends = self._ends_to_begin_at(missing) if reset == "latest" else {}
        try:
            found = call_client(read_notes, self._settings, self._group, missing, self._world)
        except Unavailable as error:
            raise NotNow(f"the notes that tell whether the group ran before: {error}") from error
        if found:
            self._refuse_forgotten(found, reset)
        self.uncommitted |= ends
        starts |= {p: TopicPartition(*p, OFFSET_BEGINNING) for p in missing}
        return starts | {p: TopicPartition(*p, end) for p, end in ends.items()}

    def _committed(self, partitions: Collection[Partition], waits_for: str = OTHERS) -> dict[Partition, TopicPartition]:
        """Stable ones. Raises NotNow."""
        found = self._asking.try_committed(sorted(partitions))
        if found is None:
            raise NotNow(waits_for)
        return found

    def _refuse_forgotten(self, noted_since: Mapping[Partition, int], reset: str) -> None:
        """A note comes behind its commit, so a place that is there now was only committed after we had asked: by the
        member that has them, if this one stood still. Raises InputGone, NotNow."""
        committed = self._committed(noted_since)
        if gone := {p: when for p, when in noted_since.items() if committed[p].offset < 0}:
            raise offsets_expired(self._group, gone, reset)
        raise NotNow(NEWER)

    def _ends_to_begin_at(self, partitions: Collection[Partition]) -> dict[Partition, int]:
        """Return the ends of the partitions that begin there under `latest`. A partition that is younger than the
        group's first commit of its topic begins at its beginning. Raises NotNow."""
        known = dict.fromkeys(self._from_beginning, True)
        ends = {}
        for topic, partition in partitions:
            if (start := self.known.get((topic, partition))) is not None:
                ends[topic, partition] = start
                continue
            if topic not in known:
                known[topic] = self._has_commits(topic)
            if not known[topic]:
                _, ends[topic, partition] = self._asking.watermarks((topic, partition), LOOK_S)
        return ends

    def _has_commits(self, topic: str) -> bool:
        """Whether the group has committed offsets of it. Raises NotNow while these are not stable."""
        committed = self._committed(self._asking.partitions_of(topic), f"committed offsets of {topic} are not stable")
        return any(tp.offset >= 0 for tp in committed.values())
