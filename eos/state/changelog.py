"""Manages the changelog of a function: a compacted topic with as many partitions as the function's source.

Each task writes the changes of its transactions to one partition, and reads the partition to its end before its first
record. A missing changelog is created.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from eos import log
from eos.app.cells import parse_cell
from eos.app.routes import Route, changelog_of
from eos.errors import ConfigurationError, EosError, InputGone, Temporary
from eos.kafka.admin import facts, tail
from eos.kafka.admin.tail import OffsetRange
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World
from eos.records import format_position, is_topic_name

_REQUEST_TIMEOUT_S = 10.0
_DEFAULT_TOMBSTONES_S = 86_400.0  # delete.retention.ms if the brokers do not report it
_SHORT_TOMBSTONES_S = 3_600.0  # a shorter retention is logged as a warning
REBUILD = "`eos reset MODULE:APP --from earliest --with-state` rebuilds the state from the records"
# A record is removed only by a newer record with the same key (compaction). Where state has a time-to-live, the worker
# sets the records' timestamps.
CONFIG = {"cleanup.policy": "compact", "message.timestamp.type": "CreateTime"}
Rows = dict[str, list[tuple[bytes, bytes]]]


def changelogs_of(app_id: str, routes: Iterable[Route]) -> dict[str, str]:
    """Return each function's changelog by its source topic.

    Raises ConfigurationError if two functions would share a changelog, or if Kafka does not allow the topic name.
    """
    found: dict[str, str] = {}
    for route in routes:
        topic = changelog_of(app_id, route)
        if topic in found.values():
            raise ConfigurationError(f"two functions with state are named {route.name}: give one another name=")
        if not is_topic_name(topic):
            raise ConfigurationError(
                f"the state of {route.name} needs the topic {topic!r}, which Kafka does not accept: set a shorter name="
            )
        found[route.sources[0]] = topic
    return found


class ChangelogFit(NamedTuple):
    """Compares a function's changelog with its source.

    `partitions` counts the source's partitions; 0 if the source does not exist. `missing`: the changelog must be
    created. `tombstones_s`: how long the changelog keeps tombstones, in seconds.
    """

    topic: str
    partitions: int = 0
    missing: bool = False
    tombstones_s: float = _DEFAULT_TOMBSTONES_S


def check_fit(client: Any, app_id: str, route: Route, world: World = REAL) -> ChangelogFit:
    """Compare a function's changelog with its source; `client` comes from facts.connect.

    Raises ConfigurationError if the changelog does not fit its source.
    """
    (source,), topic = route.sources, changelog_of(app_id, route)
    wanted = facts.describe_topic(client, source).partitions
    there = facts.describe_topic(client, topic)
    if not wanted or there.exists is None:
        return ChangelogFit(topic)  # the session reports the problem with the source
    if not there.exists:
        return ChangelogFit(topic, wanted, missing=True)
    if there.partitions != wanted:
        raise ConfigurationError(
            f"the state of {route.name} cannot be found: its changelog {topic} has {there.partitions} partitions, "
            f"and {source} has {wanted}, so keys are in other partitions now",
            remedy=f"{REBUILD}, or write the source's records to a topic with as many partitions as before",
        )
    config = facts.describe_configs(client, [topic], world=world).get(("topic", topic), {})
    needed = {"cleanup.policy": "the state of keys that do not change"}
    if route.ttls:
        needed["message.timestamp.type"] = "when state with a time-to-live was written"
    for name, loses in needed.items():
        if (found := config.get(name, CONFIG[name])) != CONFIG[name]:
            raise ConfigurationError(
                f"the changelog {topic} has {name}={found}, which loses {loses}",
                remedy=f"set {name}={CONFIG[name]} of {topic}",
            )
    tombstones_s = int(config.get("delete.retention.ms") or _DEFAULT_TOMBSTONES_S * 1000) / 1000
    return ChangelogFit(topic, wanted, tombstones_s=tombstones_s)


def create_missing(
    settings: Settings, app_id: str, routes: Sequence[Route], world: World = REAL
) -> dict[str, ChangelogFit]:
    """Create the changelogs that are missing, and return the fit of each changelog by its name.

    Raises ConfigurationError if a changelog does not fit its source, NotAuthorised, Unavailable.
    """
    fits: dict[str, ChangelogFit] = {}
    client = facts.connect(settings, _REQUEST_TIMEOUT_S, world)
    for route in routes:
        fit = check_fit(client, app_id, route, world)
        fits[fit.topic] = fit
        if fit.tombstones_s < _SHORT_TOMBSTONES_S:
            log.warning(
                "changelog keeps tombstones too briefly",
                topic=fit.topic,
                delete_retention_ms=round(fit.tombstones_s * 1000),
            )
        if fit.missing:
            brokers = len(facts.cluster_metadata(client, settings.bootstrap_servers, _REQUEST_TIMEOUT_S).brokers)
            facts.create_topics(settings, {fit.topic: fit.partitions}, brokers, config=CONFIG, world=world)
    return fits


def read_state(settings: Settings, topic: str) -> Iterator[tuple[int, list[tuple[bytes, Rows]]]]:
    """Yield the committed state of each partition: its keys in order, each with its stores' fields and values in order.

    Holds one partition at a time in memory. Raises Unavailable, and ConfigurationError for a record that is not state.
    """
    for partition, span in sorted(tail.topic_offsets(settings, topic, _REQUEST_TIMEOUT_S).items()):
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
                store, key, field = parse_cell(cell)
            except ValueError as error:
                raise ConfigurationError(
                    f"{format_position(topic, partition)} holds a record that is not state: {error}"
                ) from error
            if not store:
                continue  # an entry of the task itself
            rows.setdefault(key, {}).setdefault(store, []).append((field, value))
        yield partition, sorted(rows.items())


def explain_unsettled(where: str, span: OffsetRange, at_least: int) -> EosError | None:
    """Return why this partition of a changelog cannot be read yet; None if it can.

    Returns Temporary while the predecessor's transaction is open there: the coordinator has decided it, but has not
    written all markers yet. Returns InputGone while the partition ends before `at_least`, the offset that it had
    reached: a broker that has just become the leader learns the end only a moment later. A caller that has waited long
    enough treats the records as lost.
    """
    if span.stable < span.end:
        return Temporary(
            f"state cannot be restored: {where} has an open transaction",
            remedy="`eos txn find-hanging` names open transactions",
        )
    if span.end < at_least:
        return InputGone(
            f"state is gone: the changelog {where} ends at {span.end}, but went up to {at_least} when offsets of its "
            "source were committed or its folder was written",
            remedy=f"restore the topic; {REBUILD}; with an empty eos.state.dir `eos reset MODULE:APP "
            "--accept-changelog` continues without the lost state",
        )
    return None


def beginning_removed(where: str, low: int) -> InputGone:
    """Return the error for a changelog whose first records were removed, which compaction never does."""
    return InputGone(
        f"state is gone: the changelog {where} begins at {low}, so values that did not change since are missing from "
        "it, and no folder here holds them. The cause is cleanup.policy=delete, or records that were deleted by hand",
        remedy="set cleanup.policy=compact; a worker on the machine that had this partition last still has the values "
        "in its eos.state.dir; `eos reset MODULE:APP --accept-changelog` continues without the lost state",
    )


class Start(NamedTuple):
    """Names the offset from which a restore reads a changelog.

    `keeps`: the restore keeps the existing values and applies the changelog on top of them.
    """

    offset: int
    keeps: bool


def find_start(
    position: int, as_of: float, held: OffsetRange, tombstones_s: float, now: float, accepts: bool = False
) -> Start | None:
    """Return the offset at which a restore begins to read, given the position of the existing values.

    Returns None if the values are unusable and the changelog's beginning was removed, unless the caller `accepts` the
    changelog as it is. Values are unusable if their position is outside the changelog, or if they are so old that
    compaction may have removed tombstones of later deletes. A changelog that grew only by one transaction marker has no
    later changes.
    """
    missed = held.end - position > 1 and now - as_of > tombstones_s
    if held.low <= position <= held.end and not missed:
        return Start(position, keeps=True)
    return Start(held.low, keeps=False) if held.low == 0 or accepts else None
