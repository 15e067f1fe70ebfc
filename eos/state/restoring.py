"""Restores tasks from their changelogs in short steps.

Between the steps the session polls its group and works on the partitions that are ready. Each partition goes through
these steps: lock a folder, wait until the predecessor's transaction in the changelog is decided, then read all
committed changes. A waiting partition does not delay the others. Changes are written to the folder in batches of
limited size. Each batch includes its position in the changelog, so a restart continues after the last batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from eos import hotloop, log
from eos.app.cells import find_foreign_cell, store_of
from eos.app.expiry import add_write_time
from eos.app.routes import Route
from eos.errors import ConfigurationError, EosError, InputGone, Unavailable
from eos.kafka.admin import facts, tail
from eos.kafka.admin.tail import MarkedRecord, TopicReader
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.records import Record, format_position
from eos.state import changelog
from eos.state.values import Value, Values, own_entries

_STEP_S = 0.1
_FOLDER_WAIT_S = 2.0  # time to wait for a folder that another process is about to release
_PAUSE_S = 0.05
_REQUEST_TIMEOUT_S = 10.0
_CHECK_INTERVAL_S = 1.0  # how often waiting partitions are checked while others are read
_LOG_INTERVAL_S = 5.0
# The markers of a decided transaction take a moment to arrive; no other transaction is open in a changelog.
_SETTLE_TIMEOUT_S = 30.0
_MAX_BYTES = 8 << 20  # bytes that were read and not yet written, of all partitions together
_FIRST_READ = 16  # number of records of the first read, since their size is not known yet
_MAX_READ = 1_000


@dataclass
class _Partition:
    """Tracks the progress of one partition."""

    min_end: int | None
    """The lowest acceptable end of its changelog; None accepts its contents even if records are missing."""
    values: Values | None = None
    """None while another process owns its folder."""
    end: int | None = None
    """The end of its changelog; None until it is known."""
    at: int = 0
    """The offset up to which it is read."""
    as_of: float = 0.0
    """See Values.as_of: the time of the changes read so far."""
    end_as_of: float = 0.0
    """The value of `as_of` once the partition is read to its end."""
    changes: dict[bytes, Value] = field(default_factory=dict)
    waiting_error: type[EosError] | None = None
    waiting_since: float = 0.0


class Restoring:
    """Restores some partitions of one function.

    `partitions`: the lowest acceptable end of each partition's changelog; None accepts its contents as they are.
    `open_values`: opens the values of a partition, and returns None while another process owns the folder; its second
    argument allows any folder of the task.
    """

    def __init__(
        self,
        settings: Settings,
        topic: str,
        route: Route,
        partitions: Mapping[int, int | None],
        open_values: Callable[[int, bool], Values | None],
        tombstones_s: float,
        world: World,
    ) -> None:
        self._settings, self._topic, self._function, self._world = settings, topic, route.name, world
        self._expiring = route.ttls
        self._open_values, self._tombstone_retention_s = open_values, tombstones_s
        self._unready = {partition: _Partition(min_end) for partition, min_end in partitions.items()}
        self._ends: dict[int, int] = {}  # the ends of the partitions that are being read
        self._ready: dict[int, Values] = {}
        self._client: Any = None
        self._began = world.now()
        self._progress_log = log.Reminder(world.now, _LOG_INTERVAL_S)
        self._wait_log = log.Reminder(world.now)
        self._next_check = 0.0
        self._bytes = 0  # read and not yet written
        self._read = self._keys = 0
        self.done = False
        self._steps = self._run()

    @property
    def partitions(self) -> Collection[int]:
        """Return the partitions that are not ready."""
        return self._unready.keys()

    @property
    def left(self) -> int:
        """Return how many changes are still to be read, as far as known; transaction markers count too."""
        return sum(
            max(0, progress.end - progress.at) for progress in self._unready.values() if progress.end is not None
        )

    def run_steps(self) -> dict[int, Values]:
        """Restore for about 0.1 s, and return the values of the partitions that became ready.

        Raises Temporary, InputGone, ConfigurationError.
        """
        until = self._world.now() + _STEP_S
        for _ in self._steps:
            if self._world.now() >= until:
                break
        ready, self._ready = self._ready, {}
        return ready

    def forget(self, partition: int) -> None:
        """Stop restoring a partition that is no longer assigned."""
        values = self._unready.pop(partition).values
        self._ends.pop(partition, None)
        if values is not None:
            values.close()
        if not self._unready:
            self._steps.close()
            self.done = True

    def close(self) -> None:
        for partition in list(self._unready):
            self.forget(partition)
        self._steps.close()

    # ---- the steps in order; each of them is short ------------------------------------------------------------

    def _run(self) -> Generator[None]:
        names = ",".join(map(str, self._unready))
        while self._unready:
            self._check_waiting()
            if not self._unready:
                break
            if not self._ends:
                self._world.sleep(_PAUSE_S)
                yield
                continue
            try:
                yield from self._read_ready()
            except Unavailable as error:
                log.warning("state restore waiting", function=self._function, reason=error)
                self._world.sleep(_PAUSE_S)
                yield
        self.done = True
        log.info(
            "state restored",
            function=self._function,
            partitions=names,
            keys=self._keys,
            read=self._read,
            seconds=round(self._world.now() - self._began, 2),
        )

    def _check_waiting(self) -> None:
        """Open folders and query the ends of changelogs for the partitions that wait for them."""
        self._next_check = self._world.now() + _CHECK_INTERVAL_S
        waiting = self._world.now() < self._began + _FOLDER_WAIT_S
        for partition, progress in self._unready.items():
            if progress.values is None:
                progress.values = self._open_values(partition, not waiting)
        pending = {
            p: progress for p, progress in self._unready.items() if progress.values is not None and progress.end is None
        }
        if not pending:
            return
        now = self._world.unix()
        for partition, answer in self._query_offsets(pending).items():
            self._start_reading(partition, pending[partition], answer, now)

    def _start_reading(
        self, partition: int, progress: _Partition, offsets: tail.OffsetRange | Unavailable, now: float
    ) -> None:
        """Begin to read a partition, given the offsets that its changelog had at `now`, or wait for it."""
        assert progress.values is not None
        values, accepts = progress.values, progress.min_end is None
        where = format_position(self._topic, partition)
        min_end = 0 if progress.min_end is None else max(values.position, progress.min_end)
        if isinstance(offsets, Unavailable):
            self._keep_waiting(partition, progress, offsets)
            return
        if (reason := changelog.explain_unsettled(where, offsets, min_end)) is not None:
            self._keep_waiting(partition, progress, reason)
            return
        start = changelog.find_start(values.position, values.as_of, offsets, self._tombstone_retention_s, now, accepts)
        if start is None:
            raise changelog.beginning_removed(where, offsets.low)
        if not start.keeps:
            values.clear()
        progress.at, progress.end, progress.end_as_of = start.offset, offsets.end, now
        # A restore from the beginning needs no tombstones of earlier deletes. Brokers keep those of later deletes for
        # long enough from now on (KIP-534).
        progress.as_of = values.as_of if start.keeps and start.offset else now
        if progress.at < progress.end:
            self._ends[partition] = progress.end
        else:
            self._finish(partition, progress)

    def _query_offsets(self, partitions: Collection[int]) -> Mapping[int, tail.OffsetRange | Unavailable]:
        try:
            self._client = self._client or facts.connect(self._settings, _REQUEST_TIMEOUT_S, self._world)
            leaderless = facts.find_leaderless(self._client, self._topic, _REQUEST_TIMEOUT_S)
            with_leader = [partition for partition in partitions if partition not in leaderless]
            offsets = tail.partition_offsets_or_errors(self._client, self._topic, with_leader) if with_leader else {}
            reason = Unavailable("it has no leader")
            return {partition: offsets.get(partition, reason) for partition in partitions}
        except Unavailable as error:
            return dict.fromkeys(partitions, error)

    def _keep_waiting(self, partition: int, progress: _Partition, reason: EosError) -> None:
        """Raise `reason` after the partition has waited for long enough.

        A partition without a leader waits for as long as it takes, like an input partition.
        """
        now = self._world.now()
        if type(reason) is not progress.waiting_error:
            progress.waiting_error, progress.waiting_since = type(reason), now
        # Wait for missing records only until a new leader knows its end.
        more_s = 0 if isinstance(reason, InputGone) else self._settings.transaction_timeout_ms / 1000
        if not isinstance(reason, Unavailable) and now > progress.waiting_since + _SETTLE_TIMEOUT_S + more_s:
            raise reason
        log.debug("changelog not ready", topic=self._topic, partition=partition, reason=reason)
        if self._wait_log.tick():
            log.warning("state restore waiting", function=self._function, partition=partition, reason=reason)

    def _read_ready(self) -> Generator[None]:
        """Read until every readable partition is read, or until another partition becomes readable."""
        starts = {partition: self._unready[partition].at for partition in self._ends}
        with tail.TopicReader(self._settings, self._topic, starts, uncommitted=False, world=self._world) as reader:
            reader.most = _FIRST_READ
            for read in tail.read_batches_until(reader, self._ends):
                self._apply_batch(read, reader)
                if self._bytes >= _MAX_BYTES:
                    self._write_changes()
                for partition, end in list(self._ends.items()):
                    if reader.at(partition) >= end:
                        self._finish(partition, self._unready[partition])
                if not self._unready:
                    return
                self._log_progress()
                yield
                if self._unready.keys() - self._ends and self._world.now() >= self._next_check:
                    self._check_waiting()
                    if self._ends.keys() - starts:
                        return

    def _apply_batch(self, read: list[MarkedRecord], reader: TopicReader) -> None:
        records = [seen.record for seen in read]
        cells = [record.key or b"" for record in records]
        values = [record.value for record in records]
        if (foreign := find_foreign_cell(cells)) is not None:
            record = records[foreign]
            where = format_position(self._topic, record.partition, record.offset)
            raise ConfigurationError(
                f"the changelog record {where} was written by another program: {cells[foreign][:50]!r} names no cell",
                remedy=f"stop the program that writes to {self._topic}; a tombstone of the same key and a "
                "compaction remove the record",
            )
        size = sum(map(len, cells)) + sum(map(len, filter(None, values)))
        changes: list[Value] = values
        if self._expiring:
            changes = [*map(self._with_write_time, records, cells, values)]
        for start, stop in hotloop.spans_of(records):
            progress = self._unready.get(records[start].partition)
            if progress is not None:
                progress.changes.update(zip(cells[start:stop], changes[start:stop], strict=True))
        for partition in self._ends:
            self._unready[partition].at = reader.at(partition)
        self._read += len(read)
        self._bytes += size
        if read:
            reader.most = max(1, min(_MAX_READ, _MAX_BYTES // 2 * len(read) // max(1, size)))

    def _with_write_time(self, record: Record, cell: bytes, value: bytes | None) -> Value:
        if value is None or store_of(cell) not in self._expiring:
            return value
        return add_write_time(max(0, record.timestamp), value)

    def _write_changes(self) -> None:
        for progress in self._unready.values():
            if progress.changes and progress.values is not None:
                progress.values.apply(progress.changes, progress.at, progress.as_of)
                progress.changes = {}
        self._bytes = 0

    def _finish(self, partition: int, progress: _Partition) -> None:
        assert progress.values is not None
        assert progress.end is not None
        progress.values.apply(progress.changes, progress.end, progress.end_as_of)
        self._ends.pop(partition, None)
        del self._unready[partition]
        self._ready[partition] = progress.values
        self._keys += len(progress.values) - own_entries(progress.values)

    def _log_progress(self) -> None:
        if not self._progress_log.tick():
            return
        log.info(
            "restoring state",
            function=self._function,
            read=self._read,
            left=self.left,
            per_second=round(self._read / (self._world.now() - self._began)),
        )
