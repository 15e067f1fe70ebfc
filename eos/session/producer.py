"""The transactional producer: one transactional.id, one state machine, one life per clean run of transactions.

Owns the confluent-kafka Producer, the legal order of its calls (eos/session/states.py), their deadlines
(eos/kafka/client/watchdog.py) and the signs that call for a replacement (eos/session/evidence.py). A failed call raises
CallFailed with what to do about it; this module never decides commit or abort, and never replaces itself inside a
transaction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
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
from eos.records import Feed, FeedResult, Record, Send
from eos.session.client import ABANDONED_POLL_S, Client, retire, size_of
from eos.session.observe import Pulse
from eos.session.states import OPEN, Event, Machine, State

OLD_TRANSACTIONS = 2  # transaction.version below it: a replaced producer needs another transactional.id
HANG_MARGIN_S = 5.0
_WAIT_LOG_INTERVAL_S = 10.0
_FLUSH_LOOK_S, _FLUSH_WAIT_S = 0.001, 0.5
_IDENTITY_S = 2.0  # how long the first statistics are waited for, ten a second
_FRESH_S = 10.0  # and the next ones, on a machine that does other things: an old epoch would look like a predecessor's
_OVERDUE_S = 2.0  # behind the time for statistics: on a machine that does other things too, a replacement takes longer
_STATISTICS_POLL_S = 0.02
# Before AddOffsetsToTxn is a transaction's first request: met by the one before, whose markers are being written, it is
# sent again after retry.backoff.ms. Of 200 transactions back to back on a busy machine 32 met them, with this pause 0
# and 3.
_MARKERS_S = 0.010
_REPORT_DELAY_S = 0.5  # a transaction fails a moment before the report of the record that made it fail


class TransactionalProducer:
    """Drives one transactional.id: start, then begin/send/flush/send_offsets/commit or abort, replace, close. It is the
    Sink of what is fed to it (eos/records.py).

    `changelogs`: topics that no function writes; an error about one of them is not an input record's.
    With `reports` every record's delivery is reported (to `send`'s callback).
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
        self._ids = [transactional_id]  # the one that is used comes first; the other one is for replacements
        self._machine = Machine()
        self._call_timeout_s: float = settings["eos.call.timeout.ms"] / 1000
        self._client: Client | None = None
        self._half_way: Client | None = None  # its init was interrupted
        self._spent: str | None = None
        self._produced = 0
        self.waited_s = 0.0
        """For how long sends have waited for room in the client's queue, since this producer was made."""
        self._began_at = 0.0  # World.now(), for deadlines of ours
        self._committed_at = 0.0  # World.now()
        self._open_since = 0.0  # World.boot_clock(), for the broker's timeout
        self._offsets_sent = False
        self.may_have_bumped = False
        """An abort or an init did not come to its end: a client of ours may have taken the next epoch in it (an abort:
        KIP-360), and nobody knows."""
        self.replacements: dict[str, int] = {}
        """How often the producer was replaced, by reason class: "abort", "retry", "failure"."""

    @property
    def state(self) -> State:
        return self._machine.state

    @property
    def transactional_id(self) -> str:
        return self._ids[0]

    @property
    def may_abort(self) -> bool:
        """A transaction is open and nothing that may still be answered is on its way."""
        return self._machine.state in (State.IN_TRANSACTION, State.ABORTABLE_ERROR) and not self.client.watchdog.hung

    @property
    def client(self) -> Client:
        assert self._client is not None, "start() comes first"
        return self._client

    def who(self) -> dict[str, Any]:
        """Fields for a log line about this producer."""
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
        """Creates the client and initialises the transactional.id, which ends what a predecessor left open.

        `deadline` is a World.now(); without one an unreachable cluster is waited for. `before_init` is called with
        each transactional.id immediately before its init. Raises Unavailable, ConfigurationError, NotAuthorised.

        With `alternate`, a replacement goes on under a second transactional.id (and the start fences both). Needed for
        brokers before 4.0: there a late TxnOffsetCommit of the fenced epoch deletes the new epoch's pending offsets
        (measured on 3.9.2, 6 of 6), but not those of another producer id.
        """
        self._ids = [self._id, alternate_transactional_id(self._id)] if alternate else [self._id]
        self._machine = Machine()
        for transactional_id in reversed(self._ids):
            client = self._initialised(transactional_id, deadline, before_init)
            if transactional_id != self._ids[0]:
                retire(client)
        self._client = client
        self._machine.fire(Event.INITIALISED)
        self._spent = None
        self._look_around()

    def fence(self, transactional_id: str, deadline: float | None, before_init: Callable[[str], None]) -> None:
        """Initialise another transactional.id once, which fences its owner. Arguments and errors are `start`'s."""
        retire(self._initialised(transactional_id, deadline, before_init))

    def _initialised(
        self,
        transactional_id: str,
        deadline: float | None,
        before_init: Callable[[str], None] = lambda transactional_id: None,
    ) -> Client:
        client = self._half_way
        if client is None or client.transactional_id != transactional_id:
            self._end_half_way()
            client = Client(self._settings, transactional_id, self._reports, self._world)
            # Behind the client: what its settings are refused for must not have fenced a healthy owner.
            before_init(transactional_id)
        try:
            self._init(client, deadline)
        except CallFailed as failure:
            retire(client)
            if failure.action in (Action.RETRY, Action.REBUILD, Action.ABORT, Action.SETTLE):
                servers = self._settings.bootstrap_servers
                raise Unavailable(
                    f"{transactional_id} could not be initialised at {servers}: {failure} (a "
                    "transaction.state.log.replication.factor above the number of brokers also shows like this)",
                    remedy=no_broker(servers),
                ) from failure
            # Of its two ids this one, which `_fail` cannot know.
            right = explain_denied(failure.error, transactional_id=transactional_id)
            raise stop_error(CallFailed("init", failure.action, failure.error, right)) from failure
        return client

    def _init(self, client: Client, deadline: float | None) -> None:
        """An init whose wait a signal ended goes on in its client. Beside it another client's could get an epoch that
        this one then takes back, so it is this client's again, and never two at once."""
        resumed, self._half_way = client is self._half_way, client
        if resumed:
            client.watchdog.close()
            while not client.watchdog.join(ABANDONED_POLL_S):
                self._pulse.beat("calling", "init")
            client.watchdog = client.new_watchdog()
        try:
            self._call(client, "init", client.producer.init_transactions, deadline=deadline)
        except CallFailed as failure:
            if not (resumed and failure.action is Action.BUG):  # _STATE: the call before had come to its end
                self._half_way = None
                raise
        self._half_way = None

    def _end_half_way(self) -> None:
        if (client := self._half_way) is not None:
            with contextlib.suppress(CallFailed):
                self._init(client, self._world.now() + self._call_timeout_s)
            retire(client)

    def must_replace(self) -> str | None:
        """Why this producer may not begin another transaction, or None (the replacement rule, eos/session/evidence.py).

        After a slow call the next statistics are waited for: they tell whether the broker was only far or busy.
        """
        if self._machine.state is State.UNINITIALISED:
            return self._spent or "failure: an init did not come to its end"
        if self._machine.state in (State.FATAL, State.FENCED):
            return self._spent  # given up, or fenced by its own timeout: who was fenced by a newer one never asks
        if self._spent is None:
            evidence = self.client.evidence
            self._await_statistics(lambda: evidence.undecided)
            evidence.no_statistics()
            if evidence.reason is not None:
                return f"retry: {evidence.reason}"
        return self._spent

    def _await_statistics(self, waiting: Callable[[], bool]) -> None:
        """Polls while `waiting` answers True, until the next statistics are overdue."""
        began = self._world.now()
        while waiting() and self._world.now() - began < self.client.statistics_interval_s + _OVERDUE_S:
            self.poll(_STATISTICS_POLL_S)

    def replace(self, reason: str) -> None:
        """A new client under the same transactional.id and a new epoch, so that the old one's remains are refused.

        Waits for the cluster as long as it takes. The old client is dropped after its successor's init, never closed:
        close() would send an abort of its own.
        """
        if self._machine.state in OPEN or self._machine.state is State.UNINITIALISED:
            self._machine.fire(Event.FAIL)
        old = self._client
        self._machine.fire(Event.REPLACE)
        self.may_have_bumped = True  # until the init has come to its end
        kind = reason.split(":")[0]
        self.replacements[kind] = self.replacements.get(kind, 0) + 1
        if len(self._ids) > 1:
            retire(self._initialised(self._ids[0], None))
            self._ids.reverse()
        self._client = self._initialised(self._ids[0], None)
        self._machine.fire(Event.INITIALISED)
        self._spent, self.may_have_bumped = None, False
        if old is not None:
            retire(old)
        self._look_around()
        log.info("producer replaced", reason=reason, **self.who())

    def _look_around(self) -> None:
        """The first statistics, so that a slow call can be judged: with a slow coordinator each small transaction would
        lead to the next replacement. They come so long behind the client's making, and most of it was the init's."""
        self._await_statistics(lambda: self.client.evidence.blind)

    def give_up(self, reason: str) -> None:
        """Nothing more of an open transaction may be sent; the replacement before the next one aborts it."""
        if self._machine.state in OPEN:
            self._machine.fire(Event.FAIL)
            self._spent = f"failure: {reason}"

    def abandon(self) -> None:
        """Another thread is inside a call that does not return: neither it nor the client is touched again."""
        self.client.watchdog.hung = True

    def close(self) -> None:
        """Ends the client without touching the cluster; an open transaction is left to its timeout or a successor."""
        self._end_half_way()  # a new session's init could come before it
        if self._client is not None:
            retire(self._client)
            self._client = None

    # ---- one transaction ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._machine.fire(Event.BEGIN)
        client = self.client
        try:
            client.producer.begin_transaction()
        except KafkaException as error:
            raise self._failed("begin", error) from error
        client.evidence.begun = True
        self._produced = client.delivery_errors = 0
        client.delivery_error = None
        self._offsets_sent = False
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
        """Queues one record. A full queue is waited for; a record that did not get in raises: none is lost silently."""
        self._machine.fire(Event.SEND)
        client, on_delivery = self.client, None
        if report is not None:

            def on_delivery(error: KafkaError | None, message: Message) -> None:
                client.delivered(error, message)
                report(error, message)

        record = (topic, value, key, partition, on_delivery, None, timestamp_ms, headers or None)
        try:
            client.producer.produce(*record)
        except (BufferError, KafkaException) as error:
            self._send_when_there_is_room(record, error)
        self._produced += 1

    def feed(self, feed: Feed, records: list[Record]) -> FeedResult:
        """Queues what `feed` makes of the records: the hot path, one state check for all. Raises nothing of its own: a
        send that failed is the CallFailed in `Fed.error`."""
        self._machine.fire(Event.SEND)
        fed = feed(records, self)
        self._produced += fed.sent
        # Delivery reports of successes are not called back, but they wait to be polled; left to the flush, they would
        # all be served while there is nothing to send.
        self.poll(0)
        return fed

    @property
    def produce(self) -> Callable[..., object]:
        produce: Callable[..., object] = self.client.producer.produce
        return produce

    def on_produce_error(self, error: Exception, send: Send) -> None:
        """produce() raised inside a feed: the record is sent after all, or CallFailed says why not."""
        topic, value, key, partition, timestamp_ms, headers = send
        if not isinstance(error, (BufferError, KafkaException)):
            raise self._fail("produce", Action.BUG, error) from error  # the App's rules let nothing else pass
        self._send_when_there_is_room((topic, value, key, partition, None, None, timestamp_ms, headers), error)

    def _send_when_there_is_room(self, record: tuple[Any, ...], error: Exception) -> None:
        """A full queue is waited for; everything else is a CallFailed."""
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
            self._raise_delivery_error(_REPORT_DELAY_S)  # what the transaction failed of, if it was a record
        raise self._failed("produce", error, topic=record[0], size=size_of(record[2], record[1])) from error

    def _raise_delivery_error(self, wait_s: float = 0.0) -> None:
        """Raises for the first record that could not be delivered, if its report is there or comes within `wait_s`."""
        client, deadline = self.client, self._world.now() + wait_s
        while client.delivery_error is None and self._world.now() < deadline:
            self.poll(0.02)
        if client.delivery_error is not None:
            refusal, where, size = client.delivery_error
            topic = where.rsplit("[", 1)[0]
            raise self._failed("delivery", KafkaException(refusal), topic=topic, where=where, size=size)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Serves callbacks. A fatal error that poll raises shows again, with flags, at the next transactional call."""
        self._serve(self.client, timeout_s)

    def _serve(self, client: Client, timeout_s: float = 0.0) -> None:
        try:
            client.serve(timeout_s)
        except (KafkaException, SystemError) as error:
            log.debug("poll raised", error=describe_error(error), **self.who())

    def flush(self, meanwhile: Callable[[], bool] = lambda: False) -> None:
        """Waits until every record was delivered or failed; raises for the first failed one.

        `meanwhile` is called again and again while it answers True: it had something better to do than to wait.
        """
        deadline = self._world.now() + self._settings.transaction_timeout_ms / 1000 + HANG_MARGIN_S
        wait_s = _FLUSH_LOOK_S  # the first sets the client's threads on what is left in the queue
        while self._flush_for(wait_s):
            if self._world.now() >= deadline:
                raise self._fail("flush", Action.ABORT, TimeoutError("records are still in the queue"))
            wait_s = _FLUSH_LOOK_S if meanwhile() else _FLUSH_WAIT_S
        client = self.client
        if client.callback_error is not None:
            latched, client.callback_error = client.callback_error, None
            raise latched  # the user's own callback failed: that is theirs to know
        self._raise_delivery_error()

    def _flush_for(self, wait_s: float) -> int:
        """How many records are still in the queue."""
        self._pulse.beat("calling", "flush")
        try:
            left: int = call_client(self.client.producer.flush, wait_s)
        except KafkaException as error:
            raise self._failed("flush", error) from error
        except SystemError as error:
            # A bare SystemError hides a fatal error: the abort that follows tells which.
            raise self._fail("flush", Action.ABORT, error) from error
        return left

    def send_offsets(self, offsets: list[TopicPartition], group_metadata: Any) -> None:
        self._machine.fire(Event.SEND_OFFSETS)
        send = self.client.producer.send_offsets_to_transaction
        deadline = self._began_at + self._settings.transaction_timeout_ms / 1000
        if not self._produced:
            self._world.sleep(max(0.0, self._committed_at + _MARKERS_S - self._world.now()))
        try:
            self._timed("send_offsets", send, offsets, group_metadata, deadline=deadline)
        except CallFailed as failure:
            # Their topics are the input's, which one must be allowed to read.
            right = explain_denied(failure.error, topic=", ".join(sorted({tp.topic for tp in offsets})))
            if not right:
                raise
            raise CallFailed(failure.call, failure.action, failure.error, right) from failure
        self._offsets_sent = True

    def commit(self) -> None:
        """Commits; a broker that does not answer is waited for (the same call again: abort would be a conflict)."""
        self._machine.fire(Event.COMMIT)
        self._expect_end_txn()
        self._timed("commit", self.client.producer.commit_transaction)
        self._committed_at = self._world.now()
        self._machine.fire(Event.ENDED)

    def abort(self, deadline: float | None = None) -> None:
        """Aborts; afterwards this producer is spent: the client may use a purged record's sequence number
        again, and the broker then takes the next record for a duplicate of it.

        An unreachable cluster is waited for until `deadline` (World.now()), for ever without one.
        """
        self._machine.fire(Event.ABORT)
        client = self.client
        self._expect_end_txn()
        self._spent, self.may_have_bumped = "abort", True
        self._call(client, "abort", client.producer.abort_transaction, deadline=deadline)
        self.may_have_bumped = False
        self._machine.fire(Event.ENDED)

    def _expect_end_txn(self) -> None:
        # librdkafka sends none for a transaction that nothing was added to.
        if self._produced or self._offsets_sent:
            self.client.evidence.ended += 1

    # ---- what is known of the transaction ------------------------------------------------------------------------

    def reach(self) -> Progress:
        """How far something of this transaction came; NOTHING as well when it is over."""
        if self._machine.state is State.READY or not (self._produced or self._offsets_sent):
            return Progress.NOTHING
        self.poll(0)
        return Progress.ACKNOWLEDGED if self._offsets_sent or self.delivered > 0 else Progress.SENT

    @property
    def delivered(self) -> float:
        """The share of the transaction's records that the brokers have, as far as is known; 1 where there are none."""
        confirmed = self._produced - len(self.client.producer) - self.client.delivery_errors
        return confirmed / self._produced if self._produced else 1.0

    def identity(self, timeout_s: float = _IDENTITY_S, fresh: bool = False) -> Identity | None:
        """Producer id and epoch of our init, from the statistics; None if they never came.

        `fresh`: from statistics that were made after this call. An abort of records that timed out makes librdkafka
        take the next epoch by itself (KIP-360), and what is known from before would look like a predecessor's.
        """
        client = self.client
        deadline = self._world.now() + (_FRESH_S if fresh else timeout_s)
        self.poll(0)  # all that wait to be served were made before
        before = client.statistics_seen
        while self._world.now() < deadline:
            if client.identity is not None and not (fresh and client.statistics_seen == before):
                break
            self.poll(0.05)
        return client.identity

    def situation(self) -> Situation | None:
        """What is known here after a call was fenced, for `ownership.settle`; None if our own epoch is not known."""
        age_ms = (self._world.boot_clock() - self._open_since) * 1000  # before the statistics are waited for
        identity = self.identity(fresh=True)
        if identity is None:
            return None
        timeout_ms = self._settings.transaction_timeout_ms
        return Situation(identity, self.reach(), age_ms, timeout_ms, self.client.inits)

    # ---- calls ----------------------------------------------------------------------------------------------------

    def _timed(self, name: Call, function: Callable[..., Any], *args: Any, deadline: float | None = None) -> None:
        self.client.timed(name, lambda: self._call(self.client, name, function, *args, deadline=deadline))

    def _call(
        self, client: Client, name: Call, function: Callable[..., Any], *args: Any, deadline: float | None
    ) -> None:
        """One transactional call, again while it is retriable and the deadline has not passed."""
        told = self._world.now()
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
                action = classify(name, error.args[0])
                if action is not Action.RETRY:
                    raise self._failed(name, error) from error
                self._spent = f"failure: {name} had to be called again"
                self._serve(client)  # a cluster may be away for days
                now = self._world.now()
                if deadline is not None and now >= deadline:
                    late = Action.RETRY if name == "init" else Action.REBUILD
                    raise self._fail(name, late, error) from error
                if now - told >= _WAIT_LOG_INTERVAL_S:
                    told = now
                    log.warning("waiting for the cluster", call=name, error=describe_error(error), **self.who())

    def _failed(self, call: Call, error: KafkaException, topic: str = "", where: str = "", size: int = 0) -> CallFailed:
        return self._fail(call, classify(call, error.args[0], topic in self._changelogs), error, where, topic, size)

    def _fail(
        self, call: Call, action: Action, error: BaseException, where: str = "", topic: str = "", size: int = 0
    ) -> CallFailed:
        """Moves the machine to where the action leaves it; returns the exception to raise."""
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
        self._spent = self._spent or f"failure: {call} raised"
        group: str = self._settings.get("group.id", "")
        right = explain_denied(error, group=group, transactional_id=self.transactional_id, topic=topic)
        limit = self._settings.get("message.max.bytes")
        known = (
            explain_missing_topic(error, topic)
            or explain_refused_timestamp(error)
            or explain_too_large(error, call, topic, size, limit)
        )
        if topic in self._changelogs:
            refuses = ": its settings, or the brokers', refuse a record of the state"
            known = f"the changelog {topic} cannot be written{refuses if action is Action.MISCONFIGURED else ''}"
        failure = CallFailed(call, action, error, right or known)
        if where:
            failure.args = (f"{failure} at {where}",)
        return failure
