"""A function's changelog: a compacted topic with as many partitions as its source, in which each task notes what its
transactions changed. Made where it is not there; read up to its end before the first record of a task.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from eos import log
from eos.app.cells import TIME, named
from eos.app.routes import Route, changelog_of
from eos.errors import ConfigurationError, EosError, InputGone, Temporary, Unavailable
from eos.kafka import facts, tail
from eos.kafka.settings import Settings
from eos.kafka.tail import Span
from eos.kafka.world import REAL, World
from eos.records import is_topic_name, place_of

_ASK_S = 10.0
# A transaction that is decided is not yet to be seen where its markers are under way; nobody else writes there.
_SETTLED_S = 30.0
_TOMBSTONES_S = 86_400.0  # delete.retention.ms where the brokers do not say
# Records are deleted by nothing but newer ones; where state has a time-to-live, their timestamps are the worker's.
CONFIG = {"cleanup.policy": "compact", "message.timestamp.type": "CreateTime"}
Rows = dict[str, list[tuple[bytes, bytes]]]


def changelogs_of(app_id: str, routes: Iterable[Route]) -> dict[str, str]:
    """The changelog of each function, by its source. Raises ConfigurationError where two would share one, or where
    Kafka takes no topic of that name."""
    found: dict[str, str] = {}
    for route in routes:
        topic = changelog_of(app_id, route)
        if topic in found.values():
            raise ConfigurationError(f"two functions with state are named {route.name}: each needs a name of its own")
        if not is_topic_name(topic):
            raise ConfigurationError(
                f"the state of {route.name} needs the topic {topic!r}, and Kafka takes no such name"
            )
        found[route.sources[0]] = topic
    return found


class Fit(NamedTuple):
    """How a function's changelog is: it has as many partitions as its source, none if that is not there. `missing`: it
    is to be made. `tombstones_s`: for how long it keeps tombstones."""

    topic: str
    partitions: int = 0
    missing: bool = False
    tombstones_s: float = _TOMBSTONES_S


def fit_of(client: Any, app_id: str, route: Route, world: World = REAL) -> Fit:
    """`client` as facts.connect gives it. Raises ConfigurationError where the changelog does not fit its source."""
    (source,), topic = route.sources, changelog_of(app_id, route)
    wanted = facts.describe_topic(client, source).partitions
    there = facts.describe_topic(client, topic)
    if not wanted or there.exists is None:
        return Fit(topic)  # the session says what is wrong with it
    if not there.exists:
        return Fit(topic, wanted, missing=True)
    if there.partitions != wanted:
        raise ConfigurationError(
            f"the state of {route.name} cannot be found: its changelog {topic} has {there.partitions} partitions, "
            f"and {source} has {wanted}, so keys are in other partitions now",
            remedy="write the source's records to a topic with as many partitions as before, or begin anew under "
            "another App id",
        )
    config = facts.configs(client, [topic], world=world).get(("topic", topic), {})
    needed = {"cleanup.policy": "the state of keys that do not change"}
    if route.ttls:
        needed["message.timestamp.type"] = "when state with a time-to-live was written"
    for name, loses in needed.items():
        if (found := config.get(name, CONFIG[name])) != CONFIG[name]:
            raise ConfigurationError(
                f"the changelog {topic} has {name}={found}, which loses {loses}",
                remedy=f"set {name}={CONFIG[name]} of {topic}",
            )
    tombstones_s = int(config.get("delete.retention.ms") or _TOMBSTONES_S * 1000) / 1000
    return Fit(topic, wanted, tombstones_s=tombstones_s)


def require(settings: Settings, app_id: str, routes: Sequence[Route], world: World = REAL) -> dict[str, Fit]:
    """Each function's changelog, by its name, is there and fits its source; it is made where it is not. Raises
    ConfigurationError, NotAuthorised, Unavailable."""
    fits: dict[str, Fit] = {}
    client = facts.connect(settings, _ASK_S, world)
    for route in routes:
        fit = fit_of(client, app_id, route, world)
        fits[fit.topic] = fit
        if fit.missing:
            brokers = len(facts.metadata(client, settings.bootstrap_servers, _ASK_S).brokers)
            facts.create_topics(settings, {fit.topic: fit.partitions}, brokers, config=CONFIG, world=world)
    return fits


def kept(settings: Settings, topic: str) -> Iterator[tuple[int, list[tuple[bytes, Rows]]]]:
    """What is committed: for each partition the keys in order, and of each its stores, with fields and values in order.
    A partition at a time is in memory. Raises Unavailable, ConfigurationError for a record that is no state."""
    for partition, span in sorted(tail.spans(settings, topic, _ASK_S).items()):
        cells: dict[bytes, bytes] = {}
        if span.low < span.stable:
            with tail.TopicReader(settings, topic, {partition: span.low}, uncommitted=False) as reader:
                for seen in tail.read_until(reader, {partition: span.stable}):
                    if seen.record.value is None:
                        cells.pop(seen.record.key or b"", None)
                    else:
                        cells[seen.record.key or b""] = seen.record.value
        rows: dict[bytes, Rows] = {}
        for cell, value in sorted(cells.items()):
            try:
                store, key, field = named(cell)
            except ValueError as error:
                raise ConfigurationError(
                    f"{place_of(topic, partition)} holds what no function remembers: {error}"
                ) from error
            if cell == TIME:
                continue
            rows.setdefault(key, {}).setdefault(store, []).append((field, value))
        yield partition, sorted(rows.items())


def settled(
    settings: Settings,
    topic: str,
    partitions: Sequence[int],
    world: World = REAL,
    at_least: Mapping[int, int] | None = None,
) -> Generator[None, None, dict[int, Span]]:
    """What these partitions hold, once no transaction is open there and all is there that is known to be: `at_least`
    are offsets up to which they went before, and a broker that has just become a leader may not know yet how far it
    goes. It comes up for air until then; `partitions` may lose some meanwhile. Raises Temporary where a transaction
    stays open, InputGone where it ends too early."""
    client, at_least = None, at_least or {}
    held: dict[int, Span] = {}
    waits_for, since = EosError, world.now()
    while missing := [partition for partition in partitions if partition not in held]:
        unsettled: list[EosError] = []
        try:
            client = client or facts.connect(settings, _ASK_S, world)
            found = tail.held(client, topic, missing)
        except Unavailable as error:
            found = {}
            unsettled.append(Temporary(f"state cannot be restored: {error}"))
        for partition, span in found.items():
            if (why := _unsettled(place_of(topic, partition), span, at_least.get(partition, 0))) is None:
                held[partition] = span
            else:
                unsettled.append(why)
        if not unsettled:
            continue
        why = unsettled[0]
        if type(why) is not waits_for:
            waits_for, since = type(why), world.now()
        # What is not there is not waited for as long: only a new leader is behind.
        more_s = 0 if isinstance(why, InputGone) else settings.transaction_timeout_ms / 1000
        if world.now() > since + _SETTLED_S + more_s:
            raise why
        log.debug("the changelog is waited for", topic=topic, because=why)
        yield
        world.sleep(0.05)
    return held


def _unsettled(where: str, span: Span, at_least: int) -> EosError | None:
    """Why it cannot be read yet."""
    if span.stable < span.end:
        return Temporary(
            f"state cannot be restored: {where} has an open transaction",
            remedy="`eos txn find-hanging` names open transactions",
        )
    if span.end < at_least:
        return InputGone(
            f"state is gone: the changelog {where} ends at {span.end}, and went up to {at_least} when offsets of its "
            "source were committed, or its folder was written",
            remedy="bring the topic back, or give the App another id to restart from nothing; with an empty "
            "eos.state.dir `eos reset MODULE:APP --accept-changelog` goes on without what was lost",
        )
    return None
