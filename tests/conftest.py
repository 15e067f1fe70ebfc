"""The real Kafkas that tests share, each started by the first test that asks for it."""

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

# How long an example takes is the machine's; all else is as before (in CI: the same examples each time).
hypothesis.settings.register_profile("untimed", parent=hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("untimed")


_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_PROXIED_PORTS = 5_000 // (2 * _WORKERS)  # of each process and version, to choose from


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Processes side by side choose ports apart: one that is chosen and not bound yet looks free to the other."""
    if "PYTEST_XDIST_WORKER" in os.environ and (known := getattr(config, "failures_db", None)):
        # pytest-rerunfailures asks its main process about each test in two small packets: 40 ms each time without this.
        known.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    first, last = node.PORT_RANGE
    share = (last - first) // _WORKERS
    # Brokers that live for minutes never earn what C2 costs; those of commands that a test starts neither.
    os.environ.setdefault("KAFKA_JVM_PERFORMANCE_OPTS", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1")
    node.PORT_RANGE = (first + _WORKER * share, first + (_WORKER + 1) * share)
    # A shell that runs pytest in the background has it ignore SIGINT, and all that it starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A second try has a time of its own: the clock of pytest-timeout is set once for all tries of a test."""
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
    yield from local_kafka(request, nodes=3)


@pytest.fixture
def names(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Makes names for topics, groups and transactional.ids that no other test and no repetition of this one has."""
    test = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name.removeprefix("test_"))[:60].strip("-")
    prefix = f"{test}-{uuid.uuid4().hex[:6]}"
    return lambda name: f"{prefix}-{name}"


def _single_node(request: pytest.FixtureRequest, version: str) -> Iterator[LocalKafka]:
    # Nobody kills it, and one that stood still for some seconds on a loaded machine must not be fenced by itself. It is
    # one of many on two cores: between tests it does nothing.
    config = {
        "broker.session.timeout.ms": 30_000,
        "broker.heartbeat.interval.ms": 5_000,
        "metadata.max.idle.interval.ms": 0,
    }
    yield from local_kafka(request, proxied_port=_proxied_port(version), version=version, config=config)


def _proxied_port(version: str) -> int:
    """Below all ports that brokers get: until a test's proxy listens there, any other process takes it for free."""
    block = 2 * _WORKER + (version != DEFAULT_VERSION)
    first = 10_000 + _PROXIED_PORTS * block
    ports = range(first, first + _PROXIED_PORTS)
    return next(port for port in random.sample(ports, len(ports)) if node.is_free(port))
