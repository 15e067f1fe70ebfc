"""A local Kafka as a fixture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from eos.broker import LocalKafka


def local_kafka(request: pytest.FixtureRequest, **options: Any) -> Iterator[LocalKafka]:
    """`yield from` this in a fixture. Its directory is kept once a test has failed."""
    with LocalKafka(**options) as kafka:
        yield kafka
        # A test's failure does not reach the fixture as an exception, and the broker's log may be half of the story.
        kafka.keep = request.session.testsfailed > 0
