"""Warns about input that is older than the retention of its outputs: brokers may delete such outputs once committed.

Owns this one warning. It must never stop a worker, since a function may set the timestamps of its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from eos import log
from eos.app.definition import App
from eos.app.routes import Route
from eos.kafka.admin.facts import Topic
from eos.records import Record


class Retention:
    """Knows the retention of the topics that an App's functions write to; `topics` come from the preflight."""

    def __init__(self, app: App, topics: Mapping[str, Topic]) -> None:
        self._app = app
        self._shortest: dict[Route, tuple[int, str]] = {}
        for route in app.functions:
            kept = [(ms, name) for name in route.destinations if (ms := _kept_ms(topics[name])) is not None]
            if kept:
                self._shortest[route] = min(kept)

    def is_exceeded(self, record: Record, unix_s: float) -> bool:
        """Log a warning and return True if a record is older than the retention of a destination of its function."""
        kept_ms, destination = self._shortest.get(self._app.routes[record.topic], (0, ""))
        if not destination or record.timestamp <= 0 or record.timestamp >= unix_s * 1000 - kept_ms:
            return False
        log.warning(
            "input is older than the retention of a destination",
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            timestamp=datetime.fromtimestamp(record.timestamp / 1000, UTC).isoformat(timespec="seconds"),
            destination=destination,
            retention=str(timedelta(milliseconds=kept_ms)),
            why="outputs keep the timestamp of their input, so the brokers may delete them as soon as they are "
            f"committed: set retention.ms=-1 of {destination} (or longer than the age of the input), or "
            "message.timestamp.type=LogAppendTime, or return Out(value, timestamp=0) for the time when it is sent",
        )
        return True


def _kept_ms(topic: Topic) -> int | None:
    """Return for how many ms after its timestamp a topic keeps a record; None if it keeps records for ever, or if this
    is unknown.
    """
    config = topic.config or {}
    kept_ms = int(config.get("retention.ms") or -1)
    by_age = (
        "delete" in config.get("cleanup.policy", "delete") and config.get("message.timestamp.type") != "LogAppendTime"
    )
    return kept_ms if by_age and kept_ms >= 0 else None
