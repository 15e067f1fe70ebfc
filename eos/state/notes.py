"""Defines the notes that a task keeps about its state, so that the next owner can verify it before the first record.

The offset metadata of each source partition holds facts that change with a commit: the function and the names of its
states, the end of its changelog, and the number of partitions. An entry of the changelog, the header, holds facts that
stay the same: the App, the function, its sources and the kind of each store. This module owns both formats
(docs/reference/formats.md) and the checks on them. It does no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any, Final, NamedTuple

from eos.app.cells import SEEN_IDS
from eos.app.routes import Route
from eos.errors import ConfigurationError, InputGone
from eos.records import format_position, parse_metadata
from eos.state.changelog import REBUILD

KEY: Final = "state"
ACCEPTED: Final = "accepted"
"""Stands in the offset metadata in place of a note: the contents of the changelog count as complete (`eos reset
--accept-changelog`).
"""
RESETTING: Final = "resetting"
"""Stands in the offset metadata while `eos reset --with-state` is under way or was interrupted."""
UNSEEN: Final = -1
"""Stands in place of an end: the offset was committed before the changelog was read (auto.offset.reset=latest)."""
HEADER_FORMAT: Final = 1
_NAMES_BYTES: Final = 1_000
"""The maximum number of bytes that names take in offset metadata. Brokers accept 4,096 bytes of metadata in all."""


class OffsetNote(NamedTuple):
    """Holds the note about a function's state in the metadata of an offset.

    `function`: a function of another name has another changelog. `end`: the end offset of the changelog's partition.
    `partitions`: how many partitions the source and the changelog had. `stores`: the names of the function's states in
    the changelog, sorted. It is empty if the names are too long or if an earlier version wrote it; then only the header
    has them.
    """

    function: str
    end: int
    partitions: int
    stores: tuple[str, ...] = ()

    def entries(self) -> Mapping[str, object]:
        return {KEY: list(self)}


def make_offset_note(route: Route, end: int, partitions: int) -> OffsetNote:
    """Return the note for the offset metadata of this function."""
    stores = _store_names(route)
    return OffsetNote(route.name, end, partitions, stores if sum(map(len, stores)) <= _NAMES_BYTES else ())


def _store_names(route: Route) -> tuple[str, ...]:
    return tuple(sorted(_shapes(route)))


def _shapes(route: Route) -> dict[str, str]:
    """Return the kind of each store by its name in the changelog, including the store that keeps the ids of `once=`."""
    timing = route.timing
    per = "" if timing.windows is None else f" per {timing.windows}, grace {timedelta(milliseconds=timing.grace_ms)}"
    shapes = {store.stored_name: store.shape + per for store in route.values}
    return shapes if timing.once is None else shapes | {SEEN_IDS: "set of ids"}


def read_offset_note(metadata: str | None) -> OffsetNote | None:
    """Return the note in an offset's metadata; None if there is none."""
    match parse_metadata(metadata).get(KEY):
        case [str(name), int(end), int(partitions)]:
            return OffsetNote(name, end, partitions)
        case [str(name), int(end), int(partitions), [*stores]]:
            return OffsetNote(name, end, partitions, tuple(map(str, stores)))
    return None


def accepts_changelog(metadata: str | None) -> bool:
    return parse_metadata(metadata).get(KEY) == ACCEPTED


def check_not_interrupted(committed: Iterable[str | None]) -> None:
    """Raise ConfigurationError if the metadata of a group's offsets says that its reset was interrupted."""
    if any(parse_metadata(metadata).get(KEY) == RESETTING for metadata in committed):
        raise ConfigurationError(
            "`eos reset --with-state` was interrupted, so only some of the App's state is reset",
            remedy="run it again",
        )


def require_offset_note(route: Route, metadata: str | None) -> OffsetNote | None:
    """Return the note at a committed offset of this function. Return None if the changelog may be used without a note.

    Raises ConfigurationError if the records before the offset were handled by a function without this state, with other
    states or with another name. Otherwise the state would silently begin empty.
    """
    check_not_interrupted([metadata])
    if accepts_changelog(metadata):
        return None
    (source,), beside, begin = route.sources, read_offset_note(metadata), _begin_command(route)
    if beside is None:
        raise ConfigurationError(
            f"{route.name} has state now, but handled records of {source} without it before: it would begin empty",
            remedy=f"{begin} confirms that it begins empty; {REBUILD}",
        )
    if beside.function != route.name:
        raise ConfigurationError(
            f"the function {beside.function} kept state for records of {source}, but the App handles them with "
            f"{route.name} now: its state would begin empty",
            remedy=f'name="{beside.function}" in the decorator of {route.name} keeps the state; {begin} confirms that '
            "it begins empty",
        )
    if beside.stores:
        check_stores(route, beside.stores)
    return beside


def require_all_offset_notes(
    routes: Mapping[str, Route], committed: Mapping[tuple[str, int], str]
) -> list[tuple[str, OffsetNote]]:
    """Return each committed source topic with its note; `routes` are the functions with state by their sources.

    Raises ConfigurationError as `require_offset_note` does.
    """
    check_not_interrupted(committed.values())
    kept = [
        (topic, require_offset_note(routes[topic], text)) for (topic, _), text in committed.items() if topic in routes
    ]
    return [(topic, beside) for topic, beside in kept if beside is not None]


def check_stores(route: Route, kept: Collection[str]) -> None:
    """Raise ConfigurationError unless the function has exactly the states named in `kept`."""
    have, begin = _store_names(route), _begin_command(route)
    gone, new = sorted(set(kept) - set(have)), sorted(set(have) - set(kept))
    its, more = ", ".join(gone), ", ".join(new)
    if gone and new:
        raise ConfigurationError(
            f"{route.name} kept the state {its}, but the code has {more} instead, which would begin empty",
            remedy=f'was={{"{new[0]}": "{gone[0]}"}} in its decorator if {new[0]} was named {gone[0]}; {begin} '
            f"deletes {its} and begins with {more} empty",
        )
    if gone:
        raise ConfigurationError(
            f"{route.name} kept the state {its}, which the code no longer has",
            remedy=f"add it again, or delete it with {begin}",
        )
    if new:
        raise ConfigurationError(
            f"the state {more} of {route.name} is new, and would begin empty although records were handled before",
            remedy=f"{begin} confirms that it begins empty; {REBUILD}",
        )


def _begin_command(route: Route) -> str:
    return f"`eos state begin MODULE:APP {route.name}`"


def check_partitions(beside: OffsetNote, source: str, partitions: int) -> None:
    """Raise ConfigurationError if the source and its changelog now have more partitions, which moves keys."""
    if beside.partitions != partitions:
        raise ConfigurationError(
            f"the state of {beside.function} cannot be found: {source} and its changelog had {beside.partitions} "
            f"partitions when it was stored, and have {partitions} now, so keys are in other partitions",
            remedy=f"{REBUILD}, or write the source's records to a topic with as many partitions as before",
        )


class Header(NamedTuple):
    """Holds the header of a changelog's partition. `stores`: the kind of each store by its name in the changelog."""

    app: str
    function: str
    sources: tuple[str, ...]
    stores: Mapping[str, str]

    def encoded(self) -> bytes:
        named: dict[str, Any] = {"v": HEADER_FORMAT, **self._asdict()}
        return json.dumps(named, sort_keys=True, separators=(",", ":")).encode()


def next_header(app: str, route: Route, where: str, before: bytes | None) -> Header:
    """Return the header to write from now on, given the previous header `before`.

    `where` names the place of the state, for example "the changelog app-count-changelog[0]". Raises ConfigurationError
    if it belongs to another App or function, or if a store was removed, is new, or is of another kind.
    """
    now = current_header(app, route)
    if before is None:
        return now
    found = require_owner(app, route, where, before)
    for name, shape in now.stores.items():
        if (was := found.stores.get(name, shape)) != shape:
            raise ConfigurationError(
                f"the state {name} of {route.name} was a {was} when it was stored, and is a {shape} now",
                remedy=f"give the new one another name, or delete the old one with {_begin_command(route)}",
            )
    check_stores(route, found.stores)
    return now


def require_owner(app: str, route: Route, where: str, header: bytes) -> Header:
    """Return the header of a changelog's partition. Raise ConfigurationError if another App or function owns it."""
    found = _decode_header(header, where)
    for what, mine, whose in (("App", app, found.app), ("function", route.name, found.function)):
        if mine != whose:
            raise ConfigurationError(
                f"{where} belongs to the {what} {whose}, but {what} {mine} would write to it",
                remedy=f"rename one {what}: the changelog's name consists of the names of the App and the function",
            )
    return found


def current_header(app: str, route: Route) -> Header:
    return Header(app, route.name, route.sources, _shapes(route))


def _decode_header(header: bytes, where: str) -> Header:
    try:
        found = json.loads(header)
        version = int(found["v"])
        read = Header(str(found["app"]), str(found["function"]), tuple(found["sources"]), dict(found["stores"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"the header of {where} cannot be read: {error!r}") from error
    if version > HEADER_FORMAT:
        raise ConfigurationError(
            f"{where} has format {version}, but this version of eos reads formats up to {HEADER_FORMAT}",
            remedy="run a newer version of eos",
        )
    return read


def never_committed(function: str, source: tuple[str, int], changelog: str) -> InputGone:
    """Return the error for a source partition without a committed offset whose changelog is not empty."""
    where = format_position(*source)
    return InputGone(
        f"{where} has no committed offset, but the changelog {changelog} holds state of {function}: starting at "
        "auto.offset.reset would handle records again that this state already includes",
        remedy=f"set its offset (`eos reset --group ... --topic {source[0]} --from ... --accept-changelog`), or "
        "delete the changelog's topic to begin without state",
    )
