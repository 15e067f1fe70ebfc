"""A function's changelog: a compacted topic with as many partitions as its source, in which each task notes what its
transactions changed. Made where it is not there; read up to its end before the first record of a task.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from eos import log
from eos.app.cells import named
from eos.app.routes import Route
from eos.errors import ConfigurationError, Temporary
from eos.kafka import facts, tail
from eos.kafka.settings import Settings
from eos.kafka.tail import Span
from eos.kafka.world import REAL, World
from eos.records import is_topic_name, place_of

_ASK_S = 10.0
# A transaction that is decided is not yet to be seen where its markers are under way; nobody else writes there.
_SETTLED_S = 30.0
_TOMBSTONES_S = 86_400.0  # delete.retention.ms where the brokers do not say
CONFIG = {"cleanup.policy": "compact"}
Rows = dict[str, list[tuple[bytes, bytes]]]


def changelog_of(app_id: str, route: Route) -> str:
    return f"{app_id}-{route.name.replace('.', '-')}-changelog"


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
    """How a function's changelog is: `missing` says with how many partitions it is to be made, None if it is there or
    its source is not. `tombstones_s`: for how long it keeps tombstones."""

    topic: str
    missing: int | None
    tombstones_s: float = _TOMBSTONES_S


def fit_of(client: Any, app_id: str, route: Route, world: World = REAL) -> Fit:
    """`client` as facts.connect gives it. Raises ConfigurationError where the changelog does not fit its source."""
    (source,), topic = route.sources, changelog_of(app_id, route)
    wanted = facts.describe_topic(client, source).partitions
    there = facts.describe_topic(client, topic)
    if not wanted or there.exists is None:
        return Fit(topic, None)  # the session says what is wrong with it
    if not there.exists:
        return Fit(topic, wanted)
    if there.partitions != wanted:
        raise ConfigurationError(
            f"the state of {route.name} cannot be found: its changelog {topic} has {there.partitions} partitions, "
            f"and {source} has {wanted}, so keys are in other partitions now",
            remedy="write the source's records to a topic with as many partitions as before, or begin anew under "
            "another App id",
        )
    config = facts.configs(client, [topic], world=world).get(("topic", topic), {})
    policy = config.get("cleanup.policy", "compact")
    if policy != CONFIG["cleanup.policy"]:
        raise ConfigurationError(
            f"the changelog {topic} has cleanup.policy={policy}, which loses the state of keys that do not change",
            remedy=f"set cleanup.policy=compact of {topic}",
        )
    return Fit(topic, None, int(config.get("delete.retention.ms") or _TOMBSTONES_S * 1000) / 1000)


def require(settings: Settings, app_id: str, routes: Sequence[Route], world: World = REAL) -> dict[str, float]:
    """Each function's changelog is there and fits its source; it is made where it is not. By its name: for how many
    seconds it keeps tombstones. Raises ConfigurationError, NotAuthorised, Unavailable."""
    kept: dict[str, float] = {}
    client = facts.connect(settings, _ASK_S, world)
    for route in routes:
        fit = fit_of(client, app_id, route, world)
        kept[fit.topic] = fit.tombstones_s
        if fit.missing is not None:
            brokers = len(facts.metadata(client, settings.bootstrap_servers, _ASK_S).brokers)
            facts.create_topics(settings, {fit.topic: fit.missing}, brokers, config=CONFIG, world=world)
    return kept


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
            rows.setdefault(key, {}).setdefault(store, []).append((field, value))
        yield partition, sorted(rows.items())


def settled(
    settings: Settings, topic: str, partitions: Sequence[int], world: World = REAL
) -> Generator[None, None, dict[int, Span]]:
    """What these partitions hold, once no transaction is open there. It comes up for air while one is; `partitions` may
    lose some meanwhile. Raises Temporary where one stays open, Unavailable."""
    client = facts.connect(settings, _ASK_S, world)
    held = tail.held(client, topic, partitions)
    deadline = world.now() + settings.transaction_timeout_ms / 1000 + _SETTLED_S
    while open_ := [partition for partition in partitions if held[partition].stable < held[partition].end]:
        if world.now() > deadline:
            raise Temporary(
                f"state cannot be restored: a transaction is open in {place_of(topic, open_[0])}",
                remedy="`eos txn find-hanging` says whose",
            )
        log.debug("waiting for the transaction before", topic=topic, partitions=len(open_))
        yield
        world.sleep(0.05)
        held |= tail.held(client, topic, open_)
    return held
