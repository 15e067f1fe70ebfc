"""The shim's log lines: ordinary `logging` records of "eos.shim" that carry their event and fields apart.

Owns the shape only; whoever configures logging chooses the format. The shape is that of `eos.log`, on purpose not its
code: the shim imports nothing else of `eos`.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("eos.shim")

# Of one value: a client may name a transactional.id of 32 KB, with line ends in it.
LONGEST_VALUE = 300


def event(level: int, message: str, **fields: Any) -> None:
    if logger.isEnabledFor(level):
        fields = {name: _short(value) for name, value in fields.items()}
        tail = "".join(f" {name}={value}" for name, value in fields.items())
        logger.log(level, "%s%s", message, tail, extra={"event": message, "fields": fields})


def _short(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    text = str(value)
    short = text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}... ({len(text)} characters)"
    return short if short.isprintable() else short.encode("unicode_escape").decode()


def info(message: str, **fields: Any) -> None:
    event(logging.INFO, message, **fields)


def warning(message: str, **fields: Any) -> None:
    event(logging.WARNING, message, **fields)


def debug(message: str, **fields: Any) -> None:
    event(logging.DEBUG, message, **fields)
