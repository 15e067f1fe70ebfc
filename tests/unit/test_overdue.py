"""Overdue transactions: which ids are watched when a group changes, and how often they are queried."""

from __future__ import annotations

import json
from typing import Any

from eos.kafka.admin.overdue import (
    OverdueTransactions,
    find_still_open,
    seconds_until_check,
    transactional_ids_in,
)
from eos.kafka.admin.transactions import log_partition_of
from eos.kafka.admin.watcher import Watcher
from eos.kafka.client.cluster import ListedTransaction
from eos.kafka.client.settings import Settings

PARTITIONS = 50


def owner(name: str) -> str:
    return json.dumps({"instance": name, "host": "h", "since": 1}) + "\0"


def listed(name: str, start_ms: int = 1_000, offsets_of: str = "", state: str = "Ongoing") -> ListedTransaction:
    here = ("__consumer_offsets", log_partition_of(offsets_of, PARTITIONS)) if offsets_of else ("out", 0)
    return ListedTransaction(name, 7, 0, state, 1, start_ms, 10_000, frozenset({here}))


class Cluster:
    """A cluster with these transactions and committers of the group's offsets that records its queries."""

    def __init__(self, transactions: list[ListedTransaction], wrote: list[str]) -> None:
        self.known = {t.transactional_id: t for t in transactions}
        self.wrote = wrote
        self.described: list[str] = []

    def committed_metadata(self, group: str) -> list[str]:
        return [owner(name) for name in self.wrote]

    def partitions(self, topics: list[str]) -> dict[Any, int]:
        return {(topic, partition): 0 for topic in topics for partition in range(PARTITIONS)}

    def ongoing(self, prefix: str) -> list[str]:
        return [name for name, t in self.known.items() if name.startswith(prefix) and t.state == "Ongoing"]

    def describe_transactions(self, names: list[str]) -> list[ListedTransaction]:
        self.described += names
        return [self.known[name] for name in names if name in self.known]


def looked_after(cluster: Any, group: str = "orders", own: str = "orders-a") -> list[str]:
    return [
        t.transactional_id
        for t in OverdueTransactions(Settings(), group, own, Watcher(Settings()))._transactions_of_others(cluster)
    ]


def test_watcher_ignores_other_apps_with_similar_names() -> None:
    eu = listed("orders-eu-b", offsets_of="orders-eu")
    cluster = Cluster([listed("orders-b"), eu, listed("payments-b")], wrote=["orders-a", "orders-b"])
    assert looked_after(cluster) == ["orders-b"]
    assert "payments-b" not in cluster.described, "open transactions of other groups are listed, but not described"


def test_watcher_finds_member_without_commit_by_its_pending_offsets() -> None:
    first = listed("orders-c", offsets_of="orders")
    assert looked_after(Cluster([first, listed("orders-d")], wrote=[])) == ["orders-c"]


def test_watcher_ignores_only_the_two_ids_of_its_own_member() -> None:
    names = ["orders-a", "orders-a-alternate", "orders-a-2"]
    assert looked_after(Cluster([listed(name) for name in names], wrote=names)) == ["orders-a-2"]


def test_watcher_finds_session_loops_by_their_commits() -> None:
    assert looked_after(Cluster([listed("x-1"), listed("x-2")], ["x-1", "x-2"]), "orders", own="x-1") == ["x-2"]


def test_committed_metadata_names_transactional_ids() -> None:
    texts = [owner("g-a"), owner("b"), "", "no JSON", "[]", json.dumps({"instance": 7}), json.dumps({"other": "x"})]
    assert {"g-a", "g-a-alternate", "b", "g-b", "g-b-alternate"} <= transactional_ids_in("g", texts)
    assert transactional_ids_in("g", texts[2:]) == set()


def test_live_member_is_queried_only_once_more() -> None:
    """Its transactions end within moments: the next one that is open has another start."""
    seen = [listed("a"), listed("b"), listed("c")]
    now: Any = Cluster([listed("a"), listed("b", start_ms=2_000), listed("c", state="CompleteCommit")], [])
    assert [t.transactional_id for t in find_still_open(now, seen)] == ["a"]


def test_next_check_waits_for_a_due_transaction_at_most_five_seconds() -> None:
    opened = [listed("a", start_ms=100_000), listed("b", start_ms=103_000)]  # due at 110,000 and 113,000 ms
    assert [seconds_until_check(opened, now) for now in (0, 106_000, 108_000, 109_900, 200_000)] == [
        5.0,
        4.0,
        2.0,
        0.5,
        0.5,
    ]
