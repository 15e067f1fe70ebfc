"""Keeps the last log events that an operator should see as text, with a handler of the logger "eos".

An incident is always a log event, so failures are described only once. It never does I/O.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Mapping
from typing import Any

from eos import log
from eos.health.status import Incident

_MAX_INCIDENTS = 50
# Maximum length of an incident: every status contains all of them, and an exception may quote a whole record.
_MAX_CHARACTERS = 2_000
# Events below the level of a warning that help to explain a failure.
_NOTABLE_EVENTS = frozenset(
    {"producer replaced", "partitions assigned", "partitions revoked", "partitions lost", "session started", "stopping"}
)
_PRODUCER_FIELDS = frozenset({"transactional_id", "producer_id", "epoch", "state", "group"})


class Incidents(logging.Handler):
    """Collects warnings and a few other events inside its `with` block, at any log level."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._kept: collections.deque[Incident] = collections.deque(maxlen=_MAX_INCIDENTS)

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", record.getMessage())
        if record.levelno >= logging.WARNING or event in _NOTABLE_EVENTS:
            self.note(record.created, record.levelname.lower(), describe_event(event, getattr(record, "fields", {})))

    def note(self, at: float, level: str, text: str) -> None:
        cut = text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
        self._kept.append(Incident(at, level, cut))

    def last(self) -> list[Incident]:
        """Return the incidents, oldest first."""
        return list(self._kept)

    def __enter__(self) -> Incidents:
        self._level_before = log.logger.level
        if log.logger.level > logging.INFO:
            # The log's own handlers keep their configured level.
            for handler in log.logger.handlers:
                handler.setLevel(max(handler.level, log.logger.level))
            log.logger.setLevel(logging.INFO)
        log.logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        log.logger.removeHandler(self)
        log.logger.setLevel(self._level_before)


def describe_event(event: str, fields: Mapping[str, Any]) -> str:
    """Return an event as text, `event: reason (name value, ...)`, without the fields that name the producer."""
    left = dict(fields)
    reason = next((left.pop(name) for name in ("reason", "partitions", "error") if name in left), None)
    rest = ", ".join(
        f"{name} {value}" for name, value in left.items() if name not in _PRODUCER_FIELDS and value is not None
    )
    text = event if reason is None else f"{event}: {reason}"
    return f"{text} ({rest})" if rest else text
