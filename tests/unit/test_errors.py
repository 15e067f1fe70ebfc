"""The action after a failed call: every measured row, and the exit codes of the error tree."""

from __future__ import annotations

import itertools
from typing import NamedTuple, get_args

import pytest
from confluent_kafka import KafkaError, KafkaException

import eos
from eos import errors
from eos.errors import Action, Call, CallFailed, EosError, describe_error, no_broker, stop_error
from eos.kafka.client.failures import TABLE, classify, describe_rebalance

K = KafkaError
CALLS: tuple[Call, ...] = get_args(Call)
EXACT_CODES = {
    name: value
    for name, value in vars(KafkaError).items()
    if isinstance(value, int) and name.lstrip("_").isupper() and not name.startswith("__") and value != 0
}


class Row(NamedTuple):
    case: str
    call: Call
    code: int
    flags: str  # fatal, retriable, txn_requires_abort: librdkafka's flags of an error
    action: Action


# Measured errors, call by call.
MEASURED = [
    Row("zombie sends offsets", "send_offsets", K._FENCED, "1/0/0", Action.SETTLE),
    Row("zombie commits", "commit", K._FENCED, "1/0/0", Action.SETTLE),
    Row("zombie aborts", "abort", K._FENCED, "1/0/0", Action.SETTLE),
    Row("zombie begins", "begin", K._FENCED, "1/0/0", Action.SETTLE),
    Row("zombie flushes", "flush", K._FENCED, "1/0/0", Action.SETTLE),
    Row("zombie produces after it was fenced", "produce", K._FATAL, "0/0/0", Action.SETTLE),
    Row("own timeout: delivery", "delivery", K.INVALID_PRODUCER_EPOCH, "0/0/0", Action.SETTLE),
    Row("own timeout: offsets", "send_offsets", K._FENCED, "1/0/0", Action.SETTLE),
    Row("member closed or session timed out: offsets", "send_offsets", K.UNKNOWN_MEMBER_ID, "0/0/1", Action.ABORT),
    Row("member closed or session timed out: commit", "commit", K.UNKNOWN_MEMBER_ID, "0/0/1", Action.ABORT),
    Row("stale generation, classic: offsets", "send_offsets", K.ILLEGAL_GENERATION, "0/0/1", Action.ABORT),
    Row("stale epoch, consumer protocol: commit", "commit", K.ILLEGAL_GENERATION, "0/0/1", Action.ABORT),
    Row("broker down at commit: the same call again", "commit", K._TIMED_OUT, "0/1/0", Action.RETRY),
    Row("abort left for a commit that hangs", "abort", K._CONFLICT, "0/1/0", Action.REBUILD),
    Row("begin left for a commit that hangs", "begin", K._CONFLICT, "0/1/0", Action.REBUILD),
    Row("produce after a record of its transaction was refused", "produce", K._STATE, "0/0/0", Action.ABORT),
    Row("broker down at init: init again", "init", K._TIMED_OUT, "0/1/0", Action.RETRY),
    Row(
        "transaction.timeout.ms above the broker's maximum",
        "init",
        K.INVALID_TRANSACTION_TIMEOUT,
        "1/0/0",
        Action.MISCONFIGURED,
    ),
    Row("two successors initialise at once", "init", K._FENCED, "1/0/0", Action.FENCED),
    Row("begin before init", "begin", K._STATE, "0/0/0", Action.BUG),
    Row("commit without begin", "commit", K._STATE, "0/0/0", Action.BUG),
    Row("no transactional.id", "init", K._NOT_CONFIGURED, "0/0/0", Action.BUG),
    Row("record too large, by the broker: delivery", "delivery", K.MSG_SIZE_TOO_LARGE, "0/0/0", Action.POISON),
    Row("record too large, by the broker: commit", "commit", K.MSG_SIZE_TOO_LARGE, "0/0/1", Action.ABORT),
    Row("the commit after that one", "commit", K.OUT_OF_ORDER_SEQUENCE_NUMBER, "0/0/1", Action.ABORT),
    Row("record too large, by the client", "produce", K.MSG_SIZE_TOO_LARGE, "0/0/0", Action.POISON),
    Row("unknown topic: delivery", "delivery", K.UNKNOWN_TOPIC_OR_PART, "0/0/0", Action.UNAVAILABLE),
    Row("unknown topic: commit", "commit", K._INCONSISTENT, "0/0/1", Action.ABORT),
    Row("unknown partition, metadata known", "produce", K._UNKNOWN_PARTITION, "0/0/0", Action.POISON),
    Row("callback raised inside commit, then begin", "begin", K._CONFLICT, "0/1/0", Action.REBUILD),
    Row("delivery timeout: delivery", "delivery", K._MSG_TIMED_OUT, "0/0/0", Action.ABORT),
    Row("delivery timeout: commit", "commit", K._TIMED_OUT, "0/0/1", Action.ABORT),
    # Errors after an abort, and errors of a late copy with a fenced epoch (H2b and H3).
    Row("a record purged by an abort", "delivery", K._PURGE_QUEUE, "0/0/0", Action.ABORT),
    Row("late EndTxn in the next transaction", "commit", K.INVALID_TXN_STATE, "1/0/0", Action.REBUILD),
    # Measured with static membership.
    Row("two live static members: the older's offsets", "send_offsets", K.FENCED_INSTANCE_ID, "0/0/1", Action.REJOIN),
    Row("two live static members: the older's poll", "consume", K._FATAL, "1/0/0", Action.REJOIN),
    # Input that is lost or damaged, and an epoch that a broker refuses by mistake.
    Row("the committed offset is out of range", "consume", K._AUTO_OFFSET_RESET, "0/0/0", Action.INPUT_GONE),
    Row("a batch with a wrong checksum", "consume", K._BAD_MSG, "0/0/0", Action.DAMAGED),
    Row("a batch that cannot be decompressed", "consume", K._BAD_COMPRESSION, "0/0/0", Action.DAMAGED),
    Row("a batch that librdkafka does not understand", "consume", K._NOT_IMPLEMENTED, "0/0/0", Action.DAMAGED),
    Row("spurious epoch mismatch (KAFKA-19779)", "send_offsets", K.STALE_MEMBER_EPOCH, "0/0/1", Action.ABORT),
    # Errors without a fault, or caused by the administrator.
    Row("the transactional.id expired", "begin", K.INVALID_PRODUCER_ID_MAPPING, "1/0/0", Action.REBUILD),
    Row("no ACL on the group", "send_offsets", K.GROUP_AUTHORIZATION_FAILED, "0/0/1", Action.UNAUTHORISED),
    Row("no ACL on the topic", "delivery", K.TOPIC_AUTHORIZATION_FAILED, "0/0/0", Action.UNAUTHORISED),
    Row("no ACL on the id", "init", K.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "1/0/0", Action.UNAUTHORISED),
    Row("wrong password", "consume", K._AUTHENTICATION, "0/0/0", Action.UNAUTHORISED),
    Row("broker lost while consuming", "consume", K._TRANSPORT, "0/0/0", Action.RETRY),
    Row("offsets still pending", "committed", K.UNSTABLE_OFFSET_COMMIT, "0/0/0", Action.RETRY),
]


def kafka_error(code: int, flags: str = "0/0/0", reason: str = "why") -> KafkaError:
    fatal, retriable, abort = (flag == "1" for flag in flags.split("/"))
    return KafkaError(code, reason, fatal=fatal, retriable=retriable, txn_requires_abort=abort)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.case}: {row.action.name}")
def test_measured_error_maps_to_action(row: Row) -> None:
    assert classify(row.call, kafka_error(row.code, row.flags)) is row.action


def test_timeout_maps_to_retry_or_abort_by_flags() -> None:
    assert classify("commit", kafka_error(K._TIMED_OUT, "0/1/0")) is Action.RETRY
    assert classify("commit", kafka_error(K._TIMED_OUT, "0/0/1")) is Action.ABORT
    assert classify("commit", kafka_error(K._TIMED_OUT, "0/1/1")) is Action.ABORT


def test_delivery_error_ignores_flags() -> None:
    assert len(EXACT_CODES) > 100, EXACT_CODES
    for code in EXACT_CODES.values():
        actions = {
            classify("delivery", kafka_error(code, f"{f}/{r}/{a}"))
            for f, r, a in itertools.product((0, 1), (0, 1), (0, 1))
        }
        assert len(actions) == 1, code
        assert Action.RETRY not in actions, f"{code}: a failed record is not offered again"


@pytest.mark.parametrize("call", ["init", "begin", "produce", "flush", "send_offsets", "commit", "abort"])
def test_unknown_error_is_decided_by_flags(call: Call) -> None:
    unknown = K.BROKER_NOT_AVAILABLE
    assert not {(call, unknown), ("*", unknown)} & TABLE.keys()
    assert classify(call, kafka_error(unknown, "0/0/1")) is Action.ABORT
    assert classify(call, kafka_error(unknown, "0/1/0")) is Action.RETRY
    assert classify(call, kafka_error(unknown, "1/1/0")) is Action.REBUILD, "fatal: calling again cannot help"
    assert classify(call, kafka_error(unknown, "1/0/0")) is Action.REBUILD
    assert classify(call, kafka_error(unknown, "0/0/0")) is Action.REBUILD, "without flags an error counts as fatal"


def test_fatal_error_is_never_retried() -> None:
    for call, code in itertools.product(set(CALLS) - {"consume", "committed"}, EXACT_CODES.values()):
        assert classify(call, kafka_error(code, "1/0/0")) is not Action.RETRY, (call, code)
        assert classify(call, kafka_error(code, "1/1/0")) is not Action.RETRY, (call, code)


def test_error_table_refers_only_to_existing_calls_and_codes() -> None:
    codes = set(EXACT_CODES.values())
    assert {call for call, _ in TABLE} <= {*CALLS, "*"}
    assert {code for _, code in TABLE} <= codes


# ---- the tree ----------------------------------------------------------------------------------------------

EXIT_CODES = {
    "EosError": 70,
    "UsageError": 64,
    "ImportFailed": 64,
    "PoisonRecord": 65,
    "InputGone": 66,
    "Unavailable": 69,
    "IllegalState": 70,
    "Temporary": 75,
    "CommitOutcomeUnknown": 75,
    "NotAuthorised": 77,
    "ConfigurationError": 78,
    "Fenced": 79,
}


def test_exit_codes_match_public_contract() -> None:
    tree = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, EosError)}
    assert {name: kind.exit_code for name, kind in tree.items()} == EXIT_CODES


def test_docstring_tree_names_every_error_with_exit_code() -> None:
    lines = {
        line.split()[1]: line for line in (errors.__doc__ or "").splitlines() if "──" in line and "EosE" not in line
    }
    assert set(EXIT_CODES) - {"EosError", "ImportFailed", "CommitOutcomeUnknown"} <= set(lines)
    for name, line in lines.items():
        assert str(EXIT_CODES.get(name, "")) in line


# ---- sentences ---------------------------------------------------------------------------------------------


def test_kafka_error_is_described_by_name_and_message() -> None:
    error = kafka_error(K._FENCED, "1/0/0", "Producer fenced by newer instance")
    assert describe_error(error) == "_FENCED (Producer fenced by newer instance)"
    assert describe_error(KafkaException(error)) == describe_error(error)


def test_exception_is_described_by_its_class_and_message() -> None:
    assert describe_error(ValueError("no")) == "ValueError: no"
    assert describe_error(KafkaException("text only")) == "KafkaException: text only"
    assert describe_error(KafkaException()) == "KafkaException: "


STOPS: list[tuple[Action, type[EosError]]] = [
    (Action.UNAVAILABLE, errors.Unavailable),
    (Action.UNAUTHORISED, errors.NotAuthorised),
    (Action.MISCONFIGURED, errors.ConfigurationError),
    (Action.FENCED, errors.Fenced),
    (Action.INPUT_GONE, errors.InputGone),
    (Action.DAMAGED, errors.InputGone),
    (Action.BUG, errors.IllegalState),
]


@pytest.mark.parametrize(
    ("action", "kind"),
    [*STOPS, *((action, errors.Temporary) for action in Action if action not in dict(STOPS))],
    ids=lambda value: getattr(value, "name", getattr(value, "__name__", "")),
)
def test_failure_that_stops_the_session_becomes_a_public_error(action: Action, kind: type[EosError]) -> None:
    failure = CallFailed("commit", action, KafkaException(kafka_error(K.GROUP_AUTHORIZATION_FAILED, reason="no ACL")))
    stopped = stop_error(failure)
    assert type(stopped) is kind
    assert str(stopped) == "commit: GROUP_AUTHORIZATION_FAILED (no ACL)"
    assert stopped.__cause__ is failure


# librdkafka's own words, of a first start of `eos run --workers 2` (2.16)
STRUCT = (
    "Failed to commit offsets to transaction on broker 127.0.0.1:9092/0: in((null))[3](Broker: Specified group ...)"
)


@pytest.mark.parametrize("row", [r for r in MEASURED if r.call in ("send_offsets", "commit")], ids=lambda r: r.case)
def test_only_ordinary_rebalances_are_described(row: Row) -> None:
    failure = CallFailed(row.call, row.action, KafkaException(KafkaError(row.code, STRUCT)))
    moved = row.code in (K.UNKNOWN_MEMBER_ID, K.ILLEGAL_GENERATION, K.REBALANCE_IN_PROGRESS, K.STALE_MEMBER_EPOCH)
    assert describe_rebalance(failure) == ("the group is rebalancing" if moved else "")


def test_rebalance_found_by_session_is_described_as_found() -> None:
    sentence = "partitions of this transaction were revoked"
    assert describe_rebalance(CallFailed("send_offsets", Action.ABORT, RuntimeError(sentence))) == sentence
    assert describe_rebalance(CallFailed("abort", Action.ABORT, RuntimeError("asked by the application"))) == ""
    assert describe_rebalance(CallFailed("send_offsets", Action.REBUILD, RuntimeError("it hung"))) == ""


@pytest.mark.parametrize(
    ("servers", "here"), [("localhost:1", True), ("a:1, [::1]:2", True), ("kafka.example:9092", False)]
)
def test_only_local_broker_can_be_started(servers: str, here: bool) -> None:
    assert ("eos broker start" in no_broker(servers)) == here


def test_package_exports_every_catchable_error() -> None:
    """Return all exit codes except those of the command line."""
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, EosError)}
    public = {kind for kind in kinds if not issubclass(kind, errors.UsageError)}
    assert len(public) >= 10
    for kind in public:
        assert getattr(eos, kind.__name__) is kind
        assert kind.__name__ in eos.__all__
