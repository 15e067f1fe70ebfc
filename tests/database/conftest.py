"""Fixtures of the tests with databases: one PostgreSQL for each module, where each test creates a database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eos.broker import LocalKafka
from tests.support.outbox import Names, Outbox
from tests.support.postgres import PostgresServer, postgres_server


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as running:
        yield running


@pytest.fixture
def outbox(kafka: LocalKafka, names: Names, tmp_path: Path, server: PostgresServer) -> Outbox:
    return Outbox(kafka, names, tmp_path, server)
