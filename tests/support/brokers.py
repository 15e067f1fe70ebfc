"""Start a local Kafka as a fixture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from eos.broker import LocalKafka


def local_kafka(request: pytest.FixtureRequest, **options: Any) -> Iterator[LocalKafka]:
    """Yield a local Kafka from a fixture (`yield from`), and keep its directory once a test has failed."""
    with LocalKafka(**options) as kafka:
        yield kafka
        # Keep the log after a failed test, because the fixture does not see the failure as an exception.
        kafka.keep = request.session.testsfailed > 0
