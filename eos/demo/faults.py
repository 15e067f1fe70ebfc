"""Makes SIGKILL and SIGSTOP provably hit an open transaction.

Owns the definition of a hit: the coordinator reports the transaction as Ongoing, reports the same again after all
requests on their way have arrived, and a broker has records of it. After a miss the fault is undone and repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kafka import TopicPartition
from kafka import errors as kafka_errors
from kafka.admin import KafkaAdminClient

from eos.demo import topics
from eos.demo.process import Child
from eos.errors import EosError
from eos.kafka.client.cluster import ClusterAdmin, TransactionalIdState
from eos.kafka.client.settings import Settings

MAX_ATTEMPTS = 20
IN_FLIGHT_S = 0.3  # a commit sent before the fault ends the transaction within milliseconds
TIMEOUT_S = 30.0


class NotProven(EosError):
    """Reports that the demo did not show what it promises; the message names the missing part."""

    exit_code = 1


@dataclass(frozen=True)
class Hit:
    """Describes a fault that left a transaction open.

    It has the transaction's id, the coordinator's description of it, the number of partitions with its records, and the
    number of attempts until the fault hit.
    """

    transactional_id: str
    found: TransactionalIdState
    partitions: int
    attempts: int

    def __str__(self) -> str:
        partitions = f"{self.partitions} partition{'s' * (self.partitions != 1)}"
        tries = f", {self.attempts} tries" if self.attempts > 1 else ""
        return f"{self.transactional_id}: {self.found.state}, records in {partitions}{tries}"


class Witness:
    """Queries the cluster about the workers' transactions. `tick` is called while it waits."""

    def __init__(
        self,
        servers: str,
        tick: Callable[[], object],
        outputs: Sequence[str] = topics.OUTPUTS,
        group: str = topics.GROUP,
    ) -> None:
        self._group = group
        self._outputs = [TopicPartition(topic, p) for topic in outputs for p in range(topics.PARTITIONS)]
        self._cluster = ClusterAdmin(Settings({"bootstrap.servers": servers}))
        self._admin = KafkaAdminClient(bootstrap_servers=servers.split(","))
        self._tick = tick

    def close(self) -> None:
        self._admin.close()
        self._cluster.close()

    def find_ongoing(self, worker: str) -> tuple[str, TransactionalIdState] | None:
        """Return this worker's open transaction and its transactional id from DescribeTransactions, or None."""
        # Before 4.0 a replacement uses the second transactional.id.
        return self._first_ongoing(f"{self._group}-{worker}", f"{self._group}-{worker}-alternate")

    def _first_ongoing(self, *transactional_ids: str) -> tuple[str, TransactionalIdState] | None:
        for transactional_id in transactional_ids:
            found = self._cluster.describe(transactional_id)
            if found is not None and found.state == "Ongoing":
                return transactional_id, found
        return None

    def has_records_of(self, transactional_id: str) -> bool:
        """Return whether this id's transaction is open and has records in the outputs."""
        first = self._first_ongoing(transactional_id)
        return first is not None and self._partitions_with_records_of(first[1]) > 0

    def find_open_transaction(self, worker: str, attempts: int) -> Hit | None:
        """Return the open transaction of a killed or paused worker if the log has records of it, or None."""
        return self._find_open_transaction(lambda: self.find_ongoing(worker), attempts)

    def find_open_transaction_by(self, transactional_id: str, attempts: int) -> Hit | None:
        """Return the open transaction of one transactional id, as `find_open_transaction` does."""
        return self._find_open_transaction(lambda: self._first_ongoing(transactional_id), attempts)

    def _find_open_transaction(
        self, ongoing: Callable[[], tuple[str, TransactionalIdState] | None], attempts: int
    ) -> Hit | None:
        first = ongoing()
        if first is None:
            return None
        self.pause(IN_FLIGHT_S)
        if ongoing() != first:
            return None
        transactional_id, found = first
        partitions = self._partitions_with_records_of(found)
        return Hit(transactional_id, found, partitions, attempts) if partitions else None

    def wait_until_ended(self, hit: Hit) -> TransactionalIdState:
        """Wait until the coordinator has aborted the transaction after its timeout and raised the epoch."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            now = self._cluster.describe(hit.transactional_id)
            if now is not None and now.state == "CompleteAbort" and now.epoch != hit.found.epoch:
                return now
            if time.monotonic() > deadline:
                raise NotProven(f"the broker did not time out {hit.transactional_id} in {TIMEOUT_S:.0f} s: it is {now}")
            self.pause(0.1)

    def wait_until_open(self, worker: Child, other_than: tuple[str, TransactionalIdState] | None = None) -> None:
        """Wait until the coordinator reports an open transaction of this worker; the fault should follow at once."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.find_ongoing(worker.name) in (None, other_than):
            self._tick()
            if time.monotonic() > deadline:
                raise NotProven(f"worker {worker.name} opened no transaction in {TIMEOUT_S:.0f} s: {worker.log_path}")

    def wait_for_log(self, worker: Child, message: str, skip: int = 0) -> None:
        """Wait until the worker has logged this event, ignoring the first `skip` characters of the log."""
        deadline = time.monotonic() + TIMEOUT_S
        while message not in worker.log()[skip:]:
            if time.monotonic() > deadline:
                raise NotProven(f"worker {worker.name} did not log {message!r} in {TIMEOUT_S:.0f} s: {worker.log_path}")
            self.pause(0.1)

    def pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._tick()
            time.sleep(min(left, 0.05))

    def _partitions_with_records_of(self, transaction: TransactionalIdState) -> int:
        """Return how many output partitions have records of the transaction, by DescribeProducers (KIP-664)."""
        try:
            states = self._admin.describe_producers(self._outputs).values()
        except kafka_errors.KafkaError as error:
            raise NotProven(f"DescribeProducers failed: {error}") from error
        return sum(
            any(
                p.producer_id == transaction.producer_id and p.current_transaction_start_offset >= 0
                for p in s.active_producers
            )
            for s in states
        )


def kill_in_a_transaction(worker: Child, witness: Witness) -> Hit:
    """Kill the worker with SIGKILL inside a transaction and leave it dead; restart it and try again after a miss."""
    left = None
    for attempt in range(1, MAX_ATTEMPTS + 1):
        witness.wait_until_open(worker, other_than=left)
        worker.kill()
        if hit := witness.find_open_transaction(worker.name, attempt):
            return hit
        # The killed worker may have left a transaction without records. It stays open until the first request of the
        # next process ends it, so `other_than` keeps it from counting as that process's.
        left = witness.find_ongoing(worker.name)
        worker.start()
    raise NotProven(f"{MAX_ATTEMPTS} SIGKILLs did not hit an open transaction of worker {worker.name}")


def pause_in_a_transaction(worker: Child, witness: Witness) -> Hit:
    """Pause the worker with SIGSTOP inside a transaction and leave it paused; resume it and try again after a miss."""
    for attempt in range(1, MAX_ATTEMPTS + 1):
        witness.wait_until_open(worker)
        worker.pause()
        if hit := witness.find_open_transaction(worker.name, attempt):
            return hit
        worker.resume()
    raise NotProven(f"{MAX_ATTEMPTS} SIGSTOPs did not hit an open transaction of worker {worker.name}")
