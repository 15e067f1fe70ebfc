"""Resets an App together with its state: `eos reset --from ... --with-state`, while the group has no members.

Owns the order of the steps. After a crash at any step the App refuses to start; the same command then completes the
reset.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from eos.app.definition import App
from eos.app.routes import changelog_of
from eos.encoding import lineage
from eos.errors import Unavailable, UsageError, describe_error, not_authorised
from eos.kafka.admin import facts, tail
from eos.kafka.admin.reset import UNCHANGED, GroupOffsets, Move, Target
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World
from eos.records import format_position, merge_metadata
from eos.state import changelog, notes

_REQUEST_TIMEOUT_S, _DELETE_TIMEOUT_S = 10.0, 30.0
_DENIED = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED)


class FullReset:
    """Plans and carries out `eos reset --with-state`.

    The reset moves the offsets of the App's input to `where`, empties the App's state and deletes the records of the
    topics between its functions. Nothing changes before `carry_out`. Raises UsageError, ConfigurationError,
    Unavailable, NotAuthorised.
    """

    def __init__(self, settings: Settings, app: App, where: Target, offsets: GroupOffsets, world: World = REAL) -> None:
        """Plan the reset; `offsets` covers the App's input topics, without the topics between its functions."""
        self._settings, self._app, self._world = settings, app, world
        self._client = facts.connect(settings, _REQUEST_TIMEOUT_S, world)
        self._all = GroupOffsets(settings, app.id, app.topics, world=world)
        self.moves = offsets.plan(where)
        """The new offset of each input partition."""
        named = {move.partition for move in self.moves}
        if missing := [move.partition for move in offsets.plan(Target("earliest")) if move.partition not in named]:
            raise UsageError(
                f"--with-state resets all partitions: --from must name one in {format_position(*missing[0])} too"
            )
        self.between = {
            topic: tail.topic_offsets(settings, topic, _REQUEST_TIMEOUT_S, world) for topic in sorted(app.chained)
        }
        """The offset spans of the topics between functions, by topic and partition."""
        for topic, spans in self.between.items():
            for partition, span in spans.items():
                if span.stable < span.end:
                    raise Unavailable(
                        f"{format_position(topic, partition)} has an open transaction: wait for its timeout",
                        remedy="`eos txn find-hanging` names it",
                    )
        self.changelogs = [changelog_of(app.id, route) for route in app.stateful]
        self._check_rights()

    def _check_rights(self) -> None:
        for topic in [*self.changelogs, *self.between]:
            operations = facts.describe_topic(self._client, topic).operations
            if operations is not None and "DELETE" not in operations:
                raise not_authorised(f"topic {topic}", "DELETE")

    @property
    def offsets_read_again(self) -> int:
        """Return how many offsets of the input are read again."""
        return sum(max((move.low if move.before is None else move.before) - move.after, 0) for move in self.moves)

    def carry_out(self) -> None:
        """Carry out the reset.

        The first step marks the reset in the offset metadata, so no worker starts until the last step replaces the
        mark.
        """
        marked = self._all.plan(UNCHANGED)
        there = {move.partition for move in marked}
        marked += [dataclasses.replace(move, after=move.low) for move in self.moves if move.partition not in there]
        self._all.commit([_with_metadata(move, {notes.KEY: notes.RESETTING}) for move in marked])
        for topic in self.changelogs:
            self._delete_changelog(topic)
        changelog.create_missing(self._settings, self._app.id, self._app.stateful, self._world)
        ends = {topic: self._empty(topic, spans) for topic, spans in self.between.items()}
        after = [move for topic in ends for move in self._at_end(topic, ends[topic])]
        moves = [*self.moves, *after]
        partitions = Counter(move.partition[0] for move in moves)  # the moves of a topic include all of its partitions
        self._all.commit([self._with_first_note(move, partitions[move.partition[0]]) for move in moves])

    def _with_first_note(self, move: Move, partitions: int) -> Move:
        """Return the move with the offset metadata that a worker notes before its first record."""
        topic, _ = move.partition
        route, note = self._app.routes[topic], None
        if route.has_state:
            note = notes.make_offset_note(route, 0, partitions).entries()[notes.KEY]
        return _with_metadata(move, {notes.KEY: note, lineage.KEY: None})

    def _at_end(self, topic: str, ends: Mapping[int, int]) -> Sequence[Move]:
        target = Target("end", offsets={(topic, partition): end for partition, end in ends.items()})
        return GroupOffsets(self._settings, self._app.id, [topic], world=self._world).plan(target)

    def _delete_changelog(self, topic: str) -> None:
        """Recreate the changelog with the same configuration, since brokers delete no records of a compacted topic."""
        there = facts.describe_topic(self._client, topic)
        if not there.exists:
            return
        config = {**changelog.CONFIG, **facts.topic_overrides(self._client, topic)}
        (source,) = (route.sources[0] for route in self._app.stateful if changelog_of(self._app.id, route) == topic)
        wanted = {topic: facts.describe_topic(self._client, source).partitions}
        _wait_for(self._client.delete_topics([topic], operation_timeout=_DELETE_TIMEOUT_S)[topic], topic)
        deadline = self._world.now() + _DELETE_TIMEOUT_S
        # The name stays taken until the brokers have removed the old topic.
        while not facts.create_topics(self._settings, wanted, there.replicas, config=config, world=self._world):
            if self._world.now() > deadline:
                raise Unavailable(f"topic {topic} was deleted but still exists after {_DELETE_TIMEOUT_S:.0f} s")
            self._world.sleep(0.1)

    def _empty(self, topic: str, spans: Mapping[int, tail.OffsetRange]) -> dict[int, int]:
        """Delete the topic's records and return the end offset of each partition.

        A compacted topic keeps its records; the group continues after them.
        """
        ends = {partition: span.end for partition, span in spans.items()}
        asked = self._client.delete_records([TopicPartition(topic, partition, end) for partition, end in ends.items()])
        for future in asked.values():
            _wait_for(future, topic, but=KafkaError.POLICY_VIOLATION)
        return ends


def _with_metadata(move: Move, entries: Mapping[str, object]) -> Move:
    return dataclasses.replace(move, metadata=merge_metadata(move.metadata, entries))


def _wait_for(future: Any, topic: str, but: int | None = None) -> None:
    """Wait for the result. Raise NotAuthorised or Unavailable, unless the request failed with the code `but`."""
    try:
        future.result(_DELETE_TIMEOUT_S)
    except KafkaException as error:
        code = error.args[0].code()
        if code in _DENIED:
            raise not_authorised(f"topic {topic}", "DELETE") from error
        if code != but:
            raise Unavailable(f"topic {topic} cannot be emptied: {describe_error(error)}") from error
