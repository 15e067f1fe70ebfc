"""Define the suites as data: tests, processes, budgets, and the changes that require their deep tests.

There are three depths, by pytest's marks. Tests without a mark are in `make test`. `deep` tests are in `make test-all`,
and in CI if a changed path requires them. `long` tests, the repetitions, are in `make test-all` only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Suite:
    """Describe one suite.

    `processes`: of pytest-xdist; `budget_s`: of `make test` on two idle cores, 830 in all; `commands`: run in parallel
    with the tests, without pytest; `stateful`: the functions of every pipeline have state, and tests that another suite
    has too are deep; `shares`: its tests use the shared brokers of each process.
    """

    name: str
    budget_s: int
    paths: tuple[str, ...] = ()
    processes: int = 0
    timeout_s: int = 300
    commands: tuple[tuple[str, ...], ...] = ()
    stateful: bool = False
    shares: bool = False


STATEFUL = "EOS_TEST_STATEFUL"
"""An environment variable: the functions of every pipeline have state."""

_PYTHON = (sys.executable, "-m")
_FAULTS = (
    "broker_faults",
    "kill_steps",
    "late_answers",
    "late_requests",
    "rebalances",
    "restart",
    "zombies",
)

SUITES = (
    Suite(
        "lint",
        40,
        commands=((*_PYTHON, "ruff", "check", "."), (*_PYTHON, "ruff", "format", "--check", "."), (*_PYTHON, "mypy")),
    ),
    Suite("unit", 60, ("tests/unit",), 4),
    # Most of these wait for a broker's clock; each process has its own brokers.
    Suite("broker", 250, ("tests/broker", "tests/database"), 8, shares=True),
    # Every kind of fault again, with state.
    Suite(
        "state",
        40,
        ("tests/state", *(f"tests/broker/test_{name}.py" for name in _FAULTS)),
        processes=6,
        stateful=True,
        shares=True,
    ),
    Suite("shim", 120, ("tests/shim",), 6, shares=True),
    # Clusters of three that tests break: containers if an engine answers, else local JVMs.
    Suite("containers", 140, ("tests/containers",), 4),
    Suite("spark", 220, ("tests/spark",), 3, timeout_s=600),
)
QUICK = ("lint", "unit")
"""The suites of `make check`."""

EVERY = frozenset(suite.name for suite in SUITES) - frozenset(QUICK)  # suites with deep tests
_CORE = frozenset({"broker", "containers"})

DEEP: dict[str, frozenset[str]] = {
    "eos/broker/": _CORE | {"shim"},
    "eos/cli/init.py": frozenset({"containers"}),
    "eos/cli/shim.py": frozenset({"shim"}),
    "eos/cli/spark.py": frozenset({"spark"}),
    "eos/demo/": frozenset({"broker"}),
    "eos/health/": frozenset({"broker"}),
    "eos/probes.py": frozenset({"broker", "shim"}),
    "eos/app/": _CORE | {"spark", "state"},
    "eos/encoding/": _CORE | {"spark", "state"},
    "eos/session/": _CORE | {"spark", "state"},
    "eos/state/": frozenset({"spark", "state"}),
    "eos/worker/": _CORE | {"spark", "state"},
    "eos/shim/": frozenset({"shim"}),
    "eos/sql/": frozenset({"broker"}),
    "eos/testing/": _CORE,
    "eos/": _CORE | {"spark"},
    "spark_connector/": frozenset({"spark"}),
    "compose/": frozenset({"containers"}),
    "examples/": frozenset({"broker"}),
    "tests/broker/": frozenset({"broker"}),
    "tests/containers/": frozenset({"containers"}),
    "tests/database/": frozenset({"broker"}),
    "tests/shim/": frozenset({"shim"}),
    "tests/spark/": frozenset({"spark"}),
    "tests/state/": frozenset({"state"}),
    "tests/README.md": frozenset(),
    "tests/unit/": frozenset(),
    "docs/": frozenset(),
    "docs/howto/migrate/": frozenset({"broker"}),
    "docs/tutorial/": frozenset({"broker", "spark"}),
    "benchmarks/": frozenset(),
    "benchmarks/peers/installed.py": frozenset({"broker"}),
    "README.md": frozenset(),
    "CODE_OF_CONDUCT.md": frozenset(),
    "CONTRIBUTING.md": frozenset(),
    "SECURITY.md": frozenset(),
    "LICENSE": frozenset(),
    "mkdocs.yml": frozenset(),
    ".github/": frozenset(),
    "CHANGELOG.md": frozenset(),
    ".ci/landed": frozenset(),
}
"""A path or its beginning -> the suites whose deep tests a change of it requires; the longest match counts.
A path without a match (this table, the tests' support, pyproject.toml, the Makefile) requires all suites."""


def joined(suites: Iterable[Suite], depths: Mapping[str, str]) -> Iterator[tuple[Suite, str]]:
    """Yield the suites with their depths, with suites of one depth that share brokers joined into one.

    The processes of joined suites start once, and only one end has cores that wait for the last test. A deep stateful
    suite stays separate, because its functions have state.
    """
    groups: dict[str, list[Suite]] = {}
    for suite in suites:
        depth = depths[suite.name]
        separate = not suite.shares or (suite.stateful and depth != "test")
        groups.setdefault(suite.name if separate else depth, []).append(suite)
    for group in groups.values():
        first, *others = group
        if others:
            first = replace(
                first,
                name=", ".join(suite.name for suite in group),
                budget_s=sum(suite.budget_s for suite in group),
                paths=tuple(dict.fromkeys(path for suite in group for path in suite.paths)),
                stateful=False,
            )
        yield first, depths[group[0].name]


def deep_for(changed: Iterable[str]) -> dict[str, list[str]]:
    """Return the suites whose deep tests must run, each with the paths that require it."""
    asked: dict[str, list[str]] = {}
    for path in changed:
        fits = max((begin for begin in DEEP if path.startswith(begin)), key=len, default=None)
        for name in EVERY if fits is None else DEEP[fits]:
            asked.setdefault(name, []).append(path)
    return asked
