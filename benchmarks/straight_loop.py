"""The baseline: a straight, tuned confluent-kafka exactly-once loop, as short as it can be.

It has no recovery, no rebalance handling and no error policy: what a careful person writes by hand for speed. Its
senders keep the timestamp of each record, as eos and Kafka Streams do; `new timestamps`, the default, does not.
Run as a process by worker_speed.py and far.py:
`python -m benchmarks.straight_loop BOOTSTRAP SOURCE TARGET COUNT GROUP [LINGER [INTERVAL_MS [SENDER]]]`.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable

import msgspec
from confluent_kafka import Consumer, Message, Producer, TopicPartition

from benchmarks.clients import straight
from benchmarks.shapes import HEADERS, DataRow, Row

# 100 ms transactions need chunks well below 100 ms of work; larger ones only make larger transactions.
CHUNK = 2_000
Sender = Callable[[list[Message], str, Producer], None]


# Each is a loop of its own, as one writes it by hand: no call lies between a message and produce(). The arguments are
# positional, because naming `timestamp=` takes 0.3 us more per record.


def send_with_new_timestamps(messages: list[Message], target: str, producer: Producer) -> None:
    produce = producer.produce
    for message in messages:
        while True:
            try:
                produce(target, message.value().upper(), message.key())
                break
            except BufferError:
                producer.poll(0.05)


def send_bytes(messages: list[Message], target: str, producer: Producer) -> None:
    produce = producer.produce
    for message in messages:
        while True:
            try:
                produce(target, message.value().upper(), message.key(), -1, None, None, message.timestamp()[1])
                break
            except BufferError:
                producer.poll(0.05)


def send_str(messages: list[Message], target: str, producer: Producer) -> None:
    produce = producer.produce
    for message in messages:
        while True:
            try:
                value = message.value().decode().upper().encode()
                produce(target, value, message.key(), -1, None, None, message.timestamp()[1])
                break
            except BufferError:
                producer.poll(0.05)


def send_headers(messages: list[Message], target: str, producer: Producer) -> None:
    produce, headers = producer.produce, HEADERS
    for message in messages:
        while True:
            try:
                produce(target, message.value().upper(), message.key(), -1, None, None, message.timestamp()[1], headers)
                break
            except BufferError:
                producer.poll(0.05)


def send_mapping(messages: list[Message], target: str, producer: Producer) -> None:
    produce = producer.produce
    for message in messages:
        while True:
            try:
                headers = {"source": "bench"}
                produce(target, message.value().upper(), message.key(), -1, None, None, message.timestamp()[1], headers)
                break
            except BufferError:
                producer.poll(0.05)


def sender_of(row_type: type[Row] | type[DataRow]) -> Sender:
    def send(messages: list[Message], target: str, producer: Producer) -> None:
        produce, make = producer.produce, row_type
        decode, encode = msgspec.json.Decoder(make).decode, msgspec.json.Encoder().encode
        for message in messages:
            row = decode(message.value())
            while True:
                try:
                    value = encode(make(row.n, row.text.upper()))
                    produce(target, value, message.key(), -1, None, None, message.timestamp()[1])
                    break
                except BufferError:
                    producer.poll(0.05)

    return send


def send_dict(messages: list[Message], target: str, producer: Producer) -> None:
    produce, decode, encode = producer.produce, msgspec.json.Decoder(dict).decode, msgspec.json.Encoder().encode
    for message in messages:
        row = decode(message.value())
        while True:
            try:
                value = encode({"n": row["n"], "text": row["text"].upper()})
                produce(target, value, message.key(), -1, None, None, message.timestamp()[1])
                break
            except BufferError:
                producer.poll(0.05)


def send_filtered(messages: list[Message], target: str, producer: Producer) -> None:
    produce = producer.produce
    for message in messages:
        value = message.value()
        if b"rare" not in value:
            continue
        while True:
            try:
                produce(target, value, message.key(), -1, None, None, message.timestamp()[1])
                break
            except BufferError:
                producer.poll(0.05)


def send_twice(messages: list[Message], target: str, producer: Producer) -> None:
    produce, topics = producer.produce, (target, target)
    for message in messages:
        value, key, time_ms = message.value().upper(), message.key(), message.timestamp()[1]
        for topic in topics:
            while True:
                try:
                    produce(topic, value, key, -1, None, None, time_ms)
                    break
                except BufferError:
                    producer.poll(0.05)


NEW_TIMESTAMPS = "new timestamps"
SENDERS = {
    NEW_TIMESTAMPS: send_with_new_timestamps,
    "bytes": send_bytes,
    "str": send_str,
    "headers": send_headers,
    "mapping": send_mapping,
    "json": sender_of(Row),
    "dataclass": sender_of(DataRow),
    "dict": send_dict,
    "twice": send_twice,
    "filter": send_filtered,
}


def next_offsets(messages: list[Message], offsets: dict[int, int]) -> None:
    """Note where each partition goes on after these messages."""
    for message in messages:
        if message.error() is not None:  # its value() would be the error's text, and go out as a record
            raise SystemExit(str(message.error()))
        offsets[message.partition()] = message.offset() + 1


def copy(
    clients: tuple[Consumer, Producer],
    source: str,
    target: str,
    count: int,
    sender: str,
    interval_s: float,
    begin: Callable[[], None],
    end: Callable[[list[TopicPartition]], None],
) -> None:
    """Copies so many records and prints what it took. Every `interval_s` all is flushed, and `end` is given where each
    partition goes on; `begin` comes before the first record behind that."""
    consumer, producer = clients
    consumer.subscribe([source])
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    send, done, offsets = SENDERS[sender], 0, {}
    began = first = 0.0
    ended = 0
    while done < count:
        messages = consumer.consume(CHUNK, 0.05)
        if messages and not began:
            began = time.monotonic()
            first = first or began
            begin()
        next_offsets(messages, offsets)
        send(messages, target, producer)
        done += len(messages)
        producer.poll(0)
        if began and (time.monotonic() - began >= interval_s or done >= count):
            producer.flush()
            end([TopicPartition(source, p, o) for p, o in offsets.items()])
            began, offsets, ended = 0.0, {}, ended + 1
    print(f"{done} {time.monotonic() - first:.4f} {ended}", flush=True)
    consumer.close()


def main(
    bootstrap: str,
    source: str,
    target: str,
    count: int,
    group: str,
    linger_ms: str = "5",
    ms: str = "100",
    sender: str = NEW_TIMESTAMPS,
) -> None:
    consumer, producer = straight(bootstrap, group, linger_ms)

    def end(positions: list[TopicPartition]) -> None:
        producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata())
        producer.commit_transaction()

    copy((consumer, producer), source, target, count, sender, int(ms) / 1000, producer.begin_transaction, end)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
