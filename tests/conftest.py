"""Start the real Kafkas that tests share, each with the first test that needs it."""

from __future__ import annotations

import functools
import os
import random
import re
import signal
import socket
import uuid
from collections.abc import Callable, Generator, Iterator

import hypothesis
import pytest
import pytest_timeout

from eos.broker import DEFAULT_VERSION, LocalKafka, node
from eos.kafka.client.client_calls import call_client
from tests.suites.marks import (  # noqa: F401 - hooks
    pytest_collection_modifyitems,
    pytest_itemcollected,
    pytest_xdist_make_scheduler,
)
from tests.support.brokers import local_kafka

# Set no deadline, because the duration of an example depends on the machine. Other settings keep their defaults (in CI:
# the same examples each time).
hypothesis.settings.register_profile("untimed", parent=hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("untimed")


_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_PROXIED_PORTS = 5_000 // (2 * _WORKERS)  # ports of each process and version to choose from


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give parallel processes separate port ranges, because a chosen port looks free to others until it is bound."""
    if "PYTEST_XDIST_WORKER" in os.environ and (known := getattr(config, "failures_db", None)):
        # pytest-rerunfailures sends its main process two small packets per test, which takes 40 ms without this.
        known.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    first, last = node.PORT_RANGE
    share = (last - first) // _WORKERS
    # C2 does not pay off for brokers that live for minutes, nor for the commands that tests start.
    os.environ.setdefault("KAFKA_JVM_PERFORMANCE_OPTS", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1")
    node.PORT_RANGE = (first + _WORKER * share, first + (_WORKER + 1) * share)
    # If a shell starts pytest in the background, SIGINT is ignored, and all children inherit this.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Restart the clock of pytest-timeout for a second try, because it is set once for all tries of a test."""
    if getattr(item, "execution_count", 1) > 1:
        settings = pytest_timeout._get_item_settings(item)
        if settings.timeout:
            item.ihook.pytest_timeout_cancel_timer(item=item)
            item.ihook.pytest_timeout_set_timer(item=item, settings=settings)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Fail the test that raises a bare KafkaError, which would otherwise end pytest (client_calls.py)."""
    pyfuncitem.obj = functools.partial(call_client, pyfuncitem.obj)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the paths of the brokers' logs to the report of a failed test, for every fixture that started one."""
    report = yield
    if report.failed and report.when in ("setup", "call"):
        made = getattr(item, "funcargs", {}).items()
        for name, kafka in ((name, one) for name, one in made if isinstance(one, LocalKafka)):
            nodes = range(len(kafka.bootstrap_servers.split(",")))
            report.sections.append((f"logs of {name}", "\n".join(str(kafka.log_path(node)) for node in nodes)))
    return report


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest) -> Iterator[LocalKafka]:
    """Start one node of the default version for the whole session; a test's proxy may listen on its
    `proxied_servers`."""
    yield from _single_node(request, DEFAULT_VERSION)


@pytest.fixture(scope="session")
def kafka392(request: pytest.FixtureRequest) -> Iterator[LocalKafka]:
    """Start one node as `kafka` does, of the last version with transaction.version 0."""
    yield from _single_node(request, "3.9.2")


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalKafka]:
    """Start three nodes for one module; a test that kills one starts it again before it ends."""
    yield from local_kafka(request, nodes=3)


@pytest.fixture
def names(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Return a function that makes names for topics, groups and ids that no other test or repetition has."""
    test = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name.removeprefix("test_"))[:60].strip("-")
    prefix = f"{test}-{uuid.uuid4().hex[:6]}"
    return lambda name: f"{prefix}-{name}"


def _single_node(request: pytest.FixtureRequest, version: str) -> Iterator[LocalKafka]:
    # No test kills this broker, so it must not fence itself after a pause of some seconds on a loaded machine. Many
    # brokers share two cores, so it must be idle between tests.
    config = {
        "broker.session.timeout.ms": 30_000,
        "broker.heartbeat.interval.ms": 5_000,
        "metadata.max.idle.interval.ms": 0,
    }
    yield from local_kafka(request, proxied_port=_proxied_port(version), version=version, config=config)


def _proxied_port(version: str) -> int:
    """Choose a port below all brokers' ports, which no other process takes until a test's proxy listens there."""
    block = 2 * _WORKER + (version != DEFAULT_VERSION)
    first = 10_000 + _PROXIED_PORTS * block
    ports = range(first, first + _PROXIED_PORTS)
    return next(port for port in random.sample(ports, len(ports)) if node.is_free(port))
