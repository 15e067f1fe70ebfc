"""Restore after every unit test what it may have changed: logging, the event loop, garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from eos import log
from eos.app import concurrent


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    loggers = (log.logger, log.client_logger)
    before = [(one, one.handlers[:], one.propagate, one.level) for one in loggers]
    yield
    for one, handlers, propagate, level in before:
        one.handlers[:], one.propagate = handlers, propagate
        one.setLevel(level)


@pytest.fixture
def loop_ends() -> Iterator[None]:
    """Close the event loop of `async def` functions at the end of the test."""
    yield
    concurrent.close()


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Disable garbage collection, as if in a worker that has frozen its objects and makes no new garbage."""
    gc.disable()
    yield
    gc.enable()
