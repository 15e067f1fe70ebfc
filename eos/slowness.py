"""A function that is slower than its transaction may last: one clear error instead of a loop of fencings.

The broker ends a transaction that is open for longer than transaction.timeout.ms, and the group gives a member up that
has not polled for max.poll.interval.ms; in both cases the work is lost and its records come again. Once may have been
the machine or a service that was away for a moment: it is logged, and the session recovers. When a record is met that
was among those of such an attempt, and it was too slow again, going on would be a loop.

Owns the judgement only; it must never measure, and never touch a transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from eos import log
from eos.app import Record, Route
from eos.errors import ConfigurationError
from eos.settings import Settings

DEFAULT_MAX_POLL_INTERVAL_MS = 300_000  # librdkafka's


class Slowness:
    """Of one worker's functions."""

    def __init__(self, settings: Settings) -> None:
        self._transaction_ms = settings.transaction_timeout_ms
        self._poll_ms = int(settings.get("max.poll.interval.ms", DEFAULT_MAX_POLL_INTERVAL_MS))
        self._most = {"batch": settings["eos.batch.max.records"], "async": settings["eos.async.max.records"]}
        self._slow: dict[tuple[str, int], int] = {}  # first record of each partition in a too slow attempt
        self._one_by_one: dict[tuple[str, int], int] = {}  # up to these, records are to be run alone: which one is it?

    @property
    def one_by_one(self) -> bool:
        """Records that come now are to be run alone: one of them was too slow."""
        return bool(self._one_by_one)

    def passed(self, record: Record, owned: Collection[tuple[str, int]]) -> None:
        """This record was run alone and in time; what the group took away will not come here."""
        place = record.topic, record.partition
        self._one_by_one = {
            p: last for p, last in self._one_by_one.items() if p in owned and not (p == place and record.offset >= last)
        }

    def too_slow(self, open_s: float, took_s: float) -> bool:
        """Whether a transaction that is open for `open_s` can still commit after a call that took `took_s`."""
        return open_s * 1000 > self._transaction_ms or took_s * 1000 > self._poll_ms

    def strike(
        self, route: Route, records: list[Record], took_s: float, who: Mapping[str, object] | None = None
    ) -> None:
        """These records took too long. Raises ConfigurationError when they did so before.

        Many records of a function that takes one at a time are no proof: they come again one by one.
        `who`: fields that say whose transaction is lost.
        """
        sentence = self._sentence(route, records, took_s)
        if any(self._slow.get((record.topic, record.partition)) == record.offset for record in records):
            raise ConfigurationError(sentence)
        self._warn(sentence, who)
        many = route.batch or route.concurrent
        if many or len(records) == 1:
            for record in reversed(records):
                self._slow[record.topic, record.partition] = record.offset
        if not many:
            self._run_alone(records)

    def strike_nobody(
        self, names: Sequence[str], records: list[Record], took_s: float, who: Mapping[str, object] | None = None
    ) -> None:
        """These records of several functions took too long, and no call did so by itself: run alone they will tell."""
        limits, remedy = self._limits(took_s)
        self._warn(f"{_took(', '.join(names), records, took_s)}, longer than {limits}: {remedy}", who)
        self._run_alone(records)

    def _warn(self, sentence: str, who: Mapping[str, object] | None) -> None:
        log.warning("too slow: the transaction is lost, its records come again", why=sentence, **(who or {}))

    def _run_alone(self, records: list[Record]) -> None:
        for record in records:
            place = record.topic, record.partition
            self._one_by_one[place] = max(record.offset, self._one_by_one.get(place, 0))

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
    what = f"{first.topic} [{first.partition}] offset {first.offset}"
    if len(records) > 1:
        what = f"{len(records)} records from {what} on"
    return f"{name} took {took_s:.1f} s for {what}"
