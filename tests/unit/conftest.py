"""What every unit test leaves as it found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from eos import log


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    loggers = (log.logger, log.client_logger)
    before = [(one, one.handlers[:], one.propagate, one.level) for one in loggers]
    yield
    for one, handlers, propagate, level in before:
        one.handlers[:], one.propagate = handlers, propagate
        one.setLevel(level)
