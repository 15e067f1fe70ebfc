"""One line per event: human on stderr by default, JSON for machines; every line about a transaction says whose.

Owns the format only. Events are `log.info("event", name=value)`; users of the library see them as ordinary `logging`
records of the logger "eos". It has no handler of its own, so where a program says nothing of logging Python prints
warnings on stderr: they are about records, and nobody should have to ask for them.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

_SILENT = logging.CRITICAL + 1  # librdkafka calls it critical when a producer is fenced; we say what follows from it

logger = logging.getLogger("eos")
# librdkafka's own lines; they repeat what our events say with the action taken, so they show only on --log-level debug.
client_logger = logging.getLogger("eos.librdkafka")
client_logger.setLevel(_SILENT)


def event(level: int, message: str, to: logging.Logger = logger, /, **fields: Any) -> None:
    """Logs one event; fields become `name=value` behind the message, or members of a JSON line."""
    if to.isEnabledFor(level):
        tail = "".join(f" {name}={value}" for name, value in fields.items())
        to.log(level, "%s%s", message, tail, extra={"event": message, "fields": fields})


def info(message: str, **fields: Any) -> None:
    event(logging.INFO, message, **fields)


def warning(message: str, **fields: Any) -> None:
    event(logging.WARNING, message, **fields)


def debug(message: str, **fields: Any) -> None:
    event(logging.DEBUG, message, **fields)


def hold_back(library: str) -> None:
    """Drop what a library logs below INFO, whatever level it or the root logger has: passwords and tokens are in it.

    Call it before the library gets a secret: it is about the loggers that are there, and new ones below them."""
    if (own := logging.getLogger(library)).isEnabledFor(logging.DEBUG):
        own.setLevel(logging.INFO)  # not where it would say more than before
    for name in [name for name in logging.root.manager.loggerDict if f"{name}.".startswith(f"{library}.")]:
        logging.getLogger(name).addFilter(_is_no_detail)


def _is_no_detail(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.INFO


def printable(text: str, keep: str = "") -> str:
    """For people: what would move a terminal's cursor, colour it or rename its window is escaped, but `keep`.

    Records, their headers and what functions say of them are anybody's words.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


class HumanFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock}.{int(record.msecs):03d} {record.levelname.lower():7} {record.getMessage()}"
        return printable(" ".join(line.splitlines()))  # librdkafka's sentences can end in a newline


class JsonFormatter(logging.Formatter):
    """`worker`: which of several on one machine; every line names it, as a prefix would for people."""

    def __init__(self, worker: str | None = None) -> None:
        super().__init__()
        self._whose = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        message = getattr(record, "event", record.getMessage())
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line = {"time": stamp, "level": record.levelname.lower(), "event": message, **self._whose, **fields}
        return json.dumps(line, default=str)


def configure(log_format: str = "human", level: str = "info", stream: Any = None, worker: str | None = None) -> None:
    """For the command line; a library user configures `logging` as usual."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(worker) if log_format == "json" else HumanFormatter())
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
    client_logger.setLevel(logging.DEBUG if level.lower() == "debug" else _SILENT)


def last_words(message: str, **fields: Any) -> None:
    """Log an error though the program that was run has turned logging off."""
    more = {"event": message, "fields": fields}
    record = logger.makeRecord(logger.name, logging.ERROR, "", 0, message, (), None, extra=more)
    for handler in logger.handlers:
        handler.handle(record)


def enable() -> None:
    """Let events through again: logging.config.dictConfig and fileConfig disable every logger that is there already,
    unless they are told not to."""
    for name, found in list(logging.root.manager.loggerDict.items()):
        if isinstance(found, logging.Logger) and name.partition(".")[0] == logger.name:
            found.disabled = False


def for_machines() -> bool:
    """The command line was asked for JSON: its last words are a line of it too."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logger.handlers)


def redirect(stream: Any) -> None:
    """The command line's lines go there from now on."""
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(stream)


class Reminder:
    """Limits the log events of one wait: `tick` returns True once per `interval_s`, for the first time after the first
    interval, or at the first call with `at_once`. `now` returns seconds."""

    def __init__(self, now: Callable[[], float], interval_s: float = 10.0, at_once: bool = False) -> None:
        self._now, self._interval_s = now, interval_s
        self._last = now() - (interval_s if at_once else 0.0)

    def restart(self) -> None:
        """Begin a new wait."""
        self._last = self._now()

    def tick(self) -> bool:
        """Return whether to log now."""
        if self._now() - self._last < self._interval_s:
            return False
        self._last = self._now()
        return True
