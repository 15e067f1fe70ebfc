"""What every unit test leaves as it found it."""

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
    """The event loop of `async def` functions does not outlive the test."""
    yield
    concurrent.close()


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage collection, as good as it is in a worker that has frozen its objects and makes no new ones."""
    gc.disable()
    yield
    gc.enable()
