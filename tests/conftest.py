"""The real Kafkas that tests share, each started by the first test that asks for it."""

from __future__ import annotations

import functools
import re
import uuid
from collections.abc import Callable, Generator, Iterator

import hypothesis
import pytest

from eos.broker import DEFAULT_VERSION, LocalKafka
from eos.broker.node import free_ports
from eos.raising import raising

# How long an example takes is the machine's; all else is as before (in CI: the same examples each time).
hypothesis.settings.register_profile("untimed", parent=hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """A bare KafkaError (eos/raising.py) out of a test that uses the client itself would end pytest, not the test."""
    pyfuncitem.obj = functools.partial(raising, pyfuncitem.obj)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed says where the logs of its brokers are, however it came by them."""
    report = yield
    if report.failed and report.when in ("setup", "call"):
        made = getattr(item, "funcargs", {}).items()
        for name, kafka in ((name, one) for name, one in made if isinstance(one, LocalKafka)):
            nodes = range(len(kafka.bootstrap_servers.split(",")))
            report.sections.append((f"logs of {name}", "\n".join(str(kafka.log_path(node)) for node in nodes)))
    return report


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest) -> Iterator[LocalKafka]:
    """One node of the default version for the whole session; a test's proxy may listen on its `proxied_servers`."""
    yield from _single_node(request, DEFAULT_VERSION)


@pytest.fixture(scope="session")
def kafka392(request: pytest.FixtureRequest) -> Iterator[LocalKafka]:
    """As `kafka`, the last version with transaction.version 0."""
    yield from _single_node(request, "3.9.2")


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalKafka]:
    """Three nodes for one module: a test that kills one starts it again before it ends."""
    with LocalKafka(nodes=3) as cluster:
        yield cluster
        cluster.keep = _failed(request)


@pytest.fixture
def names(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Makes names for topics, groups and transactional.ids that no other test and no repetition of this one has."""
    test = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name.removeprefix("test_"))[:60].strip("-")
    prefix = f"{test}-{uuid.uuid4().hex[:6]}"
    return lambda name: f"{prefix}-{name}"


def _single_node(request: pytest.FixtureRequest, version: str) -> Iterator[LocalKafka]:
    with LocalKafka(proxied_port=free_ports(1)[0], version=version) as kafka:
        yield kafka
        kafka.keep = _failed(request)


def _failed(request: pytest.FixtureRequest) -> bool:
    # A test's failure does not reach the fixture as an exception, and the broker's log may be half of the story.
    return request.session.testsfailed > 0
