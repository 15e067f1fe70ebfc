"""The shim's log lines: ordinary `logging` records of "eos.shim" that carry their event and fields apart.

Owns the shape only; whoever configures logging chooses the format. The shape is that of `eos.log`, on purpose not its
code: the shim imports nothing else of `eos`.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("eos.shim")


def event(level: int, message: str, **fields: Any) -> None:
    if logger.isEnabledFor(level):
        tail = "".join(f" {name}={value}" for name, value in fields.items())
        logger.log(level, "%s%s", message, tail, extra={"event": message, "fields": fields})


def info(message: str, **fields: Any) -> None:
    event(logging.INFO, message, **fields)


def warning(message: str, **fields: Any) -> None:
    event(logging.WARNING, message, **fields)


def debug(message: str, **fields: Any) -> None:
    event(logging.DEBUG, message, **fields)
