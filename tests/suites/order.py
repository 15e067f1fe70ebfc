"""Which tests stay together in one process, and which begin first."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

# A fixture of the module's own, or one of a conftest.py that is made once per module.
_SHARED = re.compile(r'scope="module"|\b(cluster|whole|clusters|single_nodes): ')

# Most tests on the broker of the older version, by their names: one process has one, and others seldom need theirs.
_OLDER = re.compile(r"392|3\.9\.2|_3_9_|before_kip_890|before_4_0")

LONGEST = (
    "tests/unit/test_cli.py",
    "tests/unit/shim/test_protect_requests.py",
    "tests/unit/shim/test_addresses.py",
    "tests/broker/test_patterns.py",
    "tests/broker/test_verify.py",
    "tests/broker/test_security.py",
    "tests/broker/test_local_kafka.py",
    "tests/shim/test_protect_failover.py",
    "tests/shim/test_clients.py",
    "tests/broker/test_broker_faults.py",
    "tests/shim/test_sweep.py",
    "tests/broker/test_demo.py::test_the_demo_hits",
    "tests/broker/test_coordinator_clocks.py",
    "tests/broker/test_preflight.py",
    "tests/shim/test_tls_and_sasl.py",
    "tests/broker/test_operations.py::test_a_worker_whose_broker",
    "tests/broker/test_own_loop.py::test_aborts_at_random",
    "tests/broker/test_overdue.py",
    "tests/broker/test_transactions_admin.py",
    "tests/shim/test_three_brokers.py",
    "tests/broker/test_dlq_replay.py",
    "tests/broker/test_zombies.py::test_a_worker_whose_every",
    "tests/state/test_state.py::test_what_another_member",
    "tests/state/test_state.py::test_state_goes_on",
    "tests/broker/test_history.py",
    "tests/shim/test_protect_chaos.py",
    "tests/shim/test_hostile_clients.py",
    "tests/shim/test_trace.py",
    "tests/shim/test_protect_owner.py",
    "tests/containers/test_clusters.py",
    "tests/containers/test_compose.py::test_three_brokers",
    "tests/containers/matrix/test_matrix.py",
    "tests/spark/test_keyed.py",
    "tests/spark/test_standalone.py",
    "tests/spark/test_run.py",
    "tests/spark/test_kills.py",
    "tests/spark/test_brokers.py",
    "tests/spark/test_through_shim.py",
)
"""Beginnings of names: what takes so long that others should not wait for it at the end, the longest first."""


@cache
def _stays_together(file: str) -> bool:
    return file.startswith("tests/unit/") or bool(_SHARED.search((ROOT / file).read_text()))


def unit_of(nodeid: str) -> str:
    """What one process runs as a whole: a test, a file whose tests share what their module made, or what needs a broker
    of the older version. Unit tests are too short to be sent one by one.
    """
    file = nodeid.partition("::")[0]
    if _stays_together(file):
        return file
    return "older" if _OLDER.search(nodeid) else nodeid


def rank(nodeid: str) -> int:
    """The lower, the earlier."""
    if unit_of(nodeid) == "older":
        return 0
    return next((n for n, begin in enumerate(LONGEST) if nodeid.startswith(begin)), len(LONGEST))
