"""`eos.testing.run`: errors for tests that do not fit the App, and the order of records."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import eos
import eos.testing
from eos.errors import ConfigurationError


def test_query_for_a_topic_without_outputs_is_an_error() -> None:
    app = eos.App("prices")

    @app.process("orders", to=["priced", "audit"])
    def price(order: bytes) -> bytes:
        return order

    ran = eos.testing.run(app, [("orders", b"o")])
    assert (ran.values("priced"), ran.values("audit"), ran.values("orders.dlq")) == ([b"o"], [], [])
    for asked in (ran.values, ran.to):
        with pytest.raises(
            ConfigurationError, match=r"no output goes to 'pricedd': outputs go to audit, orders\.dlq, priced$"
        ):
            asked("pricedd")


def test_each_output_keeps_its_headers_if_the_function_reuses_their_list() -> None:
    app, reused = eos.App("prices"), [("n", b"")]

    @app.process("orders", to="priced")
    def price(order: bytes) -> eos.Out:
        reused[0] = ("n", order)
        return eos.Out(order, headers=reused)

    ran = eos.testing.run(app, [("orders", b"1"), ("orders", b"2")])
    assert [record.headers for record in ran.to("priced")] == [[("n", b"1")], [("n", b"2")]]


# ---- the order of records --------------------------------------------------------------------------------------------


def seen_by(app: eos.App, order: Any, seed: int) -> list[str]:
    records = [
        *(("a", f"a{n}") for n in range(3)),
        *(eos.Record("b", partition, n, value=f"b{partition}{n}".encode()) for partition in (0, 1) for n in range(2)),
    ]
    ran = eos.testing.run(app, records, order=order, seed=seed)
    return [(value or b"").decode() for value in ran.values("out")]


def both_topics(batch: bool) -> eos.App:
    app = eos.App("both")
    if batch:
        app.process_batch(["a", "b"], to="out")(lambda records: [record.out(record.value) for record in records])
    else:
        app.process(["a", "b"], to="out")(lambda record: record.value)
    return app


@pytest.mark.parametrize("batch", [False, True])
def test_shuffled_order_keeps_only_partition_order(batch: bool) -> None:
    found = {tuple(seen_by(both_topics(batch), "shuffled", seed)) for seed in range(200)}
    assert len(found) > 50
    for seen in found:
        assert len(seen) == 7
        for partition in ("a", "b0", "b1"):
            own = [value for value in seen if value.startswith(partition)]
            assert own == sorted(own)
    firsts = {(seen.index("a0") < seen.index("b00"), seen.index("b00") < seen.index("b10")) for seen in found}
    assert firsts == set(itertools.product((True, False), repeat=2))
    assert any(seen[:3] == ("a0", "a1", "a2") for seen in found), "one topic's backlog comes first"


def test_seed_repeats_shuffled_order_and_default_keeps_given_order() -> None:
    app = both_topics(batch=False)
    assert seen_by(app, "shuffled", 7) == seen_by(app, "shuffled", 7)
    given = ["a0", "a1", "a2", "b00", "b01", "b10", "b11"]
    assert seen_by(app, "given", 7) == given
    assert [value.decode() for value in eos.testing.run(app, [("a", "x"), ("b", "y")]).values("out") if value] == [
        "x",
        "y",
    ]
    with pytest.raises(ConfigurationError, match="not 'sorted'"):
        seen_by(app, "sorted", 7)


def test_shuffled_order_mixes_chained_topics_with_input() -> None:
    app = eos.App("chain")
    app.process("in", to="between")(lambda record: record.value)
    app.process("between", to="out")(lambda record: record.value)

    def order_of(seed: int) -> tuple[str, ...]:
        ran = eos.testing.run(app, [("in", "1"), ("in", "2"), ("in", "3")], order="shuffled", seed=seed)
        assert ran.values("out") == [b"1", b"2", b"3"]
        return tuple(sent.topic for sent in ran.sent)

    assert len({order_of(seed) for seed in range(50)}) == 5, "every possible interleaving"
