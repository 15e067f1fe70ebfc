"""Checks the topics between two functions of an App: records that another group wrote there must not be handled."""

from __future__ import annotations

from eos.app.definition import App
from eos.errors import ConfigurationError
from eos.kafka.admin import facts, preflight, tail
from eos.kafka.admin.reset import UNCHANGED, GroupOffsets
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World
from eos.state import notes

_ASK_S = 10.0


def require_own(settings: Settings, app: App, world: World = REAL) -> None:
    """Wait for the cluster, then call `check_own`."""
    if app.chained:
        preflight.retry_while_unavailable(settings, lambda: check_own(settings, app, world), world)


def check_own(settings: Settings, app: App, world: World = REAL) -> None:
    """Raise ConfigurationError if a topic between functions holds records that the App's group did not write.

    The group wrote them if it has a committed offset in the topic, or in a source of a function that writes to the
    topic. Under a new App id the functions would write the records again, and they would count twice. Raises
    Unavailable, NotAuthorised.
    """
    with world.admin(settings) as admin:
        committed = admin.metadata_by_partition(app.id)
    notes.check_not_interrupted(committed.values())
    known = {topic for topic, _ in committed}
    for topic in sorted(app.chained):
        related = {topic, *_sources_of_writers(app, topic)}
        if known & related or not _holds_records(settings, topic, world):
            continue
        # Query the offsets last: another member's first commit may have made the records readable in the meantime.
        if not GroupOffsets(settings, app.id, related, world=world).plan(UNCHANGED):
            raise ConfigurationError(
                f"the topic {topic} between functions of {app.id} holds records, and the group {app.id} has no offset "
                "there: records of another App would be handled together with the records that these functions write",
                remedy=f"`eos reset MODULE:APP --topic {topic} --from latest` leaves them out, `--from earliest` "
                "handles them; to reprocess an App's input, keep its id and use `--from earliest --with-state`",
            )


def _sources_of_writers(app: App, topic: str) -> set[str]:
    """Return the sources of the functions that write the topic."""
    return {source for source, route in app.routes.items() if topic in route.destinations}


def _holds_records(settings: Settings, topic: str, world: World) -> bool:
    """Return whether the topic has committed records; aborted transactions occupy offsets too."""
    client = facts.connect(settings, _ASK_S, world)
    if not facts.describe_topic(client, topic).exists:
        return False
    spans = tail.topic_offsets_with(client, settings, topic)
    starts = {partition: span.low for partition, span in spans.items() if span.low < span.stable}
    if not starts:
        return False
    ends = {partition: spans[partition].stable for partition in starts}
    with tail.TopicReader(settings, topic, starts, uncommitted=False, world=world) as reader:
        return next(iter(tail.read_until(reader, ends)), None) is not None
