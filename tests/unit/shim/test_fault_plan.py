"""Fault rules without a network: which requests they match, the same in every run, and the plan's final report."""

from __future__ import annotations

from pathlib import Path

import pytest

from eos.errors import ConfigurationError
from eos.shim.faults.facts import RequestFacts
from eos.shim.faults.plan import Event, Phase, Plan, Rule, read_plan
from eos.shim.guard.job import read_user_name
from eos.shim.guard.policy import Policy
from eos.shim.pipeline import Connection

CONNECTION = Connection(1, "client", "broker 2", 2)


def struck(plan: Plan, count: int) -> list[list[int]]:
    """Return per rule the numbers of the matched requests out of `count`."""
    found: list[list[int]] = []
    for progress in plan.progress:
        hits = []
        for number in range(1, count + 1):
            if progress.count_match():
                progress.injected += 1
                hits.append(number)
        found.append(hits)
    return found


def test_rule_fires_from_nth_match_for_given_times() -> None:
    plan = Plan([Rule("EndTxn", "reset", nth=3), Rule("Produce", "reset", nth=2, times=3)])
    assert struck(plan, 9) == [[3], [2, 3, 4]]
    assert plan.complaints() == []
    assert plan.fired == 4
    assert plan.fired_by_action() == {"reset": 4}


def test_rule_chance_depends_on_seed_and_rule_only() -> None:
    rules = [Rule("Produce", "reset", chance=0.3), Rule("Produce", "reset", chance=0.3)]
    first, again, other = (struck(Plan(rules, seed), 200) for seed in (7, 7, 8))
    assert first == again
    assert first != other
    assert first[0] != first[1]
    assert all(30 < len(hits) < 90 for hits in first)


@pytest.mark.parametrize(
    ("conditions", "fits"),
    [
        ({}, True),
        ({"transactional_id": "orders-*"}, True),
        ({"transactional_id": "bills-*"}, False),
        ({"partition": "out-1"}, True),
        ({"partition": "*-1"}, True),
        ({"partition": "out-2"}, False),
        ({"group": "g"}, False),
        ({"broker": 2}, True),
        ({"broker": 3}, False),
        ({"outcome": "abort"}, False),
    ],
)
def test_rule_matches_if_all_conditions_match(conditions: dict[str, object], fits: bool) -> None:
    said = RequestFacts(0, "orders-1", partitions=frozenset({"out-0", "out-1"}))
    assert Rule("Produce", "reset", **conditions).matches(said, CONNECTION) is fits  # type: ignore[arg-type]
    assert not Rule("EndTxn", "reset", **conditions).matches(said, CONNECTION)  # type: ignore[arg-type]


def test_rule_with_beside_counts_later_requests_of_other_partitions() -> None:
    lost, beside = Plan([Rule("Produce", "reset"), Rule("Produce", "reset", beside=1)]).progress
    one, other = (RequestFacts(0, partitions=frozenset({f"out-{number}"})) for number in range(2))
    assert not lost.is_on_other_partitions(other), "no request was matched yet"
    lost.first = one
    assert lost.is_on_other_partitions(other)
    assert not lost.is_on_other_partitions(one)
    assert not lost.is_on_other_partitions(RequestFacts(0, partitions=one.partitions | other.partitions))
    assert not lost.is_on_other_partitions(RequestFacts(0)), "unknown for a request without partitions"
    assert (lost.number, beside.rule.beside) == (1, 1)


def test_rule_cannot_wait_for_rule_of_other_side() -> None:
    near = Rule("Produce", "reset", side="client")
    for far in (Rule("Produce", "reset", beside=1), Rule("Produce", "delay", until=Event(rule=1))):
        with pytest.raises(ConfigurationError):
            Plan([near, far])
        assert len(Plan([near, Rule(**{**vars(far), "side": "client"})]).rules) == 2


def test_plan_reports_rules_that_did_not_fire_as_planned() -> None:
    plan = Plan(
        [
            Rule("EndTxn", "reset", nth=2),
            Rule("Produce", "reset", times=3),
            Rule("Produce", "delay", until=Event("EndTxn")),
            Rule("Produce", "reset", chance=0.001),
            Rule("Produce", "reset", optional=True),
        ]
    )
    for progress, fitted, hits, waits in zip(
        plan.progress, (1, 2, 1, 5, 0), (0, 2, 1, 0, 0), (0, 0, 1, 0, 0), strict=True
    ):
        progress.matched, progress.injected, progress.open = fitted, hits, waits
    complaints = plan.complaints()
    assert [text.split(" ")[1] for text in complaints] == ["1", "2", "3", "4"]
    assert "never fired: 1 requests matched" in complaints[0]
    assert "fired 2 of 3 times" in complaints[1]
    assert "its event never occurred" in complaints[2]


def test_plan_from_toml_equals_plan_from_python(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        """
        seed = 7
        [[rule]]
        api = "EndTxn"
        action = "reset"
        phase = "late"
        nth = 3
        transactional_id = "orders-*"
        until = { api = "Produce", nth = 2, when = "arrives" }
        side = "client"
        [[rule]]
        api = "Produce"
        action = "delay"
        seconds = 2
        """
    )
    plan = read_plan(path)
    until = Event("Produce", 2, "arrives")
    late = Rule("EndTxn", "reset", Phase.LATE, 3, transactional_id="orders-*", until=until, side="client")
    assert plan.rules == [late, Rule("Produce", "delay", seconds=2)]
    assert (plan.seed, len(plan.on("client")), len(plan.on("broker"))) == (7, 1, 1)


@pytest.mark.parametrize(
    "values",
    [
        {"nth": 0},
        {"times": 0},
        {"side": "left"},
        {"chance": 0.0},
        {"seconds": 1.0},
        {"seconds": 1.0, "until": Event("EndTxn")},
        {"phase": Phase.LATE},
        {"phase": Phase.LATE, "seconds": 1.0, "until": Event("EndTxn")},
        {"error": 3},
    ],
)
def test_invalid_rule_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        Rule("Produce", "reset", **values)  # type: ignore[arg-type]


def test_policy_allows_everything_it_does_not_name() -> None:
    nothing = Policy()
    assert not nothing.transactional_only("t")
    assert not nothing.committed_only("t")
    assert not nothing.transactional_offsets_only("g")
    assert nothing.may_use("anybody", "anything")
    some = Policy(("orders-*",), ("bills",), ("g",), 1, (("billing", ("billing-",)), ("*", ("free-", "open-"))))
    assert some.transactional_only("orders-1")
    assert not some.transactional_only("order")
    assert some.committed_only("bills")
    assert some.transactional_offsets_only("g")
    assert some.may_use("billing", "billing-1")
    assert not some.may_use("billing", "free-1")
    assert some.may_use("anybody", "open-1")
    assert not some.may_use("anybody", "billing-1")


@pytest.mark.parametrize(
    ("mechanism", "message", "name"),
    [
        ("PLAIN", b"\0alice\0secret", "alice"),
        ("PLAIN", b"other\0alice\0secret", "alice"),
        ("SCRAM-SHA-256", b"n,,n=alice,r=nonce", "alice"),
        ("SCRAM-SHA-512", b"n,a=x,n=a=2Cb=3Dc,r=nonce", "a,b=c"),
        ("SCRAM-SHA-512", b"c=biws,r=nonce,p=proof", None),
        ("PLAIN", b"\0\0secret", None),
        ("PLAIN", b"", None),
        ("SCRAM-SHA-512", b"", None),
    ],
)
def test_user_name_is_read_from_plain_and_scram(mechanism: str, message: bytes, name: str | None) -> None:
    assert read_user_name(mechanism, message) == name
