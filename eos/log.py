"""Logs one line per event: text on stderr by default, or JSON; lines about a transaction name its producer.

Owns the format only. Events are `log.info("event", name=value)`; users of the library see them as ordinary `logging`
records of the logger "eos". The library adds no handler, so Python prints warnings on stderr in a program that does not
configure logging.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

_SILENT = logging.CRITICAL + 1  # librdkafka logs a fenced producer as critical; our own event reports it

logger = logging.getLogger("eos")
# librdkafka's own lines, shown only with --log-level debug: our events report the same, with the action taken.
client_logger = logging.getLogger("eos.librdkafka")
client_logger.setLevel(_SILENT)


def event(level: int, message: str, to: logging.Logger = logger, /, **fields: Any) -> None:
    """Log one event; fields become `name=value` after the message, or members of a JSON line."""
    if to.isEnabledFor(level):
        tail = "".join(f" {name}={value}" for name, value in fields.items())
        to.log(level, "%s%s", message, tail, extra={"event": message, "fields": fields})


def info(message: str, **fields: Any) -> None:
    event(logging.INFO, message, **fields)


def warning(message: str, **fields: Any) -> None:
    event(logging.WARNING, message, **fields)


def debug(message: str, **fields: Any) -> None:
    event(logging.DEBUG, message, **fields)


def hide_debug_lines(library: str) -> None:
    """Drop the lines that a library logs below INFO, which contain passwords and tokens, at any log level.

    Call it before the library gets a secret. It affects existing loggers of the library and new ones below them."""
    if (own := logging.getLogger(library)).isEnabledFor(logging.DEBUG):
        own.setLevel(logging.INFO)  # only raises the level
    for name in [name for name in logging.root.manager.loggerDict if f"{name}.".startswith(f"{library}.")]:
        logging.getLogger(name).addFilter(_is_above_debug)


def _is_above_debug(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.INFO


def printable(text: str, keep: str = "") -> str:
    """Escape all characters that could move a terminal's cursor, colour it or rename its window, except `keep`.

    Texts from records, headers and exceptions of functions may contain anything.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


class HumanFormatter(logging.Formatter):
    """Formats an event as one line of text."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock}.{int(record.msecs):03d} {record.levelname.lower():7} {record.getMessage()}"
        return printable(" ".join(line.splitlines()))  # librdkafka's messages can end in a newline


class JsonFormatter(logging.Formatter):
    """Formats an event as a line of JSON. `worker`: the name of a supervised worker, added to every line."""

    def __init__(self, worker: str | None = None) -> None:
        super().__init__()
        self._worker_member = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        message = getattr(record, "event", record.getMessage())
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line = {"time": stamp, "level": record.levelname.lower(), "event": message, **self._worker_member, **fields}
        return json.dumps(line, default=str)


def configure(log_format: str = "human", level: str = "info", stream: Any = None, worker: str | None = None) -> None:
    """Configure logging for the command line; users of the library configure `logging` as usual."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(worker) if log_format == "json" else HumanFormatter())
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
    client_logger.setLevel(logging.DEBUG if level.lower() == "debug" else _SILENT)


def log_final_error(message: str, **fields: Any) -> None:
    """Log an error even if the program has disabled logging."""
    more = {"event": message, "fields": fields}
    record = logger.makeRecord(logger.name, logging.ERROR, "", 0, message, (), None, extra=more)
    for handler in logger.handlers:
        handler.handle(record)


def reenable_loggers() -> None:
    """Enable our loggers again after logging.config.dictConfig or fileConfig, which disable existing loggers."""
    for name, found in list(logging.root.manager.loggerDict.items()):
        if isinstance(found, logging.Logger) and name.partition(".")[0] == logger.name:
            found.disabled = False


def logs_json() -> bool:
    """Return True if the command line logs JSON, so that its final error must be JSON too."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logger.handlers)


def redirect(stream: Any) -> None:
    """Write the command line's log to this stream from now on."""
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(stream)


class Reminder:
    """Limits the log events of one wait: `tick` returns True once per `interval_s`, for the first time after the first
    interval, or at the first call with `at_once`. `now` returns seconds."""

    def __init__(self, now: Callable[[], float], interval_s: float = 10.0, at_once: bool = False) -> None:
        self._now, self._interval_s = now, interval_s
        self._last_tick = now() - (interval_s if at_once else 0.0)

    def restart(self) -> None:
        """Restart the interval for a new wait."""
        self._last_tick = self._now()

    def tick(self) -> bool:
        """Return whether to log now."""
        if self._now() - self._last_tick < self._interval_s:
            return False
        self._last_tick = self._now()
        return True
