"""Define `eos txn list | describe | find-hanging | abort`, which show and end transactions of the cluster.

The module owns the options and the printed text. eos.kafka.admin.transactions decides which transactions hang and which
may be aborted.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Collection, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from eos.cli.options import (
    SEND_ID_PREFIX,
    BootstrapServers,
    Json,
    Set,
    Yes,
    confirm,
    load_settings,
    print_json,
    print_table,
)
from eos.errors import Unavailable, UsageError
from eos.kafka.admin.fence import abort_open_transaction
from eos.kafka.admin.transactions import (
    ENDED,
    STATES,
    OpenTransaction,
    abort_hanging,
    find_open,
    only_hanging,
)
from eos.kafka.client.cluster import ClusterAdmin, ListedTransaction, TransactionalIdState
from eos.records import format_position

HANGING_FOUND = 1

app = typer.Typer(no_args_is_help=True, help="List, describe and abort transactions of the cluster; find hanging ones.")
Topics = Annotated[
    list[str] | None, typer.Option("--topic", help="Only transactions on this topic; repeatable. Default: all topics.")
]


@app.command("list")
def list_(
    state: Annotated[
        list[str] | None, typer.Option(help="Only transactions in this state, e.g. Ongoing; repeatable.")
    ] = None,
    prefix: Annotated[str, typer.Option(help="Only transactional.ids with this prefix, e.g. an App's id.")] = "",
    json: Json = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """List the transactional.ids that the coordinators know, with their states. Those of a completed `eos topic send`
    are listed only with --prefix."""
    wanted = _parse_states(state or [])
    with ClusterAdmin(load_settings(bootstrap_servers, set_)) as admin:
        rows = [row for row in admin.transactions() if row.transactional_id.startswith(prefix)]
    if not prefix:
        # Each call of `eos topic send` uses a new id, and the brokers keep it for a week.
        rows = [row for row in rows if row.state not in ENDED or not row.transactional_id.startswith(SEND_ID_PREFIX)]
    if wanted:
        rows = [row for row in rows if row.state in wanted]
    if json:
        print_json([_listed_json(row) for row in rows])
        return
    table = Table("transactional.id", "state", "producer id", "epoch", "coordinator", "open for", "partitions")
    for row in rows:
        age = _open_for(row)
        parts = str(len(row.partitions))
        ids = (str(row.producer_id), str(row.epoch), str(row.coordinator))
        table.add_row(row.transactional_id, row.state, *ids, age, parts)
    _print_table(table, _no_rows_sentence(wanted, prefix), len(rows))


@app.command()
def describe(
    transactional_id: Annotated[str, typer.Argument(metavar="TRANSACTIONAL_ID")],
    json: Json = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Show the coordinator's entry for one transactional.id."""
    with ClusterAdmin(load_settings(bootstrap_servers, set_)) as admin:
        rows = admin.describe_transactions([transactional_id])
    if not rows:
        raise Unavailable(f"{transactional_id}: no coordinator knows this transactional.id (never used, or expired)")
    row = rows[0]
    if json:
        print_json(_listed_json(row))
        return
    table = Table("", row.transactional_id)
    table.add_row("state", row.state)
    table.add_row("producer id", str(row.producer_id))
    table.add_row("epoch", str(row.epoch))
    table.add_row("coordinator", f"broker {row.coordinator}")
    table.add_row("timeout", f"{row.timeout_ms} ms")
    table.add_row("open for", _open_for(row))
    for partition in sorted(row.partitions):
        table.add_row("partition", format_position(*partition))
    _print_table(table, "", 1)


@app.command("find-hanging")
def find_hanging(
    topic: Topics = None,
    open_too: Annotated[
        bool, typer.Option("--all", help="Include transactions that are open and do not hang.")
    ] = False,
    json: Json = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> int:
    """Show open transactions that no coordinator will end. Exits with 1 if it finds any."""
    with ClusterAdmin(load_settings(bootstrap_servers, set_)) as admin:
        found = find_open(admin, topic or None)
    hanging = only_hanging(found)
    shown = found if open_too else hanging
    if json:
        print_json([_open_json(t) for t in shown])
    else:
        _print_table(open_transactions_table(shown), "no hanging transactions", len(shown))
        for command in dict.fromkeys(abort_command(t) for t in hanging):
            print(f"to abort it: {command}", file=sys.stderr)
    return HANGING_FOUND if hanging else 0


@app.command()
def abort(
    transactional_id: Annotated[
        str | None,
        typer.Option(help="End the open transaction of this transactional.id and fence its owner (exit 79)."),
    ] = None,
    topic: Annotated[str | None, typer.Option(help="A topic on which a transaction hangs.")] = None,
    partition: Annotated[int | None, typer.Option(min=0)] = None,
    yes: Yes = False,
    json: Json = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """End a transaction through its coordinator, or a hanging one by a marker on its partition. Asks to confirm."""
    if (transactional_id is None) == (topic is None) or (topic is None) != (partition is None):
        raise UsageError("eos txn abort needs either --transactional-id, or --topic and --partition of a hanging one")
    loaded = load_settings(bootstrap_servers, set_)
    with ClusterAdmin(loaded) as admin:
        if transactional_id is not None:
            confirm(f"end the open transaction of {transactional_id} and fence its owner", yes)
            before, after = abort_open_transaction(admin, loaded, transactional_id)
            if json:
                print_json([_end_result_json({"transactional_id": transactional_id}, before, after)])
                return
            was = f"was {before.state} (producer id {before.producer_id}, epoch {before.epoch})"
            print(f"{transactional_id}: {was}, is {after.state if after else 'removed'}; its former owner is fenced")
            return
        assert topic is not None
        assert partition is not None
        _abort_hanging(admin, topic, partition, yes, json)


def _abort_hanging(admin: ClusterAdmin, topic: str, partition: int, yes: bool, json: bool) -> None:
    here = [t for t in find_open(admin, [topic]) if t.partition == (topic, partition)]
    hanging = only_hanging(here)
    if not hanging:
        why = f": {here[0].reason} (transactional.id {here[0].transactional_id})" if here else ""
        raise Unavailable(f"no hanging transaction on {format_position(topic, partition)}{why}")
    done: list[dict[str, Any]] = []
    try:
        for found in hanging:
            who = f"producer id {found.producer.producer_id}, epoch {found.producer.epoch}"
            confirm(f"write an abort marker to {format_position(*found.partition)} for {who} ({found.reason})", yes)
            abort_hanging(admin, found)
            ids = (found.producer.producer_id, found.producer.epoch)
            where = {"topic": topic, "partition": partition}
            done.append(
                _end_result_json(
                    where, TransactionalIdState(found.verdict.value, *ids), TransactionalIdState("aborted", *ids)
                )
            )
            if not json:
                print(f"{format_position(*found.partition)}: aborted the transaction of {who}")
    finally:
        if json and done:  # an error must not hide the transactions that were aborted before it
            print_json(done)


# ---- output ---------------------------------------------------------------------------------------------------


def open_transactions_table(rows: Sequence[OpenTransaction]) -> Table:
    table = Table("verdict", "topic", "partition", "producer id", "epoch", "since offset", "holds back", "because")
    for t in rows:
        p = t.producer
        numbers = (str(p.partition[1]), str(p.producer_id), str(p.epoch), str(p.start_offset), str(t.held_back))
        who = f" ({t.transactional_id})" if t.transactional_id else ""
        table.add_row(t.verdict.value, p.partition[0], *numbers, f"{t.reason}{who}")
    return table


def abort_command(hanging: OpenTransaction) -> str:
    topic, partition = hanging.partition
    return f"eos txn abort --topic {topic} --partition {partition}"


def _listed_json(row: ListedTransaction) -> dict[str, Any]:
    return dataclasses.asdict(row) | {"partitions": [list(p) for p in sorted(row.partitions)]}


def _end_result_json(
    what: dict[str, Any], before: TransactionalIdState, after: TransactionalIdState | None
) -> dict[str, Any]:
    return what | {"before": _described_json(before), "after": _described_json(after)}


def _described_json(seen: TransactionalIdState | None) -> dict[str, Any] | None:
    return None if seen is None else {"state": seen.state, "producer_id": seen.producer_id, "epoch": seen.epoch}


def _open_json(t: OpenTransaction) -> dict[str, Any]:
    topic, partition = t.partition
    numbers = {k: v for k, v in dataclasses.asdict(t.producer).items() if k != "partition"}
    return {
        "verdict": t.verdict.value,
        "topic": topic,
        "partition": partition,
        **numbers,
        "held_back": t.held_back,
        "transactional_id": t.transactional_id,
        "state": t.state,
        "reason": t.reason,
    }


def _print_table(table: Table, nothing: str, rows: int) -> None:
    if not rows:
        print(nothing)
        return
    print_table(table)


def _open_for(row: ListedTransaction) -> str:
    """Return how long a transaction has been open; "-" if it has ended, because the coordinator then reports the start
    time of the last transaction."""
    if row.state in ENDED or row.start_ms < 0:
        return "-"
    return f"{max(0.0, time.time() - row.start_ms / 1000):.1f} s"


def _parse_states(names: Sequence[str]) -> set[str]:
    """Return the states in Kafka's spelling. Upper and lower case are equal. Raises UsageError."""
    spelling = {name.lower(): name for name in STATES}
    for name in names:
        if name.lower() not in spelling:
            raise UsageError(f"--state {name}: must be one of {', '.join(sorted(STATES))}")
    return {spelling[name.lower()] for name in names}


def _no_rows_sentence(states: Collection[str], prefix: str) -> str:
    beginning = f" with prefix {prefix}" if prefix else ""
    state = f" in state {' or '.join(sorted(states))}" if states else ""
    return f"no transactional.id{beginning}{state}"
