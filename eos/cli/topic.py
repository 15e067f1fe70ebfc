"""`eos topic list | create | partitions | delete | tail | send`: the topics of any cluster, for people and machines.

Owns the options and what is printed; eos/kafka/admin/tail.py reads, and `send` is a transaction as `eos.transaction`
makes it.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.table import Table

from eos.cli.options import (
    SENT_BY_HAND,
    BootstrapServers,
    Json,
    Set,
    Yes,
    confirm,
    load_settings,
    named_value,
    print_json,
    print_table,
    until_hung_up,
)
from eos.cli.written import header_json, headers_text, json_of, text_of
from eos.errors import Unavailable, UsageError, not_authorised
from eos.kafka.admin import facts, tail
from eos.kafka.admin.tail import Mark, MarkedRecord
from eos.kafka.client.settings import Settings
from eos.plain import Delivery, transaction
from eos.records import Header, UnreadableHeaders, format_position, is_topic_name, readable_headers

_TIMEOUT_S = 5.0
_TOLD = 10
_LAST = 10

app = typer.Typer(no_args_is_help=True, help="Topics of any cluster: list, create, change, read and write them.")
Topic = Annotated[str, typer.Argument(metavar="TOPIC")]


@app.command("list")
def list_(
    internal: Annotated[bool, typer.Option("--internal", help="Kafka's own topics too.")] = False,
    json: Json = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Every topic with its partitions and replicas."""
    settings = load_settings(bootstrap_servers, set_)
    client = facts.connect(settings, _TIMEOUT_S)
    found = facts.cluster_metadata(client, settings.bootstrap_servers, _TIMEOUT_S).topics
    rows = [
        {
            "topic": name,
            "partitions": len(topic.partitions),
            "replicas": min((len(p.replicas) for p in topic.partitions.values()), default=0),
        }
        for name, topic in sorted(found.items())
        if internal or not name.startswith("__")
    ]
    if json:
        print_json(rows)
        return
    if not rows:
        print(f"no topic at {settings.bootstrap_servers}")
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    print_table(table)


@app.command()
def create(
    names: Annotated[list[str], typer.Argument(metavar="TOPIC...")],
    partitions: Annotated[int, typer.Option(min=1, help="Partitions of each new topic.")] = 8,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Create topics, on three brokers or all there are; those that exist already stay as they are."""
    create_and_tell(load_settings(bootstrap_servers, set_), names, partitions)


def create_and_tell(settings: Settings, names: list[str], partitions: int, brokers: int = 0) -> None:
    """`brokers`: how many there are, also of those that are down now; 0: as many as answer."""
    for name in names:
        _check(name)
    client = facts.connect(settings, _TIMEOUT_S)
    brokers = brokers or len(facts.cluster_metadata(client, settings.bootstrap_servers, _TIMEOUT_S).brokers)
    created = facts.create_topics(settings, dict.fromkeys(names, partitions), brokers)
    for name in dict.fromkeys(names):
        print(f"{name}: {f'created with {partitions} partitions' if name in created else 'exists'}")


@app.command()
def partitions(
    topic: Topic,
    count: Annotated[int, typer.Argument(metavar="N", min=1, help="How many it has then; never fewer.")],
    yes: Yes = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Give a topic more partitions. Keys may move to other partitions; asks before it acts."""
    _check(topic)
    client = facts.connect(load_settings(bootstrap_servers, set_), _TIMEOUT_S)
    has = _there(client, topic).partitions
    if count < has:
        raise UsageError(f"{topic} has {has} partitions: Kafka takes none away")
    if count == has:
        print(f"{topic}: has {has} partitions")
        return
    print(
        f"{topic}: a key's new records may go to another partition than its old ones. An App whose function with state "
        "reads this topic ends with 78 then; `eos reset MODULE:APP --from ... --with-state` begins it again",
        file=sys.stderr,
    )
    confirm(f"give {topic} {count} partitions instead of {has}", yes)
    facts.add_partitions(client, topic, count)
    print(f"{topic}: {has} partitions before, {count} now")


@app.command()
def delete(
    names: Annotated[list[str], typer.Argument(metavar="TOPIC...")],
    yes: Yes = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Delete topics with all of their records; asks before it acts."""
    names = list(dict.fromkeys(names))
    for name in names:
        _check(name)
    client = facts.connect(load_settings(bootstrap_servers, set_), _TIMEOUT_S)
    for name in names:
        _there(client, name)
    confirm(f"delete {', '.join(names)} with all records", yes)
    for name in names:
        facts.delete_topic(client, name)
        print(f"{name}: deleted")


def _there(client: Any, topic: str) -> facts.Topic:
    found = facts.describe_topic(client, topic)
    if found.exists is None:
        raise not_authorised(f"topic {topic}", "DESCRIBE")
    if not found.exists:
        raise Unavailable(f"topic {topic} does not exist")
    return found


@app.command()
def send(
    topic: Topic,
    values: Annotated[
        list[str] | None, typer.Argument(metavar="[VALUE]...", help="Default: the lines of stdin.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Key of each record.")] = None,
    key_separator: Annotated[
        str | None,
        typer.Option(
            "--key-separator", "-K", metavar="TEXT", help="Each value begins with its key and this, e.g. `:`."
        ),
    ] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header; repeatable.")] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="Default: by the key.")] = None,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Send records in one transaction: all of them become visible, or none."""
    _check(topic)
    headers = [_header(text) for text in header or []]
    if key_separator == "":
        raise UsageError("--key-separator: one character at least stands between key and value")
    if key is not None and key_separator is not None:
        raise UsageError("--key and --key-separator exclude each other")
    settings = load_settings(bootstrap_servers, set_)
    # Before the transaction begins: who types slowly must not outlive its timeout.
    given = [*map(os.fsencode, values)] if values else [line.rstrip(b"\n") for line in sys.stdin.buffer]
    held = tail.topic_offsets(settings, topic, _TIMEOUT_S)
    records = [(None if key is None else os.fsencode(key), value) for value in given]
    if key_separator is not None:
        records = [_keyed(value, os.fsencode(key_separator), number) for number, value in enumerate(given, 1)]
    if partition is not None and partition not in held:
        raise UsageError(f"--partition {partition}: {topic} has partitions 0 to {len(held) - 1}")
    if not given:
        print(f"{topic}: nothing to send", file=sys.stderr)
        return
    if not settings.get("transactional.id"):
        settings = settings.with_values(**{"transactional.id": f"{SENT_BY_HAND}{uuid.uuid4().hex[:12]}"})
    with transaction(settings) as txn:
        sent = [txn.send(topic, value, key=key, partition=partition, headers=headers) for key, value in records]
    _tell_sent(topic, sent)


@app.command("tail")
def tail_(
    topic: Topic,
    last: Annotated[
        int | None, typer.Option("--last", "-n", min=0, help=f"Show this many records (default: {_LAST}).")
    ] = None,
    from_beginning: Annotated[bool, typer.Option("--from-beginning", help="All that the topic holds.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    until_end: Annotated[
        bool, typer.Option("--until-end", help="End with what is readable now, as without --follow.")
    ] = False,
    uncommitted: Annotated[
        bool, typer.Option("--uncommitted", help="Aborted and open records too, each marked as such.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="For machines: a line of JSON per record.")] = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Show the records of a topic that are committed, with partition, offset, time, key, value and headers."""
    if follow and until_end:
        raise UsageError("--follow and --until-end exclude each other")
    if from_beginning and last is not None:
        raise UsageError("--from-beginning and --last exclude each other")
    _check(topic)
    settings = load_settings(bootstrap_servers, set_)
    held = tail.topic_offsets(settings, topic, _TIMEOUT_S)
    show = _show_json if json else _show
    ends = tail.end_offsets(held, uncommitted)
    shown = 0
    with until_hung_up():
        if not from_beginning:
            for seen in tail.read_last(settings, topic, held, _LAST if last is None else last, uncommitted):
                show(seen)
                shown += 1
        starts = {p: span.low for p, span in held.items()} if from_beginning else ends
        if follow or from_beginning:
            shown += _read(settings, topic, starts, None if follow else ends, uncommitted, show)
        if not follow:
            _tell_rest(topic, held, shown, uncommitted)


def _read(
    settings: Settings,
    topic: str,
    starts: dict[int, int],
    ends: dict[int, int] | None,
    uncommitted: bool,
    show: Any,
) -> int:
    """Shows records from `starts` on, up to `ends` or until Ctrl-C; how many there were."""
    shown = 0
    with tail.TopicReader(settings, topic, starts, uncommitted) as reader:
        if ends is not None:
            for shown, seen in enumerate(tail.read_until(reader, ends), 1):  # noqa: B007 - the last one is wanted
                show(seen)
            return shown
        try:
            while True:
                for seen in reader.read():
                    show(seen)
        except KeyboardInterrupt:
            return shown  # what was asked for: Ctrl-C ends it


# ---- output ---------------------------------------------------------------------------------------------------


def _show(seen: MarkedRecord) -> None:
    record = seen.record
    moment = "-" if record.timestamp < 0 else _clock(record.timestamp)
    mark = "" if seen.mark is Mark.COMMITTED else f"  ({seen.mark.value})"
    key = "-" if record.key is None else text_of(record.key)
    value = "(tombstone)" if record.value is None else text_of(record.value)
    given = record.headers
    said = [
        *headers_text(readable_headers(given)),
        *([f"({given.why})"] if isinstance(given, UnreadableHeaders) else []),
    ]
    headers = "".join(f"  {one}" for one in said)
    print(
        f"{format_position(record.topic, record.partition, record.offset)}  {moment}  {key}  {value}{headers}{mark}",
        flush=True,
    )


def _show_json(seen: MarkedRecord) -> None:
    record = seen.record
    unreadable = {"unreadable": record.headers.why} if isinstance(record.headers, UnreadableHeaders) else {}
    print_json(
        {
            "topic": record.topic,
            "partition": record.partition,
            "offset": record.offset,
            "timestamp": record.timestamp,
            "key": json_of(record.key),
            "value": json_of(record.value),
            "headers": [[name, header_json(name, value)] for name, value in readable_headers(record.headers)],
            **unreadable,
            "state": seen.mark.value,
        }
    )
    sys.stdout.flush()


def _clock(timestamp_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp_ms / 1000)) + f".{timestamp_ms % 1000:03d}"


def _tell_sent(topic: str, sent: Iterable[Delivery]) -> None:
    places = [format_position(topic, one.partition, one.offset) for one in sent]
    more = f", ... ({len(places)} records)" if len(places) > _TOLD else ""
    print(f"sent in one transaction: {', '.join(places[:_TOLD])}{more}")


def _tell_rest(topic: str, held: dict[int, tail.OffsetRange], shown: int, uncommitted: bool) -> None:
    """What is not on the screen, and why."""
    waiting = sum(span.end - span.stable for span in held.values())
    if waiting and not uncommitted:
        print(
            f"{topic}: {waiting} more offsets wait for an open transaction; --uncommitted shows them", file=sys.stderr
        )
    elif not shown:
        print(f"{topic}: no record{'' if uncommitted else ' is committed'}", file=sys.stderr)


# ---- input ----------------------------------------------------------------------------------------------------


def _check(topic: str) -> None:
    if not is_topic_name(topic):
        raise UsageError(f"{topic!r} is not the name of a topic: 1 to 249 letters, digits, '.', '_' or '-'")


def _keyed(line: bytes, separator: bytes, number: int) -> tuple[bytes | None, bytes]:
    key, found, value = line.partition(separator)
    if not found:
        raise UsageError(
            f"value {number}, {text_of(line)!r}, has no {text_of(separator)!r} behind a key; nothing was sent"
        )
    return key, value


def _header(text: str) -> Header:
    name, value = named_value("--header", text)
    return name, os.fsencode(value)
