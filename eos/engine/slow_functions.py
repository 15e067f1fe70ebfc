"""Detects functions that are slower than their transaction may last, and stops the worker with one clear error.

The broker aborts a transaction whose first record it saw longer ago than transaction.timeout.ms. The group removes a
member that has not polled for max.poll.interval.ms. In both cases the work is lost and the records come again.

Time before the first send does not count for a transaction, and brokers check their clocks only now and then. So a call
over a limit is only logged as a warning until the session reports the outcome of its transaction. The cause of a first
loss may be the machine, or a service that was briefly unavailable, so the session recovers. When it hands the slow
record out again, it commits all earlier records first. The slow record then runs as the first one of its own
transaction, where the time before its output does not count. If that transaction is lost too, further retries would
never succeed, and the worker stops.

Owns the judgement only; it must never measure time, and never touch a transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from eos import log
from eos.app.routes import Route
from eos.engine.slices import Partition, spans_of
from eos.errors import ConfigurationError
from eos.kafka.client.settings import Settings
from eos.records import Record, format_position

DEFAULT_MAX_POLL_INTERVAL_MS = 300_000  # librdkafka's default


@dataclass
class _Attempt:
    """Holds a call that took longer than a limit, so that its transaction may be lost."""

    sentence: str
    who: Mapping[str, object]
    spans: dict[Partition, tuple[int, int]]  # first and last offset of the records
    is_one_call: bool  # one call was too slow; otherwise only several calls together were
    is_group: bool  # the slow call handled several records

    @property
    def is_single(self) -> bool:
        return self.is_one_call and all(first == last for first, last in self.spans.values()) and len(self.spans) == 1


class SlowFunctions:
    """Judges which functions of one worker are too slow."""

    def __init__(self, settings: Settings) -> None:
        self._transaction_ms = settings.transaction_timeout_ms
        self._poll_ms = int(settings.get("max.poll.interval.ms", DEFAULT_MAX_POLL_INTERVAL_MS))
        self._max_records = {"batch": settings["eos.batch.max.records"], "async": settings["eos.async.max.records"]}
        self._attempts: dict[Partition, _Attempt] = {}  # the last attempt of each partition in the open transaction
        self._attempt_lost_twice: _Attempt | None = None
        self._slow: dict[Partition, int] = {}  # first record of each partition in a call that was lost
        self._one_by_one: dict[Partition, int] = {}  # records up to these offsets run alone, to find the slow record

    @property
    def runs_one_by_one(self) -> bool:
        """Return whether the next records must run alone, because one of them was too slow."""
        return bool(self._one_by_one)

    def note_in_time(self, record: Record, owned: Collection[Partition]) -> None:
        """Record that this record ran alone and in time, and forget partitions that the group has taken away."""
        place = record.topic, record.partition
        self._one_by_one = {
            p: last for p, last in self._one_by_one.items() if p in owned and not (p == place and record.offset >= last)
        }

    @property
    def has_slow_records(self) -> bool:
        """Return whether any records were too slow and lost before."""
        return bool(self._slow)

    def find_slow(self, records: list[Record], owned: Collection[Partition]) -> int | None:
        """Return the index of the first record that was too slow before; None if there is none.

        `owned`: the partitions of this member. Entries of other partitions are kept: otherwise two members could pass a
        slow record back and forth for ever.
        """
        if self._slow.keys().isdisjoint(owned):
            return None
        slow = (
            n for n, record in enumerate(records) if self._slow.get((record.topic, record.partition)) == record.offset
        )
        return next(slow, None)

    def is_too_slow(self, open_s: float, took_s: float) -> bool:
        """Return whether a transaction may be lost.

        `open_s`: seconds since its first record was sent. `took_s`: seconds that the last call took.
        """
        return open_s * 1000 > self._transaction_ms or took_s * 1000 > self._poll_ms

    # ---- a call that was too slow -----------------------------------------------------------------------------------

    def note_slow(self, who: Mapping[str, object], route: Route, records: list[Record], took_s: float) -> None:
        """Record that these records of one function took too long. `who`: log fields that name the transaction."""
        is_group = route.batch or route.concurrent
        sentence = self._sentence(route, records, took_s)
        self._note(_Attempt(sentence, who, spans_of(records), is_one_call=True, is_group=is_group))

    def note_slow_together(
        self, who: Mapping[str, object], names: Sequence[str], records: list[Record], took_s: float
    ) -> None:
        """Record that these records of several functions took too long together. Next time each runs alone."""
        limits, remedy = self._limits(took_s)
        sentence = f"{_took(', '.join(names), records, took_s)}, longer than {limits}: {remedy}"
        self._note(_Attempt(sentence, who, spans_of(records), is_one_call=False, is_group=False))

    def _note(self, attempt: _Attempt) -> None:
        log.warning("transaction may exceed its timeout", why=attempt.sentence, **attempt.who)
        self._attempts |= dict.fromkeys(attempt.spans, attempt)

    # ---- the outcome of its transaction -----------------------------------------------------------------------------

    def ended(self, is_committed: bool, committed: Mapping[Partition, int]) -> None:
        """Record how the open transaction ended. `committed`: next offsets, where they are known."""
        attempts, self._attempts = self._attempts, {}
        if not is_committed:
            for attempt in {id(attempt): attempt for attempt in attempts.values()}.values():
                self._note_loss(attempt)
        elif self._slow:
            self._slow = {p: first for p, first in self._slow.items() if first >= committed.get(p, 0)}

    def check(self) -> None:
        """Raise ConfigurationError if a record was too slow and lost for the second time."""
        if self._attempt_lost_twice is not None:
            raise ConfigurationError(self._attempt_lost_twice.sentence)

    def _note_loss(self, attempt: _Attempt) -> None:
        """Record that a call's transaction was lost. The second loss of a record is the function's fault.

        If a single-record function had several records in that transaction, the loss does not show which one is slow.
        They are handled again one by one.
        """
        spans = attempt.spans
        if attempt.is_one_call and any(first <= self._slow.get(p, -1) <= last for p, (first, last) in spans.items()):
            self._attempt_lost_twice = attempt
            return
        log.warning("transaction exceeded its timeout", why=attempt.sentence, **attempt.who)
        if attempt.is_group or attempt.is_single:
            self._slow |= {p: first for p, (first, _) in spans.items()}
        if not attempt.is_group:
            for p, (_, last) in spans.items():
                self._one_by_one[p] = max(last, self._one_by_one.get(p, 0))

    # ---- sentences --------------------------------------------------------------------------------------------------

    def _sentence(self, route: Route, records: list[Record], took_s: float) -> str:
        limits, remedy = self._limits(took_s)
        if len(records) > 1 and (route.batch or route.concurrent):
            kind = "batch" if route.batch else "async"
            remedy += f", or lower eos.{kind}.max.records={self._max_records[kind]}"
        return (
            f"{_took(route.name, records, took_s)}, longer than {limits}: {remedy} "
            "(the broker takes transactions up to its transaction.max.timeout.ms)"
        )

    def _limits(self, took_s: float) -> tuple[str, str]:
        """Return the settings that the call exceeds, and the remedy."""
        limits = []
        if took_s * 1000 > self._poll_ms:
            limits.append(f"max.poll.interval.ms={self._poll_ms}")
        if took_s * 1000 > self._transaction_ms or not limits:
            limits.append(f"transaction.timeout.ms={self._transaction_ms}")
        return " and ".join(limits), "raise both" if len(limits) > 1 else "raise it"


def _took(name: str, records: list[Record], took_s: float) -> str:
    first = records[0]
    what = format_position(first.topic, first.partition, first.offset)
    if len(records) > 1:
        what = f"{len(records)} records from {what} on"
    return f"{name} took {took_s:.1f} s for {what}"
