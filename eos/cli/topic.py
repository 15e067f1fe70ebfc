"""Define `eos topic list | create | partitions | delete | tail | send`, which work on topics of any cluster.

The module owns the options and the printed text. eos/kafka/admin/tail.py reads topics, and `send` uses
`eos.transaction`.
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
    SEND_ID_PREFIX,
    BootstrapServers,
    Json,
    Set,
    Yes,
    confirm,
    load_settings,
    parse_named_value,
    print_json,
    print_table,
    until_output_closed,
)
from eos.cli.rendering import bytes_as_json, bytes_as_text, header_as_json, headers_as_text
from eos.errors import Unavailable, UsageError, not_authorised
from eos.kafka.admin import facts, tail
from eos.kafka.admin.tail import Mark, MarkedRecord
from eos.kafka.client.settings import Settings
from eos.plain import Delivery, transaction
from eos.records import Header, UnreadableHeaders, format_position, is_topic_name, readable_headers

_TIMEOUT_S = 5.0
_MOST_POSITIONS = 10
_LAST = 10

app = typer.Typer(no_args_is_help=True, help="Topics of any cluster: list, create, change, read and write them.")
Topic = Annotated[str, typer.Argument(metavar="TOPIC")]


@app.command("list")
def list_(
    internal: Annotated[bool, typer.Option("--internal", help="Include Kafka's internal topics.")] = False,
    json: Json = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """List topics with their partitions and replicas."""
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
        print(f"no topics at {settings.bootstrap_servers}")
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
    """Create topics with three replicas, or fewer on a smaller cluster. Existing topics are left unchanged."""
    create_and_print(load_settings(bootstrap_servers, set_), names, partitions)


def create_and_print(settings: Settings, names: list[str], partitions: int, brokers: int = 0) -> None:
    """Create topics and print the result. `brokers` is the number of brokers, running or not; 0 counts running ones."""
    for name in names:
        _check_name(name)
    client = facts.connect(settings, _TIMEOUT_S)
    brokers = brokers or len(facts.cluster_metadata(client, settings.bootstrap_servers, _TIMEOUT_S).brokers)
    created = facts.create_topics(settings, dict.fromkeys(names, partitions), brokers)
    for name in dict.fromkeys(names):
        print(f"{name}: {f'created with {partitions} partitions' if name in created else 'exists'}")


@app.command()
def partitions(
    topic: Topic,
    count: Annotated[int, typer.Argument(metavar="N", min=1, help="New number of partitions. Kafka cannot reduce it.")],
    yes: Yes = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Add partitions to a topic. Keys may move to other partitions. Asks for confirmation."""
    _check_name(topic)
    client = facts.connect(load_settings(bootstrap_servers, set_), _TIMEOUT_S)
    has = _require_topic(client, topic).partitions
    if count < has:
        raise UsageError(f"{topic} has {has} partitions: Kafka cannot remove any")
    if count == has:
        print(f"{topic}: has {has} partitions")
        return
    print(
        f"{topic}: a key's new records may go to another partition than its old ones. An App that reads this topic in "
        "a function with state will end with 78; `eos reset MODULE:APP --from ... --with-state` starts it over",
        file=sys.stderr,
    )
    confirm(f"increase the partitions of {topic} from {has} to {count}", yes)
    facts.add_partitions(client, topic, count)
    print(f"{topic}: {has} partitions before, {count} now")


@app.command()
def delete(
    names: Annotated[list[str], typer.Argument(metavar="TOPIC...")],
    yes: Yes = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Delete topics with all of their records. Asks for confirmation."""
    names = list(dict.fromkeys(names))
    for name in names:
        _check_name(name)
    client = facts.connect(load_settings(bootstrap_servers, set_), _TIMEOUT_S)
    for name in names:
        _require_topic(client, name)
    confirm(f"delete {', '.join(names)} with all records", yes)
    for name in names:
        facts.delete_topic(client, name)
        print(f"{name}: deleted")


def _require_topic(client: Any, topic: str) -> facts.Topic:
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
            "--key-separator", "-K", metavar="TEXT", help="Split each value into key and value at this text, e.g. `:`."
        ),
    ] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header; repeatable.")] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="Default: chosen by the key.")] = None,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Send records in one transaction: all of them become visible, or none."""
    _check_name(topic)
    headers = [_parse_header(text) for text in header or []]
    if key_separator == "":
        raise UsageError("--key-separator: must be at least one character")
    if key is not None and key_separator is not None:
        raise UsageError("--key and --key-separator cannot be used together")
    settings = load_settings(bootstrap_servers, set_)
    # Read before the transaction begins: slow typing on stdin must not exceed its timeout.
    given = [*map(os.fsencode, values)] if values else [line.rstrip(b"\n") for line in sys.stdin.buffer]
    held = tail.topic_offsets(settings, topic, _TIMEOUT_S)
    records = [(None if key is None else os.fsencode(key), value) for value in given]
    if key_separator is not None:
        records = [_split_key(value, os.fsencode(key_separator), number) for number, value in enumerate(given, 1)]
    if partition is not None and partition not in held:
        raise UsageError(f"--partition {partition}: {topic} has partitions 0 to {len(held) - 1}")
    if not given:
        print(f"{topic}: nothing to send", file=sys.stderr)
        return
    if not settings.get("transactional.id"):
        settings = settings.with_values(**{"transactional.id": f"{SEND_ID_PREFIX}{uuid.uuid4().hex[:12]}"})
    with transaction(settings) as txn:
        sent = [txn.send(topic, value, key=key, partition=partition, headers=headers) for key, value in records]
    _print_sent(topic, sent)


@app.command("tail")
def tail_(
    topic: Topic,
    last: Annotated[
        int | None, typer.Option("--last", "-n", min=0, help=f"Show this many records (default: {_LAST}).")
    ] = None,
    from_beginning: Annotated[bool, typer.Option("--from-beginning", help="Show all records of the topic.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep showing new records until Ctrl-C.")] = False,
    until_end: Annotated[
        bool, typer.Option("--until-end", help="Stop after the records that are readable now, as without --follow.")
    ] = False,
    uncommitted: Annotated[
        bool, typer.Option("--uncommitted", help="Include records of aborted and open transactions, and mark them.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON per record.")] = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Show the committed records of a topic with partition, offset, time, key, value and headers."""
    if follow and until_end:
        raise UsageError("--follow and --until-end cannot be used together")
    if from_beginning and last is not None:
        raise UsageError("--from-beginning and --last cannot be used together")
    _check_name(topic)
    settings = load_settings(bootstrap_servers, set_)
    held = tail.topic_offsets(settings, topic, _TIMEOUT_S)
    show = _show_json if json else _show
    ends = tail.end_offsets(held, uncommitted)
    shown = 0
    with until_output_closed():
        if not from_beginning:
            for seen in tail.read_last(settings, topic, held, _LAST if last is None else last, uncommitted):
                show(seen)
                shown += 1
        starts = {p: span.low for p, span in held.items()} if from_beginning else ends
        if follow or from_beginning:
            shown += _read(settings, topic, starts, None if follow else ends, uncommitted, show)
        if not follow:
            _print_remaining(topic, held, shown, uncommitted)


def _read(
    settings: Settings,
    topic: str,
    starts: dict[int, int],
    ends: dict[int, int] | None,
    uncommitted: bool,
    show: Any,
) -> int:
    """Show records from `starts` on, up to `ends` or until Ctrl-C, and return their number."""
    shown = 0
    with tail.TopicReader(settings, topic, starts, uncommitted) as reader:
        if ends is not None:
            for shown, seen in enumerate(tail.read_until(reader, ends), 1):  # noqa: B007 - the last number is returned
                show(seen)
            return shown
        try:
            while True:
                for seen in reader.read():
                    show(seen)
        except KeyboardInterrupt:
            return shown  # Ctrl-C is the normal end of --follow


# ---- output ---------------------------------------------------------------------------------------------------


def _show(seen: MarkedRecord) -> None:
    record = seen.record
    time_ = "-" if record.timestamp < 0 else _local_time(record.timestamp)
    mark = "" if seen.mark is Mark.COMMITTED else f"  ({seen.mark.value})"
    key = "-" if record.key is None else bytes_as_text(record.key)
    value = "(tombstone)" if record.value is None else bytes_as_text(record.value)
    found = record.headers
    texts = [
        *headers_as_text(readable_headers(found)),
        *([f"({found.why})"] if isinstance(found, UnreadableHeaders) else []),
    ]
    headers = "".join(f"  {text}" for text in texts)
    print(
        f"{format_position(record.topic, record.partition, record.offset)}  {time_}  {key}  {value}{headers}{mark}",
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
            "key": bytes_as_json(record.key),
            "value": bytes_as_json(record.value),
            "headers": [[name, header_as_json(name, value)] for name, value in readable_headers(record.headers)],
            **unreadable,
            "state": seen.mark.value,
        }
    )
    sys.stdout.flush()


def _local_time(timestamp_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp_ms / 1000)) + f".{timestamp_ms % 1000:03d}"


def _print_sent(topic: str, sent: Iterable[Delivery]) -> None:
    positions = [format_position(topic, one.partition, one.offset) for one in sent]
    more = f", ... ({len(positions)} records)" if len(positions) > _MOST_POSITIONS else ""
    print(f"sent in one transaction: {', '.join(positions[:_MOST_POSITIONS])}{more}")


def _print_remaining(topic: str, held: dict[int, tail.OffsetRange], shown: int, uncommitted: bool) -> None:
    """Print how many records are not shown, and why."""
    waiting = sum(span.end - span.stable for span in held.values())
    if waiting and not uncommitted:
        print(f"{topic}: {waiting} more offsets are in an open transaction; --uncommitted shows them", file=sys.stderr)
    elif not shown:
        print(f"{topic}: no {'' if uncommitted else 'committed '}records", file=sys.stderr)


# ---- input ----------------------------------------------------------------------------------------------------


def _check_name(topic: str) -> None:
    if not is_topic_name(topic):
        raise UsageError(f"{topic!r} is not a topic name: use 1 to 249 letters, digits, '.', '_' or '-'")


def _split_key(line: bytes, separator: bytes, number: int) -> tuple[bytes | None, bytes]:
    key, found, value = line.partition(separator)
    if not found:
        raise UsageError(
            f"value {number}, {bytes_as_text(line)!r}, has no key separator {bytes_as_text(separator)!r}; nothing was "
            "sent"
        )
    return key, value


def _parse_header(text: str) -> Header:
    name, value = parse_named_value("--header", text)
    return name, os.fsencode(value)
