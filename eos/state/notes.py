"""What a task notes of its state, so that the next owner sees before the first record whether it has all of it.

Beside the offset of each of its source partitions stands what only a commit can tie together: which function it was,
how far its changelog went by then, and how many partitions there were. What is the same for every commit is in an entry
of the changelog, its header: whose it is, what it is made of, and of which kind each store is. Owns both formats
(docs/reference/formats.md) and what is refused; it does no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from eos.app.routes import Route
from eos.errors import ConfigurationError, InputGone
from eos.records import noted, place_of

KEY: Final = "state"
ACCEPTED: Final = "accepted"
"""Beside an offset in place of a Beside: what the changelog holds is taken as complete (`eos reset
--accept-changelog`)."""
HEADER_FORMAT: Final = 1


class Beside(NamedTuple):
    """What stands beside an offset. `function`: a function of another name has another changelog. `end`: how far the
    changelog's partition went. `partitions`: how many the source and the changelog had."""

    function: str
    end: int
    partitions: int

    def noted(self) -> Mapping[str, object]:
        return {KEY: list(self)}


def beside_of(metadata: str | None, function: str) -> Beside | None:
    """Return what was noted for this function; None where nothing was."""
    match noted(metadata).get(KEY):
        case [str(name), int(end), int(partitions)] if name == function:
            return Beside(name, end, partitions)
    return None


def accepts(metadata: str | None) -> bool:
    return noted(metadata).get(KEY) == ACCEPTED


def check_partitions(beside: Beside, source: str, partitions: int) -> None:
    """Raise ConfigurationError if the source and its changelog both got more partitions since: keys lie elsewhere."""
    if beside.partitions != partitions:
        raise ConfigurationError(
            f"the state of {beside.function} cannot be found: {source} and its changelog had {beside.partitions} "
            f"partitions when it was kept, and have {partitions}, so keys are in other partitions now",
            remedy="write the source's records to a topic with as many partitions as before",
        )


class Header(NamedTuple):
    """The header of a changelog's partition. `stores`: the kind of each store by its name; stores that the function has
    no more stay, because their entries do."""

    app: str
    function: str
    sources: tuple[str, ...]
    stores: Mapping[str, str]

    def encoded(self) -> bytes:
        named: dict[str, Any] = {"v": HEADER_FORMAT, **self._asdict()}
        return json.dumps(named, sort_keys=True, separators=(",", ":")).encode()


def header_of(app: str, route: Route, where: str, before: bytes | None) -> Header:
    """Return the header from now on, given the one `before`. Raises ConfigurationError where the changelog is another
    App's or function's, or where a store was of another kind. `where` names the changelog's partition."""
    stores = {store.name: store.shape for store in route.stores}
    now = Header(app, route.name, route.sources, stores)
    if before is None:
        return now
    found = _decoded(before, where)
    for what, mine, whose in (("App", app, found.app), ("function", route.name, found.function)):
        if mine != whose:
            raise ConfigurationError(
                f"the changelog {where} belongs to the {what} {whose}, and {what} {mine} would write to it",
                remedy=f"rename one {what}: the names of the App and of the function make the changelog's name",
            )
    for name, shape in stores.items():
        if (was := found.stores.get(name, shape)) != shape:
            raise ConfigurationError(
                f"the state {name} of {route.name} was a {was} when it was kept, and is a {shape} now",
                remedy="give the new one another name",
            )
    return now._replace(stores={**found.stores, **stores})


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
        remedy=f"set where it goes on (`eos reset --group ... --topic {source[0]} --from ...`), or delete the topic "
        "of the changelog to begin without state",
    )
