"""Runs the transactional producer: one transactional.id, one state machine, replaced after each doubtful transaction.

Owns the confluent-kafka Producer, the legal order of its calls (states.py), their deadlines
(eos/kafka/client/watchdog.py) and the evidence that calls for a replacement (retry_evidence.py). A failed call raises
CallFailed with the action to take. This module never decides whether to commit or abort, and never replaces itself
inside a transaction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from eos import log
from eos.errors import Action, Call, CallFailed, Unavailable, describe_error, no_broker, stop_error
from eos.kafka.admin.ownership import Identity, Progress, Situation
from eos.kafka.client.client_calls import call_client
from eos.kafka.client.failures import (
    classify,
    explain_denied,
    explain_missing_topic,
    explain_refused_timestamp,
    explain_too_large,
)
from eos.kafka.client.settings import Settings, alternate_transactional_id
from eos.kafka.client.watchdog import CallHung
from eos.kafka.client.world import REAL, World
from eos.observe import Pulse, add
from eos.records import Feed, FeedResult, Record, Send
from eos.session.producer.client import ABANDONED_POLL_S, Client, size_of
from eos.session.producer.states import OPEN, Event, Machine, State

OLD_TRANSACTIONS = 2  # with a lower transaction.version a replacement needs another transactional.id
HANG_MARGIN_S = 5.0
_FLUSH_LOOK_S, _FLUSH_WAIT_S = 0.001, 0.5
_IDENTITY_S = 2.0  # longest wait for the first statistics, which come ten times a second
_FRESH_S = 10.0  # longest wait for new statistics: an outdated epoch would look like a predecessor's
_OVERDUE_S = 2.0  # how late the next statistics may come; without them the producer is replaced, which takes longer
_STATISTICS_POLL_S = 0.02
# Pause before a transaction whose first request is AddOffsetsToTxn. If it arrives while the previous transaction's
# markers are written, the coordinator refuses the request, and the client repeats it after retry.backoff.ms. On a busy
# machine that happened to 32 of 200 transactions in a row. With this pause it happened to 0 and 3 of 200.
_MARKERS_S = 0.010
_REPORT_DELAY_S = 0.5  # a transaction fails a moment before the delivery report of the record that made it fail


class TransactionalProducer:
    """Drives one transactional.id: start, then begin/send/flush/send_offsets/commit or abort, replace, close. It is the
    Sink of the records that are fed to it (eos/records.py).

    `changelogs`: topics that no function writes; errors about them are classified separately
    (eos/kafka/client/failures.py). With `reports` every record's delivery is reported to the callback of its `send`.
    """

    def __init__(
        self,
        settings: Settings,
        transactional_id: str,
        reports: bool = False,
        pulse: Pulse | None = None,
        world: World = REAL,
        changelogs: Collection[str] = (),
    ) -> None:
        self._settings, self._world, self._changelogs = settings, world, changelogs
        self._reports = reports
        self._pulse = pulse or Pulse(world.now)
        self._id = transactional_id
        self._ids = [transactional_id]  # the present id, then the id for replacements, if any
        self._machine = Machine()
        self._call_timeout_s: float = settings["eos.call.timeout.ms"] / 1000
        self._client: Client | None = None
        self._initialising_client: Client | None = None  # a signal interrupted the wait for its init
        self._replacement_reason: str | None = None
        self._produced_count = 0
        self._is_feeding = False  # records are sent that are not counted yet; stays true if a signal interrupts that
        self.waited_s = 0.0
        """The seconds that sends have waited for room in the client's queue, over the life of this object."""
        self._began_at = 0.0  # World.now(), for our own deadlines
        self._committed_at = 0.0  # World.now()
        self._open_since = 0.0  # World.boot_clock(), for the broker's timeout
        self._offsets_sent = False
        self.epoch_may_have_advanced = False
        """True after an abort, or after an init that did not return. In that call, a client of ours may have taken the
        next epoch (after an abort: KIP-360), and its statistics do not show that.
        """
        self.replacements: dict[str, int] = {}
        """Number of replacements by kind of reason: "abort", "retry", "failure"."""

    @property
    def state(self) -> State:
        return self._machine.state

    @property
    def transactional_id(self) -> str:
        return self._ids[0]

    @property
    def may_abort(self) -> bool:
        """Return True if a transaction is open and no call is running that may still be answered."""
        return self._machine.state in (State.IN_TRANSACTION, State.ABORTABLE_ERROR) and not self.client.watchdog.hung

    @property
    def client(self) -> Client:
        assert self._client is not None, "start() comes first"
        return self._client

    def who(self) -> dict[str, Any]:
        """Return the fields that identify this producer in a log event."""
        mine = self._client.identity if self._client else None
        return {
            "transactional_id": self.transactional_id,
            "producer_id": mine.producer_id if mine else None,
            "epoch": mine.epoch if mine else None,
            "state": self.state.value,
        }

    # ---- life -------------------------------------------------------------------------------------------------

    def start(
        self,
        deadline: float | None,
        before_init: Callable[[str], None] = lambda transactional_id: None,
        alternate: bool = False,
    ) -> None:
        """Create the client and initialise the transactional.id, which ends a predecessor's open transaction.

        `deadline` is a World.now(); without one the call waits for an unreachable cluster. `before_init` is called with
        each transactional.id just before its init. Raises Unavailable, ConfigurationError, NotAuthorised.

        With `alternate`, a replacement uses a second transactional.id, and the start fences both. Brokers before 4.0
        need this: there a late TxnOffsetCommit of the fenced epoch deletes pending offsets of the new epoch (measured
        on 3.9.2, 6 of 6), but not those of another producer id.
        """
        self._ids = [self._id, alternate_transactional_id(self._id)] if alternate else [self._id]
        self._machine = Machine()
        for transactional_id in reversed(self._ids):
            client = self._create_client(transactional_id, deadline, before_init)
            if transactional_id != self._ids[0]:
                client.retire()
        self._client = client
        self._become_ready()

    def fence(self, transactional_id: str, deadline: float | None, before_init: Callable[[str], None]) -> None:
        """Initialise another transactional.id once, which fences its owner. Arguments and errors are `start`'s."""
        self._create_client(transactional_id, deadline, before_init).retire()

    def _become_ready(self) -> None:
        """Begin to use an initialised client."""
        self._machine.fire(Event.INITIALISED)
        self._replacement_reason, self.epoch_may_have_advanced = None, False

    def _wait_for_first_statistics(self) -> None:
        """Wait until the client has emitted statistics since its init, at most 0.1 s after that.

        They show the connections before the first call that may be retried. Without them a slow call counts as retried,
        and with a slow coordinator each small transaction would replace the producer. After a fast init the first
        transaction waits at its end, because most of that time has passed by then."""
        evidence = self.client.evidence
        if evidence.has_no_statistics:
            self._wait_for_statistics(lambda: evidence.has_no_statistics)

    def _create_client(
        self,
        transactional_id: str,
        deadline: float | None,
        before_init: Callable[[str], None] = lambda transactional_id: None,
    ) -> Client:
        """Return a client that has initialised this transactional.id."""
        client = self._initialising_client
        if client is None or client.transactional_id != transactional_id:
            self._finish_interrupted_init()
            client = Client(self._settings, transactional_id, self._reports, self._world)
            # Fence only after the client was created: settings that it refuses must not fence a healthy owner.
            self._world.step("abort of predecessor")
            before_init(transactional_id)
        self._world.step("init")
        try:
            self._init(client, deadline)
        except CallFailed as failure:
            client.retire()
            if failure.action in (Action.RETRY, Action.REBUILD, Action.ABORT, Action.SETTLE):
                servers = self._settings.bootstrap_servers
                raise Unavailable(
                    f"{transactional_id} could not be initialised at {servers}: {failure} (a "
                    "transaction.state.log.replication.factor above the number of brokers also causes this error)",
                    remedy=no_broker(servers),
                ) from failure
            # The error must name this transactional.id, because it may be the alternate one.
            right = explain_denied(failure.error, transactional_id=transactional_id)
            raise stop_error(CallFailed("init", failure.action, failure.error, right)) from failure
        return client

    def _init(self, client: Client, deadline: float | None) -> None:
        """Initialise a client's transactional.id. After a signal interrupted the wait, continue with the same client.

        Two inits never run at once, because an interrupted init could fence a client that was initialised after it."""
        resumed, self._initialising_client = client is self._initialising_client, client
        if resumed:
            client.watchdog.close()
            while not client.watchdog.join(ABANDONED_POLL_S):
                self._pulse.beat("calling", "init")
            client.renew_watchdog()
        try:
            self._call(client, "init", client.init_transactions, deadline=deadline)
        except CallFailed as failure:
            if not (resumed and failure.action is Action.BUG):  # the error _STATE: the interrupted call had succeeded
                self._initialising_client = None
                raise
        self._initialising_client = None

    def _finish_interrupted_init(self) -> None:
        if (client := self._initialising_client) is not None:
            with contextlib.suppress(CallFailed):
                self._init(client, self._world.now() + self._call_timeout_s)
            client.retire()

    def decide_replacement(self) -> str | None:
        """Return why this producer must be replaced before its next transaction, or None.

        After a slow call, wait for the next statistics: they show whether the broker was merely distant or
        busy.
        """
        if self._machine.state is State.UNINITIALISED:
            return self._replacement_reason or "failure: an init did not return"
        if self._machine.state in (State.FATAL, State.FENCED):
            return self._replacement_reason
        if self._replacement_reason is None:
            evidence = self.client.evidence
            self._wait_for_statistics(lambda: evidence.has_undecided_calls)
            evidence.stop_waiting()
            if evidence.reason is not None:
                return f"retry: {evidence.reason}"
        return self._replacement_reason

    def _wait_for_statistics(self, is_waiting: Callable[[], bool]) -> None:
        """Poll while `is_waiting` returns True, until the next statistics are overdue."""
        began = self._world.now()
        while is_waiting() and self._world.now() - began < self.client.statistics_interval_s + _OVERDUE_S:
            self.poll(_STATISTICS_POLL_S)

    def replace(self, reason: str) -> None:
        """Replace the client by one with the same transactional.id and a new epoch, so that late requests of the old
        one are refused.

        Waits for the cluster as long as it takes. The old client is dropped after the init of its replacement, and
        never closed: close() would send an abort.
        """
        if self._machine.state in OPEN or self._machine.state is State.UNINITIALISED:
            self._machine.fire(Event.FAIL)
        old = self._client
        self._machine.fire(Event.REPLACE)
        self.epoch_may_have_advanced = True  # until the init returns
        add(self.replacements, reason.split(":")[0])
        if len(self._ids) > 1:
            self._create_client(self._ids[0], None).retire()
            self._ids.reverse()
        self._client = self._create_client(self._ids[0], None)
        if old is not None:
            old.retire()
        self._become_ready()
        self._wait_for_first_statistics()
        log.info("producer replaced", reason=reason, **self.who())

    def give_up(self, reason: str) -> None:
        """Refuse further calls in the open transaction, if any; the producer is then replaced, which aborts it."""
        if self._machine.state in OPEN:
            self._machine.fire(Event.FAIL)
            self._replacement_reason = f"failure: {reason}"

    def abandon(self) -> None:
        """Abandon the client for good, because another thread is inside a call that does not return."""
        self.client.watchdog.abandon()

    def close(self) -> None:
        """Drop the client without a request to the cluster; an open transaction ends by its timeout or a successor."""
        self._finish_interrupted_init()  # an unfinished init could otherwise fence a new session
        if self._client is not None:
            self._client.retire()
            self._client = None

    # ---- one transaction ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        if self.client.init_ms >= self.client.evidence.fastest_retry_ms["commit"]:
            # A slow init may have broken connections, as on a new cluster. In a transaction that would be evidence.
            self._wait_for_first_statistics()
        self._machine.fire(Event.BEGIN)
        try:
            self.client.begin_transaction()
        except KafkaException as error:
            raise self._classify_failure("begin", error) from error
        self._produced_count, self._is_feeding, self._offsets_sent = 0, False, False
        self._began_at, self._open_since = self._world.now(), self._world.boot_clock()

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        partition: int = -1,
        timestamp_ms: int = 0,
        headers: Any = None,
        report: Callable[[KafkaError | None, Message], None] | None = None,
    ) -> None:
        """Queue one record; wait while the client's queue is full. Raises CallFailed for a record that was not queued,
        so that none is lost silently."""
        self._machine.fire(Event.SEND)
        client, on_delivery = self.client, None
        if report is not None:

            def on_delivery(error: KafkaError | None, message: Message) -> None:
                client.take_delivery(error, message)
                report(error, message)

        record = (topic, value, key, partition, on_delivery, None, timestamp_ms, headers or None)
        self._produced_count += 1
        try:
            client.producer.produce(*record)
        except (BufferError, KafkaException) as error:
            self._produce_after(error, record)

    def send_all(self, sends: Iterable[Send]) -> None:
        """Queue many records with one state check for all of them. Raises CallFailed as `send` does."""
        self._machine.fire(Event.SEND)
        produce = self.produce
        for send in sends:
            topic, value, key, partition, timestamp_ms, headers = send
            self._produced_count += 1
            try:
                produce(topic, value, key, partition, None, None, timestamp_ms, headers)
            except (BufferError, KafkaException) as error:
                self.on_produce_error(error, send)

    def feed(self, feed: Feed, records: list[Record]) -> FeedResult:
        """Queue the outputs that `feed` makes of the records: the hot path, with one state check for all. Raises
        nothing of its own: a failed send is the CallFailed in `Fed.error`."""
        self._machine.fire(Event.SEND)
        self._is_feeding = True
        fed = feed(records, self)
        self._produced_count += fed.sent
        self._is_feeding = False
        # librdkafka keeps the report of each delivery until it is polled, although only failures call back. Poll while
        # the client's threads send records: during the flush, polls would make the end of the transaction later.
        self.poll(0)
        return fed

    @property
    def produce(self) -> Callable[..., object]:
        produce: Callable[..., object] = self.client.producer.produce
        return produce

    def on_produce_error(self, error: Exception, send: Send) -> None:
        """Send a record whose produce() raised inside a feed. Raises CallFailed if that is impossible."""
        topic, value, key, partition, timestamp_ms, headers = send
        if not isinstance(error, (BufferError, KafkaException)):
            raise self._fail("produce", Action.BUG, error) from error  # the App's checks let nothing else pass
        self._produce_after(error, (topic, value, key, partition, None, None, timestamp_ms, headers))

    def _produce_after(self, error: Exception, record: tuple[Any, ...]) -> None:
        """Produce again while the queue is full. Raises CallFailed for every other error."""
        began = self._world.now()
        try:
            while isinstance(error, BufferError):
                if self._world.now() - began >= self._settings.transaction_timeout_ms / 1000:
                    raise self._fail("produce", Action.ABORT, error) from error
                self._pulse.beat("calling", "produce")
                self.poll(0.05)
                try:
                    self.client.producer.produce(*record)
                    return
                except (BufferError, KafkaException) as again:
                    error = again
        finally:
            self.waited_s += self._world.now() - began
        assert isinstance(error, KafkaException)
        if classify("produce", error.args[0]) is Action.ABORT:
            self._raise_delivery_error(_REPORT_DELAY_S)  # raises the delivery error, if a record caused the failure
        raise self._classify_failure("produce", error, topic=record[0], size=size_of(record[2], record[1])) from error

    def _raise_delivery_error(self, wait_s: float = 0.0) -> None:
        """Raise CallFailed for the first undelivered record if its report is there or arrives within `wait_s`."""
        client, deadline = self.client, self._world.now() + wait_s
        while client.delivery_error is None and self._world.now() < deadline:
            self.poll(0.02)
        if client.delivery_error is not None:
            refusal, where, size = client.delivery_error
            topic = where.rsplit("[", 1)[0]
            raise self._classify_failure("delivery", KafkaException(refusal), topic=topic, where=where, size=size)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Run callbacks. A fatal error that poll raises is only logged: the next transactional call raises it again,
        with flags."""
        self._serve(self.client, timeout_s)

    def _serve(self, client: Client, timeout_s: float = 0.0) -> None:
        try:
            client.serve(timeout_s)
        except (KafkaException, SystemError) as error:
            log.debug("poll raised", error=describe_error(error), **self.who())

    def flush(self, meanwhile: Callable[[], bool] = lambda: False) -> None:
        """Wait until every record was delivered or failed. Raises CallFailed for the first failed one.

        `meanwhile` is called repeatedly while it returns True, which means that it did useful work.
        """
        deadline = self._world.now() + self._settings.transaction_timeout_ms / 1000 + HANG_MARGIN_S
        wait_s = _FLUSH_LOOK_S  # the first call only makes the client's threads send the rest of the queue
        while self._flush_with_timeout(wait_s):
            if self._world.now() >= deadline:
                raise self._fail("flush", Action.ABORT, TimeoutError("records are still in the queue"))
            wait_s = _FLUSH_LOOK_S if meanwhile() else _FLUSH_WAIT_S
        self.client.raise_callback_error()
        self._raise_delivery_error()
        self._wait_for_first_statistics()

    def _flush_with_timeout(self, wait_s: float) -> int:
        """Flush for a while and return the number of records still in the queue."""
        self._pulse.beat("calling", "flush")
        try:
            left: int = call_client(self.client.producer.flush, wait_s)
        except KafkaException as error:
            raise self._classify_failure("flush", error) from error
        except SystemError as error:
            # A bare SystemError hides a fatal error, which the following abort raises.
            raise self._fail("flush", Action.ABORT, error) from error
        return left

    def send_offsets(self, offsets: list[TopicPartition], group_metadata: Any) -> None:
        self._machine.fire(Event.SEND_OFFSETS)
        send = self.client.producer.send_offsets_to_transaction
        deadline = self._began_at + self._settings.transaction_timeout_ms / 1000
        if not self._produced_count:
            self._world.sleep(max(0.0, self._committed_at + _MARKERS_S - self._world.now()))
        try:
            self._call_timed("send_offsets", send, offsets, group_metadata, deadline=deadline)
        except CallFailed as failure:
            # The error names no topic. The missing right is READ on the topics whose offsets are sent.
            right = explain_denied(failure.error, topic=", ".join(sorted({tp.topic for tp in offsets})))
            if not right:
                raise
            raise CallFailed(failure.call, failure.action, failure.error, right) from failure
        self._offsets_sent = True

    def commit(self) -> None:
        """Commit the transaction. Repeat the call while the broker does not answer, because an abort would conflict
        with it."""
        self._machine.fire(Event.COMMIT)
        self._expect_end_txn()
        self._call_timed("commit", self.client.producer.commit_transaction)
        self._committed_at = self._world.now()
        self._machine.fire(Event.ENDED)

    def abort(self, deadline: float | None = None) -> None:
        """Abort the transaction. If anything was sent in it, this producer must be replaced afterwards: the client may
        reuse the sequence number of a purged record, and the broker would drop the next record as a duplicate.

        Waits for an unreachable cluster until `deadline` (World.now()), or forever without one.
        """
        self._machine.fire(Event.ABORT)
        client = self.client
        self._expect_end_txn()
        if self.has_sent or self._offsets_sent:
            self._replacement_reason, self.epoch_may_have_advanced = "abort", True
        self._call(client, "abort", client.producer.abort_transaction, deadline=deadline)
        self.epoch_may_have_advanced = False
        self._machine.fire(Event.ENDED)

    def _expect_end_txn(self) -> None:
        # librdkafka sends no EndTxn for an empty transaction.
        if self._produced_count or self._offsets_sent:
            self.client.evidence.expect_end_txn()

    # ---- knowledge of the transaction ---------------------------------------------------------------------------

    @property
    def has_sent(self) -> bool:
        """Return whether records were, or may have been, sent in the transaction."""
        return self._produced_count > 0 or self._is_feeding

    @property
    def delivered(self) -> float:
        """Return the share of the transaction's records that the brokers acknowledged so far; 1 without records."""
        confirmed = self._produced_count - len(self.client.producer) - self.client.delivery_errors
        return confirmed / self._produced_count if self._produced_count else 1.0

    def poll_identity(self, timeout_s: float = _IDENTITY_S, fresh: bool = False) -> Identity | None:
        """Return producer id and epoch from the statistics; poll until they arrive. Return None if none arrive.

        `fresh`: only from statistics emitted after this call. An abort of records that timed out makes librdkafka take
        the next epoch by itself (KIP-360), and the epoch known before would look like a predecessor's.
        """
        client = self.client
        deadline = self._world.now() + (_FRESH_S if fresh else timeout_s)
        self.poll(0)  # drop statistics emitted before this call
        before = client.statistics_seen
        while self._world.now() < deadline:
            if client.identity is not None and not (fresh and client.statistics_seen == before):
                break
            self.poll(0.05)
        return client.identity

    def describe_fenced(self) -> Situation | None:
        """Return what this producer knows after a fenced call, for `ownership.settle`; poll for its present epoch.
        Return None if the epoch is unknown."""
        age_ms = (self._world.boot_clock() - self._open_since) * 1000  # read before the wait for statistics
        identity = self.poll_identity(fresh=True)
        if identity is None:
            return None
        timeout_ms = self._settings.transaction_timeout_ms
        return Situation(identity, self._progress(), age_ms, timeout_ms, self.client.inits)

    def _progress(self) -> Progress:
        """Return the progress of the transaction's requests; NOTHING before a transaction and after its end."""
        if self._machine.state is State.READY or not (self._produced_count or self._offsets_sent):
            return Progress.NOTHING
        return Progress.ACKNOWLEDGED if self._offsets_sent or self.delivered > 0 else Progress.SENT

    # ---- calls ----------------------------------------------------------------------------------------------------

    def _call_timed(self, name: Call, function: Callable[..., Any], *args: Any, deadline: float | None = None) -> None:
        client = self.client
        client.call_timed(name, lambda: self._call(client, name, function, *args, deadline=deadline))

    def _call(
        self, client: Client, name: Call, function: Callable[..., Any], *args: Any, deadline: float | None
    ) -> None:
        """Make one transactional call, and repeat it while its error is retriable and the deadline has not passed."""
        waits = log.Reminder(self._world.now)
        while True:
            self._pulse.beat("calling", name)
            timeout_s = self._call_timeout_s
            if deadline is not None:
                timeout_s = min(timeout_s, max(0.1, deadline - self._world.now()))
            try:
                client.watchdog.call(function, *args, timeout_s, timeout_s=timeout_s + HANG_MARGIN_S)
                return
            except CallHung as hung:
                raise self._fail(name, Action.REBUILD, hung) from hung
            except KafkaException as error:
                if classify(name, error.args[0]) is not Action.RETRY:
                    raise self._classify_failure(name, error) from error
                self._replacement_reason = f"failure: {name} had to be called again"
                self._serve(client)  # callbacks must not pile up: the cluster may be unreachable for days
                if deadline is not None and self._world.now() >= deadline:
                    late = Action.RETRY if name == "init" else Action.REBUILD
                    raise self._fail(name, late, error) from error
                if waits.tick():
                    log.warning("waiting for the cluster", call=name, error=describe_error(error), **self.who())

    def _classify_failure(
        self, call: Call, error: KafkaException, topic: str = "", where: str = "", size: int = 0
    ) -> CallFailed:
        """Classify an error of the client; see `_fail`."""
        return self._fail(call, classify(call, error.args[0], topic in self._changelogs), error, where, topic, size)

    def _fail(
        self, call: Call, action: Action, error: BaseException, where: str = "", topic: str = "", size: int = 0
    ) -> CallFailed:
        """Move the state machine as the action requires; return the exception to raise."""
        if action in (Action.SETTLE, Action.REJOIN, Action.FENCED):
            self._machine.fire(Event.FENCE)
        elif action in (Action.ABORT, Action.POISON) and self._machine.state in (
            State.IN_TRANSACTION,
            State.COMMITTING,
            State.ABORTABLE_ERROR,
        ):
            self._machine.fire(Event.FAIL_ABORTABLE)
        elif action is Action.ABORT or action is Action.REBUILD:
            self._machine.fire(Event.FAIL)
            action = Action.REBUILD
        self._replacement_reason = self._replacement_reason or f"failure: {call} raised"
        failure = CallFailed(call, action, error, self._explain(call, action, error, topic, size))
        if where:
            failure.args = (f"{failure} at {where}",)
        return failure

    def _explain(self, call: Call, action: Action, error: BaseException, topic: str, size: int) -> str:
        """Return the likely cause of an error in a sentence, or "" if no cause is known."""
        group: str = self._settings.get("group.id", "")
        if right := explain_denied(error, group=group, transactional_id=self.transactional_id, topic=topic):
            return right
        if topic in self._changelogs:
            refuses = ": its settings, or the brokers', refuse a record of the state"
            return f"the changelog {topic} cannot be written{refuses if action is Action.MISCONFIGURED else ''}"
        limit = self._settings.get("message.max.bytes")
        return (
            explain_missing_topic(error, topic)
            or explain_refused_timestamp(error)
            or explain_too_large(error, call, topic, size, limit)
        )
