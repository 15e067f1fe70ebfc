"""Defines the pytest plugin: `--eos-kafka=container|jvm|HOST:PORT`, and fixtures `eos_run`, `eos_kafka`, `eos_cluster`.

Owns the options, the lifetime of the clusters, and the rule that a test with a fault that its backend cannot inject
counts as not run. Every pytest run loads the plugin where eos is installed, so it must never import a client, docker or
the rest of eos.testing before a test requests a cluster.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from eos.app.definition import App
    from eos.records import Record
    from eos.testing.clusters import Choice, Cluster
    from eos.testing.offline import Ran

_ADDRESSES = re.compile(r"[^\s,:]+:\d+(,[^\s,:]+:\d+)*")

# kafka-python reads its 109 message schemas with a function that is deprecated in Python 3.11 and 3.12.
_IGNORED_WARNINGS = (
    r"ignore:read_text is deprecated:DeprecationWarning:kafka\.protocol\.schemas\.load_json",
    r"ignore:open_text is deprecated:DeprecationWarning:importlib\.resources\._legacy",
)


@dataclass
class _State:
    """Holds the state of one pytest process.

    `reasons`: the summary's lines about the brokers, including those of xdist's workers. `swept`: the results of those
    workers' sweeps (eos.testing.sweeping.recorded_outcomes).
    """

    choices: dict[str | None, Choice] = field(default_factory=dict)
    shared: Cluster | None = None
    reasons: set[str] = field(default_factory=set)
    sweep_results: list[tuple[Any, ...]] = field(default_factory=list)


_STATE = pytest.StashKey[_State]()


class StartCluster(Protocol):
    """Describes the fixture `eos_cluster`, which starts a cluster for one test; options give the defaults."""

    def __call__(
        self,
        nodes: int | None = None,
        version: str | None = None,
        config: Mapping[str, object] | None = None,
        backend: str | None = None,
    ) -> Cluster: ...


class RunOnBroker(Protocol):
    """Describes the fixture `eos_run`: runs an App on a real broker, see eos.testing.online.run_on."""

    def __call__(
        self, app: App, records: Iterable[Record | tuple[Any, ...]], settings: Mapping[str, Any] | None = None
    ) -> Ran: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("eos", "Kafka clusters that tests can break (eos)")
    group.addoption(
        "--eos-kafka",
        metavar="container|jvm|HOST:PORT",
        help="where brokers run; default: containers if an engine answers and has the image, else local JVMs",
    )
    group.addoption("--eos-kafka-version", metavar="VERSION", help="Kafka's version, e.g. 3.9.2; default: 4.4.0")
    group.addoption("--eos-kafka-nodes", metavar="N", type=int, default=3, help="nodes of eos_kafka; default: 3")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    """Add the warning filters before pytest's own hook, which reads them before a conftest.py imports anything."""
    for line in _IGNORED_WARNINGS:
        early_config.addinivalue_line("filterwarnings", line)
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    wanted = config.getoption("--eos-kafka")
    if wanted not in (None, "container", "jvm") and not _ADDRESSES.fullmatch(wanted):
        raise pytest.UsageError(f"--eos-kafka={wanted}: must be container, jvm or HOST:PORT[,HOST:PORT...]")
    config.stash[_STATE] = _State()


@pytest.fixture(scope="session")
def eos_kafka(pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """Return one cluster (eos.testing.clusters.Cluster) for the whole session; faults are repaired after each test."""
    state = pytestconfig.stash[_STATE]
    with _choose_cluster(pytestconfig, None, None, None, None) as cluster:
        state.shared = cluster
        yield cluster
        state.shared = None


@pytest.fixture
def eos_cluster(pytestconfig: pytest.Config) -> Iterator[StartCluster]:
    """Return a function that starts clusters of the test's own.

    `eos_cluster(nodes=3, version="3.9.2", config={...}, backend="jvm")`
    """
    with ExitStack() as running:

        def start(
            nodes: int | None = None,
            version: str | None = None,
            config: Mapping[str, object] | None = None,
            backend: str | None = None,
        ) -> Cluster:
            return running.enter_context(_choose_cluster(pytestconfig, nodes, version, config, backend))

        yield start


@pytest.fixture(scope="session")
def _eos_broker(pytestconfig: pytest.Config) -> Iterator[str]:
    """Return the bootstrap servers of the single node for `eos_run`: a local JVM unless --eos-kafka is given."""
    backend = pytestconfig.getoption("--eos-kafka") or "jvm"
    with _choose_cluster(pytestconfig, 1, None, None, backend) as cluster:
        yield cluster.bootstrap_servers


@pytest.fixture
def eos_run(_eos_broker: str) -> RunOnBroker:
    """Return a function that runs an App on a real broker, on topics that it creates and removes.

    `eos_run(app, [("topic", {"value": 1})]).values("out")`
    """
    from eos.testing.online import run_on

    def run(app: App, records: Iterable[Record | tuple[Any, ...]], settings: Mapping[str, Any] | None = None) -> Ran:
        return run_on(_eos_broker, app, records, settings)

    return run


def _choose_cluster(
    config: pytest.Config,
    nodes: int | None,
    version: str | None,
    properties: Mapping[str, object] | None,
    backend: str | None,
) -> Cluster:
    from eos.broker import DEFAULT_VERSION
    from eos.testing.clusters import choose

    state = config.stash[_STATE]
    wanted = backend or config.getoption("--eos-kafka")
    version = version or config.getoption("--eos-kafka-version") or DEFAULT_VERSION
    key = f"{wanted} {version}"
    if key not in state.choices:
        state.choices[key] = choose(wanted, version)
        state.reasons.add(state.choices[key].reason)
    return state.choices[key].cluster(nodes or config.getoption("--eos-kafka-nodes"), version, properties)


# Faults that a backend cannot make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    return (yield from _skip_if_not_supported())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    return (yield from _skip_if_not_supported())


def _skip_if_not_supported() -> Generator[None, object, object]:
    try:
        return (yield)
    except Exception as error:
        # Look only in modules that are imported already, because the exception's class can come from no other.
        clusters = sys.modules.get("eos.testing.clusters.base")
        if clusters is None or not isinstance(error, clusters.NotSupported):
            raise
        raise pytest.skip.Exception(f"not run: {error}", _use_item_location=True) from None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Repair the shared cluster after the test's own fixtures end and before the next test."""
    try:
        return (yield)
    finally:
        shared = item.config.stash[_STATE].shared
        if shared is not None:
            shared.repair()


# The summary


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for reason in sorted(config.stash[_STATE].reasons):
        terminalreporter.write_line(f"eos: {reason}")
    found = [*config.stash[_STATE].sweep_results, *_sweep_results()]
    if found:
        from eos.testing.sweeping import summary_lines

        terminalreporter.section("eos: every fault at every step")
        for line in summary_lines(found, max(100, terminalreporter._tw.fullwidth)):
            terminalreporter.write_line(line)


def _sweep_results() -> list[tuple[Any, ...]]:
    # Sweeps have run only if their module is imported already.
    sweeping = sys.modules.get("eos.testing.sweeping")
    return sweeping.recorded_outcomes() if sweeping is not None else []


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["eos_reasons"] = sorted(session.config.stash[_STATE].reasons)
        session.config.workeroutput["eos_swept"] = _sweep_results()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output, state = getattr(node, "workeroutput", {}), node.config.stash[_STATE]
    state.reasons.update(output.get("eos_reasons", ()))
    state.sweep_results += output.get("eos_swept", ())
