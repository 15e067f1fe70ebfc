"""Sweeps faults: runs the user's App on a real worker and real Kafka, once per (step of a transaction, fault).

Owns the cases (which fault at which step, as a plan of the shim) and one run of each: create the topics again, load the
input, run a worker process behind a shim until all input is done, then call `eos.testing.verify`. It must never rely
on the worker's own report. Only the contents of Kafka count, and the fault must really have happened.

    # test_flights.py; eos_kafka is the plugin's cluster
    @pytest.fixture(scope="module")
    def sweeper(eos_kafka): return Sweeper("flights.py:app", eos_kafka.bootstrap_servers, {"flights": values})

    @pytest.mark.parametrize("case", every_case(), ids=str)
    def test_fault_loses_and_duplicates_nothing(case, sweeper): sweeper.run(case).raise_if_wrong()
    # pytest's summary has the table of all cases

    # or all of it, with a table at the end
    from eos.testing import sweep
    outcomes = sweep("flights.py:app", bootstrap_servers, {"flights": values})
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from rich.console import Console
from rich.table import Column, Table

from eos.errors import ConfigurationError, EosError, Unavailable
from eos.shim.faults import Event, Phase, Plan, Rule
from eos.testing.shim import ShimThread
from eos.testing.verify import Verification, verify
from eos.worker.loading import load_app

# The requests of KIP-98's data flow, and the occurrence of each that fails (one in mid-run).
STEPS: Mapping[str, int] = {
    "FindCoordinator": 1,
    "InitProducerId": 1,
    "AddPartitionsToTxn": 2,
    "Produce": 2,
    "AddOffsetsToTxn": 2,
    "TxnOffsetCommit": 2,
    "EndTxn": 2,
}
every_txn_step: tuple[str, ...] = tuple(STEPS)

_COORDINATOR = ("COORDINATOR_LOAD_IN_PROGRESS", "COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR")
# Another instance has the id (PRODUCER_FENCED in newer versions of a request), or the id's state is gone.
_FENCED = ("INVALID_PRODUCER_EPOCH", "PRODUCER_FENCED")
_ID_EXPIRED = ("INVALID_PRODUCER_ID_MAPPING", "UNKNOWN_PRODUCER_ID")
# The errors that brokers return at each step (KIP-98, KIP-890, handlers of Kafka 4.3 and its TransactionManager). Each
# occurs once, and the next request succeeds. Permanent errors (permissions, sizes, formats), which must stop a worker,
# are left out. So are errors that clients without KIP-890 part 2 do not get (for them TRANSACTION_ABORTABLE is
# INVALID_TXN_STATE, and STALE_MEMBER_EPOCH is ILLEGAL_GENERATION).
ERRORS: Mapping[str, tuple[str, ...]] = {
    "FindCoordinator": ("COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS"),
    "InitProducerId": (*_COORDINATOR, "CONCURRENT_TRANSACTIONS", "PRODUCER_FENCED"),
    "AddPartitionsToTxn": (
        *_COORDINATOR,
        "CONCURRENT_TRANSACTIONS",
        "UNKNOWN_TOPIC_OR_PARTITION",
        "INVALID_TXN_STATE",
        *_ID_EXPIRED,
        *_FENCED,
    ),
    "Produce": (
        "LEADER_NOT_AVAILABLE",
        "NOT_LEADER_OR_FOLLOWER",
        "UNKNOWN_TOPIC_OR_PARTITION",
        "REQUEST_TIMED_OUT",
        "NOT_ENOUGH_REPLICAS",
        "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
        "KAFKA_STORAGE_ERROR",
        "CORRUPT_MESSAGE",
        "OUT_OF_ORDER_SEQUENCE_NUMBER",
        "DUPLICATE_SEQUENCE_NUMBER",
        "INVALID_TXN_STATE",
        *_ID_EXPIRED,
        *_FENCED,
    ),
    "AddOffsetsToTxn": (*_COORDINATOR, "CONCURRENT_TRANSACTIONS", "INVALID_TXN_STATE", *_ID_EXPIRED, *_FENCED),
    "TxnOffsetCommit": (
        *_COORDINATOR,
        "UNKNOWN_TOPIC_OR_PARTITION",
        "REQUEST_TIMED_OUT",
        "ILLEGAL_GENERATION",
        "UNKNOWN_MEMBER_ID",
        "FENCED_INSTANCE_ID",
        "INVALID_TXN_STATE",
        "INVALID_PRODUCER_ID_MAPPING",
        *_FENCED,
    ),
    "EndTxn": (*_COORDINATOR, "CONCURRENT_TRANSACTIONS", "INVALID_TXN_STATE", *_ID_EXPIRED, *_FENCED),
}
# Errors that brokers return for a request that is in the log already.
_AFTER_APPLY = ("REQUEST_TIMED_OUT", "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "DUPLICATE_SEQUENCE_NUMBER")
# For each request, the step during which a delayed copy of it arrives. A delayed FindCoordinator would change nothing.
_LATE: Mapping[str, Event] = {
    "InitProducerId": Event("Produce"),
    "AddPartitionsToTxn": Event("EndTxn"),
    "Produce": Event("AddPartitionsToTxn", when="arrives"),
    "AddOffsetsToTxn": Event("Produce"),
    "TxnOffsetCommit": Event("Produce"),
    "EndTxn": Event("Produce"),
}
ACTIONS: tuple[str, ...] = (
    "reset before",
    "reset after",
    "blackhole",
    "late copy",
    "late copy, then abort",
    "lost acknowledgement, then abort",
    "duplicate",
    "errors",
)


@dataclass(frozen=True)
class Case:
    """Describes one run of a sweep: `action` at `step`; `error` for the action "errors".

    `protocol`: classic or consumer."""

    step: str
    action: str
    error: str | None = None
    protocol: str = "classic"

    def __str__(self) -> str:
        return f"{self.step}: {self.error or self.action} ({self.protocol})"

    def rules(self, transactional_id: str, side: str = "broker") -> list[Rule]:
        """Return the rules for this case; they count the requests of the producer with `transactional_id` only.

        Later requests may come from another producer: before 4.0 a replaced producer continues as `…-alternate`.
        """
        occurrence = STEPS[self.step]
        # Querying a transactional.id's state also sends FindCoordinator, so the rule applies four times. That also
        # covers the producer's own lookups.
        times = 4 if self.step == "FindCoordinator" else 1
        id_pattern = f"{transactional_id}*"
        simple = {
            "reset before": Rule(self.step, "reset", Phase.BEFORE_APPLY, occurrence, times),
            "reset after": Rule(self.step, "reset", Phase.AFTER_APPLY, occurrence, times),
            "blackhole": Rule(self.step, "blackhole", Phase.BEFORE_APPLY, occurrence, times),
            "duplicate": Rule(self.step, "duplicate", Phase.AFTER_APPLY, occurrence, times),
        }
        if self.step in _LATE:
            late = replace(_LATE[self.step], transactional_id=id_pattern)
            simple["late copy"] = Rule(self.step, "reset", Phase.LATE, occurrence, until=late)
        if self.error is not None:
            phase = Phase.AFTER_APPLY if self.error in _AFTER_APPLY else Phase.BEFORE_APPLY
            rules = [Rule(self.step, "error", phase, occurrence, times, error=self.error)]
        elif self.action == "late copy, then abort":
            # H1: the late copy ends the next transaction before all its records are written. The client's abort then
            # covers only the rest of them.
            refusal = "ILLEGAL_GENERATION"
            abort = Rule("TxnOffsetCommit", "error", nth=occurrence + 1, error=refusal, transactional_id=id_pattern)
            rules = [simple["late copy"], abort]
        elif self.action == "lost acknowledgement, then abort":
            # H2b: the batch is appended but not acknowledged, and the transaction ends before the client retries. So
            # the response to the first batch is lost, and an error for a second batch, of another partition, ends the
            # transaction. The second batch must be appended too, because a gap in its sequence numbers would make
            # librdkafka take a new epoch. The client must get the response to the first batch before the other.
            # Otherwise librdkafka would queue the first record for a retry although its transaction has failed. It
            # would wait until this record times out, and then take a new epoch too.
            lost = Rule("Produce", "error", Phase.AFTER_APPLY, error="REQUEST_TIMED_OUT")
            rules = [lost, replace(lost, error="INVALID_REQUEST", beside=1, until=Event(rule=1))]
        else:
            rules = [simple[self.action]]
        return [replace(rule, side=side, transactional_id=rule.transactional_id or transactional_id) for rule in rules]


def every_case(
    over: Iterable[str] = every_txn_step,
    actions: Iterable[str] = ACTIONS,
    protocols: Iterable[str] = ("classic", "consumer"),
) -> list[Case]:
    """Return the cases of these steps, actions and protocols. Raise ConfigurationError for an unknown one."""
    found = []
    over, actions, protocols = list(over), list(actions), list(protocols)
    for wanted, known in ((over, every_txn_step), (actions, ACTIONS), (protocols, ("classic", "consumer"))):
        for name in wanted:
            if name not in known:
                raise ConfigurationError(f"{name}: must be one of {', '.join(known)}")
    for protocol in protocols:
        for step in over:
            for action in actions:
                if action == "errors":
                    found += [Case(step, action, error, protocol) for error in ERRORS[step]]
                elif not (
                    (action == "late copy" and step not in _LATE)
                    or (action == "late copy, then abort" and step != "EndTxn")
                    or (action == "lost acknowledgement, then abort" and step != "Produce")
                ):
                    found.append(Case(step, action, None, protocol))
    return found


@dataclass(frozen=True)
class Outcome:
    """Holds the result of one case. `wrong`: every reason why it does not count as exactly once; empty if there is
    none.

    `way`: whether the shim protects, on which side of it the faults were, and the eos.* settings of the sweeper.
    """

    case: Case
    mode: str
    wrong: tuple[str, ...]
    verification: Verification | None
    starts: int
    seconds: float
    log: Path

    def raise_if_wrong(self) -> None:
        """Raise AssertionError with every reason and the path of the worker's log."""
        assert not self.wrong, f"{self} (worker's log: {self.log})"

    def __str__(self) -> str:
        return f"{self.case}, {self.mode}: {self.verdict}"

    @property
    def verdict(self) -> str:
        return "; ".join(self.wrong) or "exactly once"


# The outcomes of all sweepers in this process, without their verification: for the table in pytest's summary.
_outcomes: list[Outcome] = []

# Exit codes after which a supervisor restarts a worker: temporary, or fenced by an apparently newer instance.
_RESTART_CODES = (75, 79)
_MAX_STARTS = 6
_SETTINGS = {
    "eos.lineage": "true",
    "eos.transaction.interval.ms": "20",
    "transaction.timeout.ms": "5000",
    # The time after which a request without an answer fails; librdkafka's default of a minute would dominate the run.
    "socket.timeout.ms": "2500",
    "linger.ms": "20",
}
# A retry must come later than the abort that overtakes it. A transaction is one batch for each partition: the flush at
# its end, which does not linger, sends all of it.
_SLOW_RETRY = {"retry.backoff.ms": "2000", "retry.backoff.max.ms": "2000", "linger.ms": "1000"}


class Sweeper:
    """Runs cases of one App (`MODULE:APP`, as for `eos run`) against the Kafka at `bootstrap_servers`.

    `records`: per source topic the values to load; the App must handle each of them. Every case deletes and recreates
    the App's topics, so never give it a cluster with other contents. `settings`: more settings of the worker.
    `protect`: whether the shim protects. `side`: the side of a protecting shim on which faults occur. Raises
    Unavailable for a cluster that does not answer.
    """

    def __init__(
        self,
        app: str,
        bootstrap_servers: str,
        records: Mapping[str, Sequence[bytes]],
        *,
        partitions: int = 2,
        settings: Mapping[str, str] | None = None,
        protect: bool = False,
        side: str = "broker",
        timeout_s: float = 90.0,
        directory: Path | None = None,
    ) -> None:
        self._target, self._servers, self._records = app, bootstrap_servers, records
        self._partitions, self._timeout_s = partitions, timeout_s
        self._more, self._protect, self._side = dict(settings or {}), protect, side
        self._app = copy.copy(load_app(app))
        self._app.add_topics(records)
        self._directory = directory or Path(tempfile.mkdtemp(prefix="eos-sweep-"))
        self._admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
        self._number = 0
        wanted = self._app.topics or [pattern.pattern for pattern in self._app.patterns]
        missing = set(wanted) - set(records)
        if missing:
            raise ConfigurationError(
                f"`records` has no values for {', '.join(sorted(missing))}: give values for each source topic"
            )

    @property
    def _mode(self) -> str:
        mode = f"protected, {self._side} side" if self._protect else "unprotected"
        # Show no settings of the client, because they include passwords.
        own = {name: value for name, value in sorted(self._more.items()) if name.startswith("eos.")}
        return ", ".join([mode, *(f"{name}={value}" for name, value in own.items())])

    @property
    def _instance(self) -> str:
        return f"sweep-{self._number}"

    @property
    def _topics(self) -> list[str]:
        return sorted({*self._app.topics, *self._app.destinations})

    def run(self, case: Case) -> Outcome:
        began = time.monotonic()
        self._number += 1
        self._recreate_topics()
        self._load()
        name = f"{self._app.id}-{self._instance}"
        plan = Plan(case.rules(name, self._side if self._protect else "broker"))
        log = self._directory / f"{self._number:03}.log"
        with ShimThread(self._servers, plan, protect=self._protect) as shim:
            codes = self._run_worker(case, shim.bootstrap_servers, log)
        wrong = list(plan.complaints())
        if codes[-1] != 0:
            wrong.append(f"the worker ended with {', '.join(map(str, codes))}")
        found = None
        try:
            found = verify(self._servers, self._app.topics, sorted(self._app.destinations), self._app.id)
            wrong += _find_problems(found, sum(map(len, self._records.values())) if codes[-1] == 0 else None)
        except EosError as error:
            wrong.append(str(error))
        outcome = Outcome(case, self._mode, tuple(wrong), found, len(codes), time.monotonic() - began, log)
        _outcomes.append(replace(outcome, verification=None))
        return outcome

    def _recreate_topics(self) -> None:
        for future in self._admin.delete_topics(self._topics).values():
            with _ignoring(KafkaError.UNKNOWN_TOPIC_OR_PART):
                future.result(self._timeout_s)
        # On a new cluster a query for a group's coordinator would wait until its topic is created.
        groups = self._admin.list_consumer_groups().result(self._timeout_s).valid
        if any(group.group_id == self._app.id for group in groups):
            for future in self._admin.delete_consumer_groups([self._app.id]).values():
                with _ignoring(KafkaError.GROUP_ID_NOT_FOUND):  # the broker may delete an empty group by itself
                    future.result(self._timeout_s)
        deadline = time.monotonic() + self._timeout_s
        left = set(self._topics)
        while left:
            created = self._admin.create_topics([NewTopic(topic, self._partitions, -1) for topic in sorted(left)])
            for topic, future in created.items():
                # A topic under deletion still exists for a moment.
                with _ignoring(KafkaError.TOPIC_ALREADY_EXISTS):
                    future.result(30)
                    left.discard(topic)
            if left and time.monotonic() > deadline:
                raise Unavailable(f"{', '.join(sorted(left))} could not be recreated within {self._timeout_s:g} s")

    def _load(self) -> None:
        producer = Producer({"bootstrap.servers": self._servers, "log_level": 0, "linger.ms": 5})
        failed: list[KafkaError] = []
        for topic, values in self._records.items():
            for number, value in enumerate(values):
                producer.produce(
                    topic,
                    value,
                    key=b"%d" % number,
                    partition=number % self._partitions,
                    on_delivery=lambda error, _: failed.append(error) if error else None,
                )
        if producer.flush(self._timeout_s) or failed:
            raise Unavailable(f"the input could not be loaded: {failed[:1] or 'no answer'}")

    def _run_worker(self, case: Case, servers: str, log: Path) -> list[int]:
        """Return the exit codes of the worker, which is restarted as by a supervisor."""
        values = _SETTINGS | ({"group.protocol": "consumer"} if case.protocol == "consumer" else {})
        if case.action == "lost acknowledgement, then abort":
            values |= _SLOW_RETRY
        if case.protocol == "classic":
            values |= {"session.timeout.ms": "6000", "heartbeat.interval.ms": "500"}
        count = min(map(len, self._records.values()))
        values |= {"eos.transaction.max.records": str(max(1, count // 10))} | self._more
        command = [sys.executable, "-P", "-m", "eos", "run", self._target, "--instance", self._instance]
        command += ["--bootstrap-servers", servers, "--until-end", "--log-level", "debug"]
        command += [part for name, value in values.items() for part in ("-X", f"{name}={value}")]
        codes: list[int] = []
        deadline = time.monotonic() + self._timeout_s
        with log.open("wb") as output:
            while not codes or (codes[-1] in _RESTART_CODES and len(codes) < _MAX_STARTS):
                left = max(1.0, deadline - time.monotonic())
                try:
                    done = subprocess.run(command, stdout=output, stderr=output, timeout=left, env={**os.environ})
                    codes.append(done.returncode)
                except subprocess.TimeoutExpired:
                    codes.append(-9)
        return codes


def _find_problems(found: Verification, loaded: int | None) -> list[str]:
    wrong = [f"{verdict.rule}: {verdict.sentence}" for verdict in found.report.verdicts if not verdict.holds]
    if not found.outputs:
        wrong.append("no outputs were examined")
    if loaded is not None and found.inputs != loaded:
        wrong.append(f"{found.inputs} of {loaded} inputs are committed")
    return wrong


@contextmanager
def _ignoring(code: int) -> Iterator[None]:
    try:
        yield
    except KafkaException as error:
        if error.args[0].code() != code:
            raise


def sweep(
    app: str,
    bootstrap_servers: str,
    records: Mapping[str, Sequence[bytes]],
    *,
    over: Iterable[str] = every_txn_step,
    actions: Iterable[str] = ACTIONS,
    protocols: Iterable[str] = ("classic", "consumer"),
    console: Console | None = None,
    **more: object,
) -> list[Outcome]:
    """Run every case, print a table, and return the outcomes. `more` is passed to Sweeper.

    A caller must check each outcome's `wrong`.
    """
    console = console or Console(stderr=True)
    sweeper = Sweeper(app, bootstrap_servers, records, **more)  # type: ignore[arg-type]
    outcomes = []
    for case in every_case(over, actions, protocols):
        outcomes.append(sweeper.run(case))
        console.print(f"{outcomes[-1].seconds:5.1f} s  {outcomes[-1]}", highlight=False)
    console.print(table(outcomes))
    return outcomes


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return a table: a row per step and fault, a column per way through the shim and group protocol.

    If a case ran repeatedly, the table shows a wrong run.
    """
    columns = list(dict.fromkeys((outcome.mode, outcome.case.protocol) for outcome in outcomes))
    title = f"{len(outcomes)} runs, {sum(not outcome.wrong for outcome in outcomes)} right"
    names = (Column(name, no_wrap=True) for name in ("step", "fault"))
    made = Table(*names, *(f"{mode}, {protocol}" for mode, protocol in columns), title=title)
    rows: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for outcome in outcomes:
        case = outcome.case
        row = rows.setdefault((case.step, case.error or case.action), {})
        if outcome.wrong or (outcome.mode, case.protocol) not in row:
            row[outcome.mode, case.protocol] = outcome.verdict
    for (step, fault), found in rows.items():
        made.add_row(step, fault, *(found.get(column, "") for column in columns))
    return made


def recorded_outcomes() -> list[tuple[Any, ...]]:
    """Return the results of this process's sweepers as plain values, which another process's `summary_lines` reads."""
    return [
        (*astuple(each.case), each.mode, list(each.wrong), each.starts, each.seconds, str(each.log))
        for each in _outcomes
    ]


def summary_lines(found: Iterable[Sequence[Any]], width: int) -> list[str]:
    """Return the lines of the table of results from `recorded_outcomes`."""
    outcomes = [
        Outcome(Case(*case), mode, tuple(wrong), None, starts, seconds, Path(log))
        for *case, mode, wrong, starts, seconds, log in found
    ]
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(table(outcomes))
    return captured.get().splitlines()
