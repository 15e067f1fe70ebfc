"""Adds lineage: headers that connect an output to its input, and counts that connect an offset to its outputs.

With `eos.lineage=true` each output carries a header with its input record, its index among the record's outputs, and
its number among all outputs of that input partition. The metadata of each committed offset has the number of inputs
handled, and the number of outputs they produced, since lineage began there. With both, a reader of the topics can
distinguish an input that the function filtered from one whose output was lost (eos/testing/verify.py). This module owns
the counts; eos/encoding/lineage.py owns the two formats. It must never call Kafka and never judge.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from eos.app.routes import Route
from eos.encoding.lineage import HEADER, KEY, Source, Tally, encode, tally_of
from eos.errors import ConfigurationError
from eos.records import Committed, Each, Record, Send, SendAll, read_metadata

TopicPartition = tuple[str, int]


class Ledger:
    """Counts inputs and outputs per input partition, as a Participant in transactions (eos/session/outcomes.py)."""

    topics: Collection[str] = ()

    def __init__(self) -> None:
        self._committed_counts: dict[TopicPartition, Tally] = {}
        self._open_counts: dict[TopicPartition, Tally] = {}

    def begin(self, partition: TopicPartition, offset: int, metadata: str | None) -> None:
        """Start a partition at its committed `offset`, with the counts of the last commit or with zero."""
        self._committed_counts[partition] = tally_of(metadata) or Tally(offset)
        self._open_counts.pop(partition, None)

    # Nothing to drop: the counts of a revoked partition are never read.
    def forget(self, gone: Collection[TopicPartition]) -> None: ...

    def restore(
        self, starts: Mapping[TopicPartition, Committed], uncommitted: Collection[TopicPartition]
    ) -> Collection[TopicPartition]:
        for partition, at in starts.items():
            self.begin(partition, max(at.offset, 0), read_metadata(at))
        return starts.keys()

    def count(self, partition: TopicPartition, outputs: int) -> int:
        """Count one more input with this many outputs, and return the number of the first output."""
        before = self.tally(partition)
        self._open_counts[partition] = Tally(before.begin, before.inputs + 1, before.outputs + outputs)
        return before.outputs

    def tally(self, partition: TopicPartition) -> Tally:
        """Return the counts of a partition with those of the open transaction."""
        return self._open_counts.get(partition) or self._committed_counts[partition]

    def changed_partitions(self) -> Collection[TopicPartition]:
        return ()

    def before_flush(self, send: SendAll, offsets: Mapping[TopicPartition, int]) -> None: ...

    def offset_metadata(self, partition: TopicPartition) -> Mapping[str, list[int]]:
        tally = self.tally(partition)
        return {KEY: [tally.begin, tally.inputs, tally.outputs]}

    def committed(self) -> None:
        self._committed_counts |= self._open_counts
        self._open_counts = {}

    def aborted(self) -> None:
        # The inputs will be handled and counted again.
        self._open_counts = {}


def check_route(route: Route) -> None:
    """Raise ConfigurationError for a batch function: its outputs do not name their input record."""
    if route.batch:
        raise ConfigurationError(
            f"eos.lineage=true needs to know which record an output came from, but the batch function {route.name} "
            "does not show it: decorate it with @app.process"
        )
    if route.uses_time:
        raise ConfigurationError(
            f"eos.lineage=true needs to know which record an output came from, but {route.name} has timers, windows or "
            "once=: use it without them"
        )


def with_lineage(each: Each, ledger: Ledger) -> Each:
    """Return a function that calls `each` (see Route.each), adds the lineage header to its outputs and counts them."""

    def marked(records: list[Record]) -> Iterator[Sequence[Send]]:
        for record, sends in zip(records, each(records), strict=True):
            first = ledger.count((record.topic, record.partition), len(sends))
            sources = [
                Source(record.topic, record.partition, record.offset, i, len(sends), first + i)
                for i in range(len(sends))
            ]
            yield [_with_header(send, source) for send, source in zip(sends, sources, strict=True)]

    return marked


def _with_header(send: Send, source: Source) -> Send:
    topic, value, key, partition, timestamp_ms, headers = send
    return topic, value, key, partition, timestamp_ms, [*(headers or ()), (HEADER, encode(source))]
