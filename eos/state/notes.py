"""What a task notes of its state, so that the next owner sees before the first record whether it has all of it.

Beside the offset of each of its source partitions stands what only a commit can tie together: which function it was and
which states it had, how far its changelog went by then, and how many partitions there were. What is the same for every
commit is in an entry of the changelog, its header: whose it is, what it is made of, and of which kind each store is.
Owns both formats (docs/reference/formats.md) and what is refused; it does no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple

from eos.app.routes import Route
from eos.errors import ConfigurationError, InputGone
from eos.records import noted, place_of
from eos.state.changelog import FROM_RECORDS

KEY: Final = "state"
ACCEPTED: Final = "accepted"
"""Beside an offset in place of a Beside: what the changelog holds is taken as complete (`eos reset
--accept-changelog`)."""
RESETTING: Final = "resetting"
"""The same while `eos reset --with-state` is under way, or where it was interrupted."""
UNSEEN: Final = -1
"""In place of an end: the offset was committed before anybody looked at the changelog (auto.offset.reset=latest)."""
HEADER_FORMAT: Final = 1
_NAMES_BYTES: Final = 1_000
"""Of the 4,096 that brokers take beside an offset."""


class Beside(NamedTuple):
    """What stands beside an offset. `function`: a function of another name has another changelog. `end`: how far the
    changelog's partition went. `partitions`: how many the source and the changelog had. `stores`: the names of its
    states in the changelog, sorted; none if they are too long, or an earlier version wrote it: the header has them."""

    function: str
    end: int
    partitions: int
    stores: tuple[str, ...] = ()

    def noted(self) -> Mapping[str, object]:
        return {KEY: list(self)}


def noted_of(route: Route, end: int, partitions: int) -> Beside:
    """Return what stands beside an offset of this function."""
    stores = _stores_of(route)
    return Beside(route.name, end, partitions, stores if sum(map(len, stores)) <= _NAMES_BYTES else ())


def _stores_of(route: Route) -> tuple[str, ...]:
    return tuple(sorted(store.kept_as for store in route.stores))


def beside_of(metadata: str | None) -> Beside | None:
    """Return what was noted; None where nothing was."""
    match noted(metadata).get(KEY):
        case [str(name), int(end), int(partitions)]:
            return Beside(name, end, partitions)
        case [str(name), int(end), int(partitions), [*stores]]:
            return Beside(name, end, partitions, tuple(map(str, stores)))
    return None


def accepts(metadata: str | None) -> bool:
    return noted(metadata).get(KEY) == ACCEPTED


def check_not_interrupted(committed: Iterable[str | None]) -> None:
    """Raise ConfigurationError if the metadata of a group's offsets says that its reset was interrupted."""
    if any(noted(metadata).get(KEY) == RESETTING for metadata in committed):
        raise ConfigurationError(
            "`eos reset --with-state` was interrupted: some of the App's state is gone, some is not",
            remedy="run it again",
        )


def kept_by(route: Route, metadata: str | None) -> Beside | None:
    """Return what stands beside a committed offset of this function; None: what the changelog holds is accepted.

    Raises ConfigurationError where the records before the offset were handled without this state: by a function of
    another name, or by one that had other states. The state would begin empty, and nothing would show it."""
    check_not_interrupted([metadata])
    if accepts(metadata):
        return None
    (source,), beside, begin = route.sources, beside_of(metadata), _begin(route)
    if beside is None:
        raise ConfigurationError(
            f"{route.name} has state now, and handled records of {source} before without it: it would begin empty",
            remedy=f"{begin} begins with it empty, {FROM_RECORDS}",
        )
    if beside.function != route.name:
        raise ConfigurationError(
            f"records of {source} were handled by the function {beside.function}, which kept state, and the App has "
            f"{route.name} for them now: its state would begin empty",
            remedy=f'name="{beside.function}" in the decorator of {route.name} keeps the state, {begin} begins with '
            "it empty",
        )
    if beside.stores:
        check_stores(route, beside.stores)
    return beside


def all_kept(routes: Mapping[str, Route], committed: Mapping[tuple[str, int], str]) -> list[tuple[str, Beside]]:
    """Return the topics with what stands beside their offsets, given the functions with state by their sources. Raises
    ConfigurationError as `kept_by` does."""
    check_not_interrupted(committed.values())
    kept = [(topic, kept_by(routes[topic], text)) for (topic, _), text in committed.items() if topic in routes]
    return [(topic, beside) for topic, beside in kept if beside is not None]


def check_stores(route: Route, kept: Collection[str]) -> None:
    """Raise ConfigurationError unless the function has the states that it `kept` before, by their names."""
    have, begin = _stores_of(route), _begin(route)
    gone, new = sorted(set(kept) - set(have)), sorted(set(have) - set(kept))
    its, more = ", ".join(gone), ", ".join(new)
    if gone and new:
        raise ConfigurationError(
            f"{route.name} kept the state {its}, and the code has {more} in its place, which would begin empty",
            remedy=f'was={{"{new[0]}": "{gone[0]}"}} in its decorator says that {new[0]} was named {gone[0]}; {begin} '
            f"deletes {its} and begins with {more} empty",
        )
    if gone:
        raise ConfigurationError(
            f"{route.name} kept the state {its}, and the code has it no more",
            remedy=f"put it back, or delete it: {begin}",
        )
    if new:
        raise ConfigurationError(
            f"the state {more} of {route.name} is new, and would begin empty after records that were handled without "
            "it",
            remedy=f"{begin} begins with it empty, {FROM_RECORDS}",
        )


def _begin(route: Route) -> str:
    return f"`eos state begin MODULE:APP {route.name}`"


def check_partitions(beside: Beside, source: str, partitions: int) -> None:
    """Raise ConfigurationError if the source and its changelog both got more partitions since: keys lie elsewhere."""
    if beside.partitions != partitions:
        raise ConfigurationError(
            f"the state of {beside.function} cannot be found: {source} and its changelog had {beside.partitions} "
            f"partitions when it was kept, and have {partitions}, so keys are in other partitions now",
            remedy=f"{FROM_RECORDS}, or write the source's records to a topic with as many partitions as before",
        )


class Header(NamedTuple):
    """The header of a changelog's partition. `stores`: the kind of each store by its name in the changelog."""

    app: str
    function: str
    sources: tuple[str, ...]
    stores: Mapping[str, str]

    def encoded(self) -> bytes:
        named: dict[str, Any] = {"v": HEADER_FORMAT, **self._asdict()}
        return json.dumps(named, sort_keys=True, separators=(",", ":")).encode()


def header_of(app: str, route: Route, where: str, before: bytes | None) -> Header:
    """Return the header from now on, given the one `before`. Raises ConfigurationError where the changelog is another
    App's or function's, or where a store is not there any more, new, or of another kind. `where` names the changelog's
    partition."""
    now = header_now(app, route)
    if before is None:
        return now
    found = owned(app, route, where, before)
    for name, shape in now.stores.items():
        if (was := found.stores.get(name, shape)) != shape:
            raise ConfigurationError(
                f"the state {name} of {route.name} was a {was} when it was kept, and is a {shape} now",
                remedy=f"give the new one another name, or {_begin(route)} deletes what was kept",
            )
    check_stores(route, found.stores)
    return now


def owned(app: str, route: Route, where: str, header: bytes) -> Header:
    """Return the header of a changelog's partition. Raises ConfigurationError if it is another App's or function's."""
    found = _decoded(header, where)
    for what, mine, whose in (("App", app, found.app), ("function", route.name, found.function)):
        if mine != whose:
            raise ConfigurationError(
                f"the changelog {where} belongs to the {what} {whose}, and {what} {mine} would write to it",
                remedy=f"rename one {what}: the names of the App and of the function make the changelog's name",
            )
    return found


def header_now(app: str, route: Route) -> Header:
    return Header(app, route.name, route.sources, {store.kept_as: store.shape for store in route.stores})


def _decoded(header: bytes, where: str) -> Header:
    try:
        found = json.loads(header)
        version = int(found["v"])
        read = Header(str(found["app"]), str(found["function"]), tuple(found["sources"]), dict(found["stores"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"the header of the changelog {where} cannot be read: {error!r}") from error
    if version > HEADER_FORMAT:
        raise ConfigurationError(
            f"the changelog {where} is of format {version}, and this version of eos reads formats up to "
            f"{HEADER_FORMAT}",
            remedy="run the newer version",
        )
    return read


def never_committed(function: str, source: tuple[str, int], changelog: str) -> InputGone:
    """Return the error of a source partition without a committed offset whose changelog is not empty."""
    where = place_of(*source)
    return InputGone(
        f"{where} has no committed offset, and the changelog {changelog} holds state of {function}: from "
        "auto.offset.reset the records that this state counts already would be handled again",
        remedy=f"set where it goes on (`eos reset --group ... --topic {source[0]} --from ... --accept-changelog`), or "
        "delete the topic of the changelog to begin without state",
    )
