"""Checks before the first record that the cluster fits the worker.

Owns the checks and the message of each failure: one sentence, what to change, the exit code. The checks are pure
functions of `Requirements` (of the worker) and `Facts` (about the cluster); only `gather_facts` and
`require_fit_cluster` do I/O. It decides nothing while a worker runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from eos import log
from eos.errors import ConfigurationError, EosError, NotAuthorised, Unavailable, missing_right
from eos.kafka.admin.facts import (
    NEW_TOPIC_S,
    OFFSETS_RETENTION,
    Config,
    Facts,
    Topic,
    check_clients,
    create_topics,
    query_facts,
)
from eos.kafka.client.cluster import OFFSETS_LOG, TRANSACTION_LOG
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World

T = TypeVar("T")
# Requests that a session needs, with the Kafka version that introduced each.
REQUIRED_APIS = {
    "DescribeTransactions": "3.0",
    "ListTransactions": "3.0",
    "DescribeProducers": "2.8",
    "TxnOffsetCommit": "0.11",
    "InitProducerId": "0.11",
}
SAFE_REPLICAS, SAFE_IN_SYNC = 3, 2
_DAY_MINUTES = 1_440
_RETRY_INTERVAL_S = 0.2


class Level(Enum):
    OK = "ok"
    UNKNOWN = "not known"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """Holds the result of one check: a sentence, and what to change unless it is OK.

    `error`: the exception to raise for FAILED."""

    check: str
    level: Level
    sentence: str
    remedy: str = ""
    error: type[EosError] = Unavailable

    def __str__(self) -> str:
        return f"{self.sentence}: {self.remedy}" if self.remedy else self.sentence


@dataclass(frozen=True)
class Requirements:
    """Describes what a worker will use. `session_timeout_ms` is None without a classic group."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    group: str | None = None
    transactional_ids: tuple[str, ...] = ()
    transaction_timeout_ms: int = 10_000
    session_timeout_ms: int | None = None
    strict: bool = False
    topics: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "topics", tuple(dict.fromkeys([*self.inputs, *self.outputs])))


Check = Callable[[Requirements, Facts], Iterator[Finding]]


# ---- the checks -----------------------------------------------------------------------------------------------


def _check_brokers(need: Requirements, facts: Facts) -> Iterator[Finding]:
    missing = [name for name in REQUIRED_APIS if name not in facts.apis]
    if missing:
        since = max(REQUIRED_APIS[name] for name in missing)
        yield Finding(
            "brokers",
            Level.FAILED,
            f"the brokers at {facts.servers} are too old: they do not support {', '.join(missing)}",
            f"upgrade them to Kafka {since} or later",
        )
        return
    count = f"{facts.brokers} broker{'s' if facts.brokers > 1 else ''}"
    yield Finding("brokers", Level.OK, f"{count} at {facts.servers}, transaction.version {facts.controller_version}")


def _check_rights(need: Requirements, facts: Facts) -> Iterator[Finding]:
    denied = list(_missing_rights(need, facts))
    for resource, operation in denied:
        yield Finding("authorised", Level.FAILED, *missing_right(resource, operation), NotAuthorised)
    if not denied:
        known = all(t.operations is not None for t in facts.topics.values() if t.exists)
        yield Finding("authorised", Level.OK if known else Level.UNKNOWN, "topics, group and transactional.id")


def _missing_rights(need: Requirements, facts: Facts) -> Iterator[tuple[str, str]]:
    for names, operation in ((need.inputs, "READ"), (need.outputs, "WRITE")):
        for name in names:
            topic = facts.topics[name]
            if topic.exists is None or (topic.operations is not None and operation not in topic.operations):
                yield f"topic {name}", operation
    group = facts.group_operations
    if need.group and (facts.group_denied or (group is not None and "READ" not in group)):
        yield f"group {need.group}", "READ"
    for name in need.transactional_ids:
        if name in facts.denied_ids:
            yield f"transactional.id {name}", "WRITE"


def _check_topics(need: Requirements, facts: Facts) -> Iterator[Finding]:
    if missing := [name for name in need.topics if facts.topics[name].exists is False]:
        which, them = (
            (f"topic {missing[0]} does", "it") if len(missing) == 1 else (f"topics {', '.join(missing)} do", "them")
        )
        yield Finding(
            "topics",
            Level.FAILED,
            f"{which} not exist at {facts.servers}",
            f"`eos topic create {' '.join(missing)}` creates {them}, as does eos.create.topics=true (eos run: "
            "--create-topics)",
        )
    for name in need.topics:
        topic = facts.topics[name]
        if topic.leaderless:
            where = ", ".join(map(str, topic.leaderless))
            yield Finding(
                "topics",
                Level.WARNING,
                f"topic {name} has no leader for partition {where}",
                "restart its brokers; reads and writes of these partitions wait",
            )
        elif topic.exists:
            yield Finding("topics", Level.OK, f"{name}: {topic.partitions} partitions, {topic.replicas} replicas")


def _check_internal_topics(need: Requirements, facts: Facts) -> Iterator[Finding]:
    """Check the transaction log and the offsets log. If the transaction log cannot be written, init_transactions
    hangs."""
    yield from _check_internal_topic(TRANSACTION_LOG, "transaction.state.log", facts, "no transaction can begin")
    yield from _check_internal_topic(OFFSETS_LOG, "offsets.topic", facts, "no group can commit")


def _check_internal_topic(name: str, prefix: str, facts: Facts, without: str) -> Iterator[Finding]:
    topic, config = facts.topics[name], facts.broker_config or {}
    if topic.exists is False:
        copies = _parse_int(config, f"{prefix}.replication.factor")
        if copies is not None and copies > facts.brokers:
            yield Finding(
                "transaction log",
                Level.FAILED,
                f"{name} cannot be created: {prefix}.replication.factor={copies} with {facts.brokers} "
                f"broker{'s' if facts.brokers > 1 else ''}, so {without}",
                f"start more brokers, or set {prefix}.replication.factor={facts.brokers} on them (with a single "
                "broker, also transaction.state.log.min.isr=1)",
                ConfigurationError,
            )
            return
        least = _parse_int(config, f"{prefix}.min.isr")
        if least is not None and copies is not None and least > copies:
            yield Finding(
                "transaction log",
                Level.FAILED,
                f"{name} could not be written: {prefix}.min.isr={least} with {prefix}.replication.factor={copies}",
                f"set {prefix}.min.isr to at most {copies} on the brokers",
                ConfigurationError,
            )
            return
        yield Finding("transaction log", Level.OK, f"{name} will be created at its first use")
        return
    if topic.exists is None:
        yield Finding("transaction log", Level.UNKNOWN, f"we are not authorised to describe {name}")
        return
    yield _check_writable(name, topic, without)


def _check_writable(name: str, topic: Topic, without: str) -> Finding:
    least = _parse_int(topic.config or {}, "min.insync.replicas")
    if topic.leaderless:
        sentence = f"{name} has no leader for {len(topic.leaderless)} of {topic.partitions} partitions"
        return Finding(
            "transaction log",
            Level.WARNING,
            f"{sentence}: some transactional.ids or groups wait",
            "restart the brokers",
        )
    if least is not None and least > topic.replicas:
        return Finding(
            "transaction log",
            Level.FAILED,
            f"{name} cannot be written: min.insync.replicas={least} with {topic.replicas} "
            f"replica{'s' if topic.replicas > 1 else ''} of each partition, so {without}",
            f"set min.insync.replicas of {name} to at most {topic.replicas}, or give it more replicas",
            ConfigurationError,
        )
    if least is not None and least > topic.in_sync:
        return Finding(
            "transaction log",
            Level.WARNING,
            f"{name} has a partition with {topic.in_sync} replicas in sync, and needs {least}",
            f"restart the brokers; until then {without} there",
        )
    return Finding("transaction log", Level.OK, f"{name}: {topic.partitions} partitions, {topic.replicas} replicas")


def _check_timeouts(need: Requirements, facts: Facts) -> Iterator[Finding]:
    config = facts.broker_config
    if config is None:
        yield Finding("timeouts", Level.UNKNOWN, "we are not authorised to read the brokers' settings")
        return
    most = _parse_int(config, "transaction.max.timeout.ms")
    if most is not None and need.transaction_timeout_ms > most:
        yield Finding(
            "timeouts",
            Level.FAILED,
            f"transaction.timeout.ms={need.transaction_timeout_ms} is above the brokers' "
            f"transaction.max.timeout.ms={most}",
            f"set transaction.timeout.ms to at most {most}",
            ConfigurationError,
        )
        return
    low, high = (_parse_int(config, f"group.{end}.session.timeout.ms") for end in ("min", "max"))
    session = need.session_timeout_ms
    if session is not None and ((low is not None and session < low) or (high is not None and session > high)):
        yield Finding(
            "timeouts",
            Level.FAILED,
            f"session.timeout.ms={session} is not between the brokers' {low} and {high}",
            f"set session.timeout.ms within this range (group.min.session.timeout.ms={low})",
            ConfigurationError,
        )
        return
    expiration = _parse_int(config, "transactional.id.expiration.ms")
    if expiration is not None and expiration <= need.transaction_timeout_ms:
        yield Finding(
            "timeouts",
            Level.WARNING,
            f"transactional.id.expiration.ms={expiration} expires an idle worker's transactional.id within its "
            f"transaction.timeout.ms={need.transaction_timeout_ms}",
            "raise it on the brokers (Kafka's default is 7 days)",
        )
        return
    yield Finding("timeouts", Level.OK, f"transaction.timeout.ms={need.transaction_timeout_ms} of at most {most}")


def _check_offsets_retention(need: Requirements, facts: Facts) -> Iterator[Finding]:
    """Check how long the brokers keep the offsets of a group without members, for example between scheduled runs."""
    if need.group is None:
        return
    minutes = _parse_int(facts.broker_config or {}, OFFSETS_RETENTION)
    if minutes is None:
        yield Finding("offsets", Level.UNKNOWN, f"we are not authorised to read {OFFSETS_RETENTION} of the brokers")
        return
    kept = f"{minutes / _DAY_MINUTES:g} days" if minutes >= _DAY_MINUTES else f"{minutes} minutes"
    sentence = f"the brokers keep the offsets of group {need.group} for {kept} while it has no members"
    if minutes >= _DAY_MINUTES:  # long enough for a worker that is stopped overnight
        yield Finding("offsets", Level.OK, sentence)
        return
    yield Finding(
        "offsets",
        Level.WARNING,
        f"{sentence}; a worker that starts later needs `eos reset` first",
        f"raise {OFFSETS_RETENTION} on the brokers (Kafka's default is 10080, 7 days)",
    )


def _check_durability(need: Requirements, facts: Facts) -> Iterator[Finding]:
    """Check that the cluster does not lose acknowledged records; a single broker cannot promise that."""
    level = Level.FAILED if need.strict else Level.WARNING
    if facts.brokers < 2:
        yield Finding(
            "durability",
            level if need.strict else Level.OK,
            "one broker: acknowledged records are lost with its disk",
            "run three brokers if that matters",
        )
        return
    found = list(_find_weaknesses(need, facts, level))
    yield from found
    if not found:
        yield Finding("durability", Level.OK, "outputs, offsets and transaction log survive the loss of a broker")


# The brokers' settings with which the first transaction or group creates these topics: the number of replicas, and how
# many must be in sync. The offsets log has no setting of its own for the second number.
_CREATION_SETTINGS = {
    TRANSACTION_LOG: ("transaction.state.log.replication.factor", "transaction.state.log.min.isr"),
    OFFSETS_LOG: ("offsets.topic.replication.factor", "min.insync.replicas"),
}


def _find_weaknesses(need: Requirements, facts: Facts, level: Level) -> Iterator[Finding]:
    """Yield weaknesses, and topics that we are not authorised to examine, which fail only with eos.strict."""
    for name in dict.fromkeys([*need.outputs, OFFSETS_LOG, TRANSACTION_LOG]):
        weaknesses, right = _examine_topic(name, facts.topics[name], facts.broker_config)
        for what, change in weaknesses:
            sentence = f"topic {name} can lose acknowledged records: {what}"
            yield Finding("durability", level, sentence, change, ConfigurationError)
        if right:
            yield Finding(
                "durability",
                Level.FAILED if need.strict else Level.UNKNOWN,
                f"we are not authorised to see whether topic {name} can lose acknowledged records",
                f"add an ACL that allows {right}",
                NotAuthorised,
            )


def _examine_topic(name: str, topic: Topic, broker: Config | None) -> tuple[list[tuple[str, str]], str]:
    """Return a topic's weaknesses, and the missing right that may hide more of them, or ""."""
    if topic.exists is None:
        return [], f"DESCRIBE and DESCRIBE_CONFIGS on topic {name}"
    if topic.exists:
        return list(_topic_weaknesses(topic)), "" if topic.config is not None else f"DESCRIBE_CONFIGS on topic {name}"
    if name not in _CREATION_SETTINGS:
        return [], ""  # an output: `_check_topics` reports it, and --create-topics creates it safely
    if broker is None:
        return [], "DESCRIBE_CONFIGS on the cluster"
    return list(_weaknesses_when_created(name, broker)), ""


def _topic_weaknesses(topic: Topic) -> Iterator[tuple[str, str]]:
    if topic.replicas < SAFE_REPLICAS:
        yield f"it has {topic.replicas} replica{'' if topic.replicas == 1 else 's'}", "give it 3 replicas"
    config = topic.config or {}
    least = _parse_int(config, "min.insync.replicas")
    if least is not None and least < SAFE_IN_SYNC:
        yield f"min.insync.replicas={least}", "set min.insync.replicas=2"
    if config.get("unclean.leader.election.enable") == "true":
        yield "unclean.leader.election.enable=true", "set unclean.leader.election.enable=false"


def _weaknesses_when_created(name: str, broker: Config) -> Iterator[tuple[str, str]]:
    """Yield the weaknesses of a topic that the brokers will create by their settings."""
    for setting, safe in zip(_CREATION_SETTINGS[name], (SAFE_REPLICAS, SAFE_IN_SYNC), strict=True):
        value = _parse_int(broker, setting)
        if value is not None and value < safe:
            yield f"it will be created with {setting}={value}", f"set {setting}={safe} on the brokers"
    # The transaction log never allows unclean elections, regardless of the brokers' setting.
    if name == OFFSETS_LOG and broker.get("unclean.leader.election.enable") == "true":
        yield "unclean.leader.election.enable=true", "set unclean.leader.election.enable=false on the brokers"


def _parse_int(config: Config, name: str) -> int | None:
    value = config.get(name)
    return None if value is None else int(value)


# The order matters: a failure can make later checks meaningless, and the first failure determines the exit code.
CHECKS: tuple[Check, ...] = (
    _check_brokers,
    _check_rights,
    _check_topics,
    _check_internal_topics,
    _check_timeouts,
    _check_offsets_retention,
    _check_durability,
)


# ---- running the checks ---------------------------------------------------------------------------------------


def judge(need: Requirements, facts: Facts) -> list[Finding]:
    """Return all findings in the order of CHECKS."""
    return [finding for check in CHECKS for finding in check(need, facts)]


def requirements_of(settings: Settings, inputs: Iterable[str], outputs: Iterable[str]) -> Requirements:
    """Return the requirements of a worker with these settings, which include group.id and transactional.id."""
    name = settings.get("transactional.id")
    return Requirements(
        tuple(inputs),
        tuple(sorted(outputs)),
        settings.get("group.id"),
        (str(name), f"{name}-alternate") if name else (),
        settings.transaction_timeout_ms,
        int(settings.consumer()["session.timeout.ms"]) if settings.classic_group else None,
        bool(settings["eos.strict"]),
    )


def gather_facts(settings: Settings, need: Requirements, timeout_s: float) -> Facts:
    """Return the facts for `judge`. Raises Unavailable, NotAuthorised or ConfigurationError if a query fails."""
    check_clients(settings)
    return query_facts(settings, need.topics, need.group, need.transactional_ids, timeout_s)


def require_fit_cluster(settings: Settings, need: Requirements, world: World = REAL) -> Facts:
    """Run all checks: raise the first failure, and log the others and the warnings.

    Creates missing topics first with eos.create.topics. Returns the facts about the cluster."""
    world.step("preflight")
    check_clients(settings, world)
    timeout_s = settings["eos.startup.timeout.ms"] / 1000
    asked = settings, need.topics, need.group, need.transactional_ids, timeout_s, world
    facts = query_facts(*asked)
    patience_s = NEW_TOPIC_S
    if settings["eos.create.topics"] and (missing := [t for t in need.topics if facts.topics[t].exists is False]):
        most = max((facts.topics[t].partitions for t in need.inputs), default=0)
        between = frozenset(need.inputs).intersection(need.outputs)
        create_topics(settings, dict.fromkeys(missing, most or -1), facts.brokers, between=between, world=world)
        facts, patience_s = query_facts(*asked), timeout_s
    deadline = world.now() + patience_s
    while any(facts.topics[name].exists is False for name in need.topics) and world.now() < deadline:
        world.sleep(0.1)
        facts = query_facts(*asked)
    raise_first_failure(judge(need, facts))
    return facts


def retry_while_unavailable(settings: Settings, call: Callable[[], T], world: World = REAL) -> T:
    """Return the result of `call`, retried for eos.startup.timeout.ms while it raises Unavailable.

    A cluster that has just started has no coordinators yet."""
    deadline = world.now() + settings["eos.startup.timeout.ms"] / 1000
    while True:
        try:
            return call()
        except Unavailable as error:
            if world.now() >= deadline:
                raise
            log.debug("startup query retried", error=str(error))
            world.sleep(_RETRY_INTERVAL_S)


def raise_first_failure(findings: Sequence[Finding]) -> None:
    """Log the warnings and all failures but the first, and raise the first failure."""
    failed = [f for f in findings if f.level is Level.FAILED]
    for finding in findings:
        if finding.level is Level.WARNING or finding in failed[1:]:
            log.warning(str(finding), check=finding.check)
    if failed:
        raise failed[0].error(str(failed[0]))
