"""Commit on a separate thread, so that the loop can fetch records in the meantime.

Owns that thread, which runs one commit at a time. It never decides when to commit, nor how to handle a failed commit
(eos/session/loop.py does).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from confluent_kafka import TopicPartition

from eos.kafka.client.watchdog import Job, Watchdog
from eos.kafka.client.world import World
from eos.observe import Pulse
from eos.session.producer.producer import TransactionalProducer

_BEAT_S = 0.5


class Committer:
    def __init__(self, producer: TransactionalProducer, pulse: Pulse, world: World) -> None:
        self._producer, self._pulse, self._world = producer, pulse, world
        self._thread: Watchdog | None = None

    def start(self) -> None:
        self._thread = self._world.watchdog(f"eos-{self._producer.transactional_id}-commit")

    def job_of(self, offsets: Sequence[TopicPartition], group_metadata: Any) -> Job:
        """Return the job that commits the open transaction with these offsets; `wait` runs it."""
        return Job(self._send_and_commit, (offsets, group_metadata))

    def _send_and_commit(self, offsets: list[TopicPartition], group_metadata: Any) -> float:
        """Send the offsets and commit. Runs on this class's thread, which alone uses the producer meanwhile."""
        if offsets:
            self._producer.send_offsets(offsets, group_metadata)
        self._world.step("offsets sent")
        self._producer.commit()
        ended = self._world.now()
        self._world.step("committed")
        return ended

    def wait(self, job: Job, meanwhile: Callable[[], bool]) -> BaseException | None:
        """Run the job, wait for its end and return the error that it failed with. Until then call `meanwhile`
        repeatedly while it returns True. An interrupted wait can be repeated: the job runs once."""
        assert self._thread is not None
        self._thread.submit(job)
        while not job.done.is_set():
            if not meanwhile():
                self._pulse.beat("calling", "commit")
                job.done.wait(_BEAT_S)
        return job.error

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
