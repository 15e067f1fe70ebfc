"""A function that is slower than its transaction may last: one clear error instead of a loop of fencings.

The broker ends a transaction whose first record it saw longer ago than transaction.timeout.ms, and the group gives a
member up that has not polled for max.poll.interval.ms; in both cases the work is lost and its records come again. What
was handled before anything was sent costs a transaction nothing, and brokers look at their clocks only now and then: so
a call over a limit is a suspicion, told as one, until the session says how its transaction ended. Once may have been
the machine or a service that was away for a moment: the session recovers. A record that was lost so is known from then
on: what comes before it is committed, and it is run as the first of a transaction of its own, where what it takes
before its output costs nothing. Is it lost there too, going on would be a loop.

Owns the judgement only; it must never measure, and never touch a transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from eos import log
from eos.app.routes import Route
from eos.errors import ConfigurationError
from eos.kafka.client.settings import Settings
from eos.records import Record, place_of
from eos.session.participants import Outcome
from eos.worker.handling import Partition, spans_of

DEFAULT_MAX_POLL_INTERVAL_MS = 300_000  # librdkafka's


@dataclass
class _Attempt:
    """A call over a limit whose transaction may be lost."""

    sentence: str
    who: Mapping[str, object]
    spans: dict[Partition, tuple[int, int]]  # first and last offset of the records
    blamed: bool  # one function's call; else nobody's by itself
    many: bool  # all of the records were one call

    @property
    def alone(self) -> bool:
        return self.blamed and all(first == last for first, last in self.spans.values()) and len(self.spans) == 1


class Slowness:
    """Of one worker's functions."""

    def __init__(self, settings: Settings) -> None:
        self._transaction_ms = settings.transaction_timeout_ms
        self._poll_ms = int(settings.get("max.poll.interval.ms", DEFAULT_MAX_POLL_INTERVAL_MS))
        self._most = {"batch": settings["eos.batch.max.records"], "async": settings["eos.async.max.records"]}
        self._suspects: dict[Partition, _Attempt] = {}  # of the open transaction, the last per partition
        self._convicted: _Attempt | None = None
        self._slow: dict[Partition, int] = {}  # first record of each partition in a call that was lost
        self._one_by_one: dict[Partition, int] = {}  # up to these, records are to be run alone: which one is it?

    @property
    def one_by_one(self) -> bool:
        """Records that come now are to be run alone: one of them was too slow."""
        return bool(self._one_by_one)

    def passed(self, record: Record, owned: Collection[Partition]) -> None:
        """This record was run alone and in time; what the group took away will not come here."""
        place = record.topic, record.partition
        self._one_by_one = {
            p: last for p, last in self._one_by_one.items() if p in owned and not (p == place and record.offset >= last)
        }

    @property
    def knows(self) -> bool:
        """There are records that were too slow and lost before."""
        return bool(self._slow)

    def known(self, records: list[Record], owned: Collection[Partition]) -> int | None:
        """Which of these is one, if any: the number of the first. `owned`: what is known of other partitions is kept,
        or two members would hand a slow record to and fro for ever."""
        if self._slow.keys().isdisjoint(owned):
            return None
        slow = (
            n for n, record in enumerate(records) if self._slow.get((record.topic, record.partition)) == record.offset
        )
        return next(slow, None)

    def too_slow(self, open_s: float, took_s: float) -> bool:
        """Whether a transaction may be lost whose first record was sent `open_s` ago, after a call of `took_s`."""
        return open_s * 1000 > self._transaction_ms or took_s * 1000 > self._poll_ms

    # ---- a call that was too slow -----------------------------------------------------------------------------------

    def suspect(self, who: Mapping[str, object], route: Route, records: list[Record], took_s: float) -> None:
        """These records of a function took too long. `who`: fields that say whose transaction it is."""
        many = route.batch or route.concurrent
        sentence = self._sentence(route, records, took_s)
        self._note(_Attempt(sentence, who, spans_of(records), blamed=True, many=many))

    def suspect_nobody(
        self, who: Mapping[str, object], names: Sequence[str], records: list[Record], took_s: float
    ) -> None:
        """These records of several functions took too long, and no call did so by itself: run alone they will tell."""
        limits, remedy = self._limits(took_s)
        sentence = f"{_took(', '.join(names), records, took_s)}, longer than {limits}: {remedy}"
        self._note(_Attempt(sentence, who, spans_of(records), blamed=False, many=False))

    def _note(self, attempt: _Attempt) -> None:
        log.warning(
            "too slow: the transaction may be lost, then its records come again", why=attempt.sentence, **attempt.who
        )
        self._suspects |= dict.fromkeys(attempt.spans, attempt)

    # ---- what became of its transaction -----------------------------------------------------------------------------

    def ended(self, outcome: Outcome, committed: Mapping[Partition, int]) -> None:
        """Note that what was suspected in the open transaction was lost, or was not. `committed`: next offsets, where
        they are known."""
        suspects, self._suspects = self._suspects, {}
        if outcome is not Outcome.COMMITTED:
            for attempt in {id(attempt): attempt for attempt in suspects.values()}.values():
                self._strike(attempt)
        elif self._slow:
            self._slow = {p: first for p, first in self._slow.items() if first >= committed.get(p, 0)}

    def check(self) -> None:
        """Raises ConfigurationError when a record was too slow and lost for the second time."""
        if self._convicted is not None:
            raise ConfigurationError(self._convicted.sentence)

    def _strike(self, attempt: _Attempt) -> None:
        """Many records of a function that takes one at a time are no proof: they come again one by one."""
        spans = attempt.spans
        if attempt.blamed and any(first <= self._slow.get(p, -1) <= last for p, (first, last) in spans.items()):
            self._convicted = attempt
            return
        log.warning("too slow: the transaction was lost, its records come again", why=attempt.sentence, **attempt.who)
        if attempt.many or attempt.alone:
            self._slow |= {p: first for p, (first, _) in spans.items()}
        if not attempt.many:
            for p, (_, last) in spans.items():
                self._one_by_one[p] = max(last, self._one_by_one.get(p, 0))

    # ---- sentences --------------------------------------------------------------------------------------------------

    def _sentence(self, route: Route, records: list[Record], took_s: float) -> str:
        limits, remedy = self._limits(took_s)
        if len(records) > 1 and (route.batch or route.concurrent):
            kind = "batch" if route.batch else "async"
            remedy += f", or lower eos.{kind}.max.records={self._most[kind]}"
        return (
            f"{_took(route.name, records, took_s)}, longer than {limits}: {remedy} "
            "(the broker takes transactions up to its transaction.max.timeout.ms)"
        )

    def _limits(self, took_s: float) -> tuple[str, str]:
        """The settings that so long a call is above, and what to do about them."""
        limits = []
        if took_s * 1000 > self._poll_ms:
            limits.append(f"max.poll.interval.ms={self._poll_ms}")
        if took_s * 1000 > self._transaction_ms or not limits:
            limits.append(f"transaction.timeout.ms={self._transaction_ms}")
        return " and ".join(limits), "raise both" if len(limits) > 1 else "raise it"


def _took(name: str, records: list[Record], took_s: float) -> str:
    first = records[0]
    what = place_of(first.topic, first.partition, first.offset)
    if len(records) > 1:
        what = f"{len(records)} records from {what} on"
    return f"{name} took {took_s:.1f} s for {what}"
