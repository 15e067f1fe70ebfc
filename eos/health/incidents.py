"""The last log events that somebody should know of, in words: a handler of the logger "eos".

So there is no second place that says what went wrong: what is an incident was logged. It never does I/O.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Mapping
from typing import Any

from eos import log
from eos.health.status import Incident

_KEPT = 50
_MOST_CHARACTERS = 2_000  # of one incident: all are sent with every status, and an exception may quote a whole record
# Said below a warning, and still what one looks for first when something went wrong.
_TELLING = frozenset(
    {"producer replaced", "partitions assigned", "partitions revoked", "partitions lost", "session started", "stopping"}
)
_WHOSE = frozenset({"transactional_id", "producer_id", "epoch", "state", "group"})


class Incidents(logging.Handler):
    """A context manager: while inside, it hears warnings and the few other telling events, whatever the log level."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._kept: collections.deque[Incident] = collections.deque(maxlen=_KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", record.getMessage())
        if record.levelno >= logging.WARNING or event in _TELLING:
            self.note(record.created, record.levelname.lower(), words(event, getattr(record, "fields", {})))

    def note(self, at: float, level: str, text: str) -> None:
        cut = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
        self._kept.append(Incident(at, level, cut))

    def last(self) -> list[Incident]:
        """Oldest first."""
        return list(self._kept)

    def __enter__(self) -> Incidents:
        self._level_before = log.logger.level
        if log.logger.level > logging.INFO:
            # The log's own handlers keep the level that was asked for.
            for handler in log.logger.handlers:
                handler.setLevel(max(handler.level, log.logger.level))
            log.logger.setLevel(logging.INFO)
        log.logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        log.logger.removeHandler(self)
        log.logger.setLevel(self._level_before)


def words(event: str, fields: Mapping[str, Any]) -> str:
    """`event: reason (name value, ...)`; whose producer it was is said elsewhere."""
    told = dict(fields)
    reason = next((told.pop(name) for name in ("reason", "partitions", "error") if name in told), None)
    rest = ", ".join(f"{name} {value}" for name, value in told.items() if name not in _WHOSE and value is not None)
    text = event if reason is None else f"{event}: {reason}"
    return f"{text} ({rest})" if rest else text
