"""Lets some state of a function begin empty on purpose: `eos state begin`, while the group has no members.

A worker exits with 78 if a function was renamed or has other states than those that it stored. This command confirms
such a change. It deletes the entries of removed states, so that they do not come back under a new state of the same
name. After a crash at any step the function is refused as before; the same command then completes the change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from confluent_kafka import KafkaError, Message

from eos import log
from eos.app.cells import EVENT_TIMERS, HEADER, OPEN_SESSIONS, parse_cell
from eos.app.definition import App
from eos.app.routes import Route, changelog_of
from eos.errors import ConfigurationError, Unavailable, UsageError, describe_error, not_authorised
from eos.kafka.admin import facts, tail
from eos.kafka.admin.reset import UNCHANGED, GroupOffsets, Move
from eos.kafka.client.failures import explain_denied
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World
from eos.records import format_position, merge_metadata
from eos.state import changelog, notes

_REQUEST_TIMEOUT_S, _WRITE_TIMEOUT_S = 10.0, 60.0


class _Leftovers(NamedTuple):
    """Holds the entries of one changelog partition that belong to states the function no longer has.

    `cells` are their changelog keys. `header` is True if the partition has a header.
    """

    cells: list[bytes]
    header: bool


class EmptyStates:
    """Plans and carries out `eos state begin`, a change of one function's states.

    The states in `starting_empty` begin empty; the entries of the states in `removed` are deleted. Nothing changes
    before `carry_out`. Raises ConfigurationError, InputGone, Temporary, Unavailable, NotAuthorised, and UsageError if
    the function's states have not changed.
    """

    def __init__(self, settings: Settings, app: App, route: Route, offsets: GroupOffsets, world: World = REAL) -> None:
        self._settings, self._app_id, self._route, self._offsets, self._world = settings, app.id, route, offsets, world
        self.topic = changelog_of(app.id, route)
        client = facts.connect(settings, _REQUEST_TIMEOUT_S, world)
        self._changelog_fit = changelog.check_fit(client, app.id, route, world)
        self._moves = offsets.plan(UNCHANGED)
        notes.check_not_interrupted(move.metadata for move in self._moves)
        spans = (
            {} if self._changelog_fit.missing else tail.topic_offsets(settings, self.topic, _REQUEST_TIMEOUT_S, world)
        )
        self._require_complete_changelog(spans)
        kept: dict[str, str] = {}
        self._leftovers = {
            partition: self._find_leftovers(partition, span, kept) for partition, span in sorted(spans.items())
        }
        have = notes.current_header(app.id, route).stores
        self.removed = sorted(name for name, shape in kept.items() if have.get(name) != shape)
        self.starting_empty = sorted(name for name, shape in have.items() if kept.get(name) != shape)
        if not self.removed and not self.starting_empty and all(map(self._is_known, self._moves)):
            raise UsageError(
                f"the states of {route.name} have not changed ({', '.join(have)}): there is no state to empty",
                remedy="`eos reset MODULE:APP --from earliest --with-state` empties them and handles the input again",
            )

    @property
    def entries(self) -> int:
        """Return how many entries are deleted."""
        return sum(len(left.cells) for left in self._leftovers.values())

    @property
    def partitions(self) -> int:
        return len(self._moves)

    def _is_known(self, move: Move) -> bool:
        try:
            notes.require_offset_note(self._route, move.metadata)
        except ConfigurationError:
            return False
        return True

    def _require_complete_changelog(self, spans: Mapping[int, tail.OffsetRange]) -> None:
        """Raise an error if a part of the changelog is lost; new offset metadata would hide the loss."""
        ends = {}
        for move in self._moves:
            beside = notes.read_offset_note(move.metadata)
            if beside is not None and beside.function == self._route.name:
                ends[move.partition[1]] = beside.end
        nothing = tail.OffsetRange(0, 0, 0)
        for partition in ends.keys() | spans.keys():
            where, span = format_position(self.topic, partition), spans.get(partition, nothing)
            if (error := changelog.explain_unsettled(where, span, ends.get(partition, 0))) is not None:
                raise error

    def _find_leftovers(self, partition: int, span: tail.OffsetRange, kept: dict[str, str]) -> _Leftovers:
        """Find the entries of states that the function does not have, and add the kind of each stored state to
        `kept`."""
        have, found, header = notes.current_header(self._app_id, self._route).stores, dict[bytes, None](), None
        if span.low < span.stable:
            starts, ends = {partition: span.low}, {partition: span.stable}
            with tail.TopicReader(self._settings, self.topic, starts, uncommitted=False, world=self._world) as reader:
                for seen in tail.read_until(reader, ends):
                    cell, value = seen.record.key or b"", seen.record.value
                    if cell == HEADER:
                        header = value
                    elif value is None:
                        found.pop(cell, None)
                    else:
                        found[cell] = None
        if header is None:
            return _Leftovers([], header=False)
        where = f"the changelog {format_position(self.topic, partition)}"
        stores = notes.require_owner(self._app_id, self._route, where, header).stores
        kept.update(stores)
        gone = {name for name, shape in stores.items() if have.get(name) != shape}
        if any(" per " in stores[name] for name in gone):
            gone |= {EVENT_TIMERS, OPEN_SESSIONS}  # these entries belong to the windows, whose state is deleted
        return _Leftovers([cell for cell in found if parse_cell(cell)[0] in gone], header=True)

    def carry_out(self) -> None:
        """Delete the entries, then write the headers, then commit the offsets.

        After a crash between two steps the header or the offset metadata still names the deleted states.
        """
        if self._changelog_fit.missing:
            changelog.create_missing(self._settings, self._app_id, [self._route], self._world)
        self._write(((p, cell, None) for p, left in self._leftovers.items() for cell in left.cells))
        header = notes.current_header(self._app_id, self._route).encoded()
        self._write(((p, HEADER, header) for p, left in self._leftovers.items() if left.header))
        spans = tail.topic_offsets(self._settings, self.topic, _REQUEST_TIMEOUT_S, self._world)
        self._offsets.commit([self._noted(move, spans) for move in self._moves])

    def _noted(self, move: Move, spans: Mapping[int, tail.OffsetRange]) -> Move:
        note = notes.make_offset_note(self._route, spans[move.partition[1]].stable, len(spans)).entries()
        return dataclasses.replace(move, metadata=merge_metadata(move.metadata, note))

    def _write(self, entries: Iterable[tuple[int, bytes, bytes | None]]) -> None:
        failed: list[KafkaError] = []

        def delivered(error: KafkaError | None, _: Message) -> None:
            if error is not None:
                failed.append(error)

        producer = self._world.producer(
            self._settings.admin() | {"enable.idempotence": True, "logger": log.client_logger}
        )
        for partition, cell, value in entries:
            while not failed:
                try:
                    producer.produce(self.topic, value, cell, partition, delivered)
                    break
                except BufferError:
                    producer.poll(0.1)
            producer.poll(0)
        if producer.flush(_WRITE_TIMEOUT_S):
            failed.append(KafkaError(KafkaError._TIMED_OUT))
        if failed:
            if explain_denied(failed[0], topic=self.topic):
                raise not_authorised(f"topic {self.topic}", "WRITE")
            raise Unavailable(f"writing to topic {self.topic} failed: {describe_error(failed[0])}")
