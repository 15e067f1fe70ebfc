"""Log the shim's events with the logger "eos.shim", in the format of eos/log.py but with long values cut off."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from eos import log

logger = logging.getLogger("eos.shim")

# The maximum number of characters of a value in a log line. A client may send a transactional.id of 32 KB.
LONGEST_VALUE = 300


def event(level: int, message: str, **fields: Any) -> None:
    if logger.isEnabledFor(level):
        log.event(level, message, logger, **{name: _short(value) for name, value in fields.items()})


def _short(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    text = str(value)
    return log.printable(text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}... ({len(text)} characters)")


debug, info, warning = (partial(event, level) for level in (logging.DEBUG, logging.INFO, logging.WARNING))
