"""Send rows of a real PostgreSQL to a real Kafka: each is there once and in order, whatever is killed."""

from __future__ import annotations

import contextlib
import json
import re

import pytest
from confluent_kafka.admin import AdminClient

from eos.sql import Postgres
from tests.support import forked
from tests.support.killed import KILLED
from tests.support.outbox import PAGE, Outbox
from tests.support.reading import create_topic, settled_records, wait_until

pytestmark = pytest.mark.takes(30)


@pytest.mark.deep_for("before-the-offsets")
@pytest.mark.parametrize(
    "kills",
    [(("eos.sql.postgres:roll_back", 6), ("flush", 3)), (("send_offsets", 2), ("commit", 4))],
    ids=["before-the-offsets", "around-the-commit"],
)
def test_rows_are_exact_after_kills_right_after_a_step(outbox: Outbox, kills: tuple[tuple[str, int], ...]) -> None:
    for step, number in kills:
        outbox.insert(200)
        outbox.run(program=("-c", KILLED, step, "behind", str(number)), ends=-9)
    outbox.run()
    outbox.require_exact()


def test_row_of_a_late_commit_is_neither_lost_nor_reordered(outbox: Outbox) -> None:
    """A transaction draws its numbers first, and commits after rows with higher numbers were visible."""
    with outbox.connect() as late:
        late.autocommit = False
        outbox.insert(3)
        outbox.insert(5, late)
        outbox.insert(100)
        with outbox.start("--until-end") as worker:
            outbox.wait_for_records(3)
            outbox.wait_for_queries(3)
            assert outbox.arrived() == 3, "rows after an open transaction were read"
            assert worker.poll() is None, "the rows that were visible at the start are not all sent"
            reader = Postgres(outbox.server.dsn(outbox.database)).table_reader("outbox")
            held = reader.held()
            reader.close()
            assert (held.rows, held.pid, held.open_s is not None) == (100, late.info.backend_pid, True)
            late.commit()
            assert worker.wait(30) == 0, outbox.log
    outbox.require_exact()


@pytest.mark.deep  # test_outbox_faults.py has a takeover
def test_second_worker_takes_over(outbox: Outbox) -> None:
    outbox.insert(50)
    with outbox.start("--instance", "one") as one:
        outbox.wait_for_log("table assigned")
        outbox.wait_for_records(50)
        with outbox.start("--instance", "two") as two:
            outbox.wait_for_log("session started", 2)
            outbox.insert(100)
            outbox.stop(one)
            outbox.insert(100)
            outbox.wait_for_records(250)
            outbox.stop(two)
    outbox.insert(10)
    outbox.run()
    outbox.require_exact()


def test_wrong_table_exits_with_78_and_prints_the_statement(outbox: Outbox) -> None:
    outbox.insert(20)
    outbox.execute("alter table outbox drop column xid")
    printed = outbox.run(ends=78)
    (statement,) = re.findall(r"(alter table .*); create index", printed)
    outbox.execute(statement.replace('\\"', '"'))
    outbox.define(options=", delete=True")
    assert "without an index on xid" in outbox.run()
    outbox.sent.sort()
    assert outbox.execute("select count(*) from outbox") == [(0,)], "delete=True deletes what is in Kafka"
    outbox.require_exact()
    outbox.execute("create role reader login; grant select on outbox to reader")
    outbox.insert(5)
    outbox.define(options=", delete=True")
    program = (outbox.folder / "outbox.py").read_text()
    (outbox.folder / "outbox.py").write_text(program.replace("user=postgres", "user=reader"))
    outbox.run(ends=77)
    (outbox.folder / "outbox.py").write_text(
        program.replace("user=postgres", "user=reader").replace(", delete=True", "")
    )
    outbox.run()
    outbox.require_exact()
    outbox.execute("drop owned by reader; drop role reader")


@pytest.mark.deep
def test_failing_row_follows_the_policy(outbox: Outbox) -> None:
    body = "assert row['id'] != 30, 'the thirtieth'"
    outbox.define(body)
    outbox.insert(50)
    assert "failed on the row with id 30 of table outbox: AssertionError: the thirtieth" in outbox.run(ends=65)
    assert outbox.arrived() == 29
    outbox.define(body, ', on_error="skip"')
    outbox.run("-X", "session.timeout.ms=6000")
    outbox.sent.remove(30)
    outbox.require_exact()


@pytest.mark.deep
def test_functions_of_the_app_read_the_records_of_rows(outbox: Outbox) -> None:
    """The positions are records of the App's input too, between those of its functions."""
    to = create_topic(outbox.servers, f"{outbox.topic}-2")
    with (outbox.folder / "outbox.py").open("a") as program:
        program.write(
            f"\n@app.process({outbox.topic!r}, to={to!r})\ndef copy(value: bytes) -> bytes:\n    return value\n"
        )
    for _ in range(2):
        outbox.insert(300)
        outbox.run(program=("-c", KILLED, "commit", "behind", "5"), ends=-9)
    outbox.run()
    outbox.require_exact()
    found = [int(record.value() or b"") for record in settled_records(outbox.servers, to)[0]]
    assert sorted(found) == sorted(outbox.sent)


def test_programs_of_the_page_send_rows(outbox: Outbox) -> None:
    """The default columns, a function with a Struct, and a function of the App that reads the records."""
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.S):
        changed = code.replace("postgresql://localhost/shop", outbox.server.dsn(outbox.database))
        for old, new in {'App("shop")': outbox.id, 'App("orders")': f"{outbox.id}-2"}.items():
            changed = changed.replace(old, f"App({new!r})")
        for old in ('to="events"', 'to="orders-placed"'):
            changed = changed.replace(old, f'to="{outbox.topic}"')
        (outbox.folder / name).write_text(changed)
    outbox.execute("alter table outbox add column headers jsonb")
    outbox.execute("""insert into outbox (key, value, headers) values ('a', '{"b": [1, null]}', '{"type": "x"}')""")
    outbox.run()
    outbox.execute(
        "create table orders (id bigint, customer text, cents bigint, xid xid8 not null default pg_current_xact_id())"
    )
    outbox.execute("insert into orders values (1, 'Ann', 5), (2, 'Bob', 0)")
    command = ["eos", "run", "orders.py", "--until-end", "--instance", "one"]
    ended = forked.run(command, cwd=outbox.folder, env=outbox.environment)
    assert ended.returncode == 0, ended.stderr
    found = [one for records in settled_records(outbox.servers, outbox.topic).values() for one in records]
    assert {(one.key(), one.value(), str(one.headers())) for one in found} == {
        (b"a", b'{"b":[1,null]}', "[('type', b'x')]"),
        (b"Ann", json.dumps({"id": 1, "customer": "Ann", "cents": 5}, separators=(",", ":")).encode(), "None"),
    }


def test_position_outlives_the_offsets_of_the_group(outbox: Outbox) -> None:
    """The brokers delete the offsets of a group that has no member for a week. A lost position is noticed."""
    outbox.insert(100)
    outbox.run()
    admin = AdminClient({"bootstrap.servers": outbox.servers})

    def deleted() -> bool:
        with contextlib.suppress(Exception):
            admin.delete_consumer_groups([outbox.id])[outbox.id].result(10)
        return not any(group.group_id == outbox.id for group in admin.list_consumer_groups().result(10).valid)

    wait_until("the deletion of the group", deleted, 30)
    outbox.insert(100)
    outbox.run()
    outbox.require_exact()
    admin.delete_topics([outbox.position_topic])[outbox.position_topic].result(30)
    wait_until("the deletion", lambda: outbox.position_topic not in admin.list_topics(timeout=10).topics, 30)
    printed = outbox.run(ends=66)
    assert "the position of this source is gone" in printed
    outbox.require_exact()
