"""Preflight: is this cluster fit for this worker? A list of checks, asked before the first record.

Owns what is checked and what each failure says: one sentence, what to change, the exit code. The checks are pure
functions of `Need` (what the worker will do) and `Facts` (what the cluster said); only `run` asks. It decides nothing
while a worker runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from eos import log
from eos.errors import ConfigurationError, EosError, NotAuthorised, Unavailable, missing_right
from eos.kafka.admin.facts import NEW_TOPIC_S, OFFSETS_KEPT, Config, Facts, Topic, ask, check_clients, create_topics
from eos.kafka.client.cluster import OFFSETS_LOG, TRANSACTION_LOG
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World

T = TypeVar("T")
# What a session cannot do without; each came with the Kafka version beside it.
REQUIRED_APIS = {
    "DescribeTransactions": "3.0",
    "ListTransactions": "3.0",
    "DescribeProducers": "2.8",
    "TxnOffsetCommit": "0.11",
    "InitProducerId": "0.11",
}
SAFE_COPIES, SAFE_IN_SYNC = 3, 2
_DAY_MINUTES = 1_440
_AGAIN_S = 0.2


class Level(Enum):
    OK = "ok"
    UNKNOWN = "not known"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """What one check found: a sentence, and for anything but OK what to change. `error` is what FAILED is raised as."""

    check: str
    level: Level
    sentence: str
    remedy: str = ""
    error: type[EosError] = Unavailable

    def __str__(self) -> str:
        return f"{self.sentence}: {self.remedy}" if self.remedy else self.sentence


@dataclass(frozen=True)
class Need:
    """What a worker will do. `session_timeout_ms` None: not a classic group, or none."""

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


Check = Callable[[Need, Facts], Iterator[Finding]]


# ---- the checks -----------------------------------------------------------------------------------------------


def _brokers(need: Need, facts: Facts) -> Iterator[Finding]:
    missing = [name for name in REQUIRED_APIS if name not in facts.apis]
    if missing:
        since = max(REQUIRED_APIS[name] for name in missing)
        yield Finding(
            "brokers",
            Level.FAILED,
            f"the brokers at {facts.servers} are too old: they do not know {', '.join(missing)}",
            f"upgrade them to Kafka {since} or later",
        )
        return
    count = f"{facts.brokers} broker{'s' if facts.brokers > 1 else ''}"
    yield Finding("brokers", Level.OK, f"{count} at {facts.servers}, transaction.version {facts.controller_version}")


def _authorised(need: Need, facts: Facts) -> Iterator[Finding]:
    denied = list(_denied(need, facts))
    for resource, operation in denied:
        yield Finding("authorised", Level.FAILED, *missing_right(resource, operation), NotAuthorised)
    if not denied:
        known = all(t.operations is not None for t in facts.topics.values() if t.exists)
        yield Finding("authorised", Level.OK if known else Level.UNKNOWN, "topics, group and transactional.id")


def _denied(need: Need, facts: Facts) -> Iterator[tuple[str, str]]:
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


def _topics(need: Need, facts: Facts) -> Iterator[Finding]:
    if missing := [name for name in need.topics if facts.topics[name].exists is False]:
        which, them = (
            (f"topic {missing[0]} does", "it") if len(missing) == 1 else (f"topics {', '.join(missing)} do", "them")
        )
        yield Finding(
            "topics",
            Level.FAILED,
            f"{which} not exist at {facts.servers}",
            f"`eos topic create {' '.join(missing)}` makes {them}, so does eos.create.topics=true (eos run: "
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
                "bring its brokers back; what needs these partitions waits",
            )
        elif topic.exists:
            yield Finding("topics", Level.OK, f"{name}: {topic.partitions} partitions, {topic.replicas} copies")


def _transaction_log(need: Need, facts: Facts) -> Iterator[Finding]:
    """Without a transaction log that can be written, init_transactions hangs for ever."""
    yield from _log(TRANSACTION_LOG, "transaction.state.log", facts, "no transaction can begin")
    yield from _log(OFFSETS_LOG, "offsets.topic", facts, "no group can commit")


def _log(name: str, prefix: str, facts: Facts, without: str) -> Iterator[Finding]:
    topic, config = facts.topics[name], facts.broker_config or {}
    if topic.exists is False:
        copies = _number(config, f"{prefix}.replication.factor")
        if copies is not None and copies > facts.brokers:
            yield Finding(
                "transaction log",
                Level.FAILED,
                f"{name} cannot be created: {prefix}.replication.factor={copies} with {facts.brokers} "
                f"broker{'s' if facts.brokers > 1 else ''}, so {without}",
                f"start more brokers, or set {prefix}.replication.factor={facts.brokers} on them (and on a single one "
                "transaction.state.log.min.isr=1)",
                ConfigurationError,
            )
            return
        least = _number(config, f"{prefix}.min.isr")
        if least is not None and copies is not None and least > copies:
            yield Finding(
                "transaction log",
                Level.FAILED,
                f"{name} could not be written: {prefix}.min.isr={least} with {prefix}.replication.factor={copies}",
                f"set {prefix}.min.isr to at most {copies} on the brokers",
                ConfigurationError,
            )
            return
        yield Finding("transaction log", Level.OK, f"{name} will be made at its first use")
        return
    if topic.exists is None:
        yield Finding("transaction log", Level.UNKNOWN, f"{name} may not be described by us")
        return
    yield _writable(name, topic, without)


def _writable(name: str, topic: Topic, without: str) -> Finding:
    least = _number(topic.config or {}, "min.insync.replicas")
    if topic.leaderless:
        sentence = f"{name} has no leader for {len(topic.leaderless)} of {topic.partitions} partitions"
        return Finding(
            "transaction log", Level.WARNING, f"{sentence}: a part of the ids waits", "bring the brokers back"
        )
    if least is not None and least > topic.replicas:
        return Finding(
            "transaction log",
            Level.FAILED,
            f"{name} cannot be written: min.insync.replicas={least} with {topic.replicas} "
            f"cop{'ies' if topic.replicas > 1 else 'y'} of each partition, so {without}",
            f"set min.insync.replicas of {name} to at most {topic.replicas}, or give it more replicas",
            ConfigurationError,
        )
    if least is not None and least > topic.in_sync:
        return Finding(
            "transaction log",
            Level.WARNING,
            f"{name} has a partition with {topic.in_sync} of at least {least} replicas in sync",
            f"bring the brokers back; until then {without} there",
        )
    return Finding("transaction log", Level.OK, f"{name}: {topic.partitions} partitions, {topic.replicas} copies")


def _timeouts(need: Need, facts: Facts) -> Iterator[Finding]:
    config = facts.broker_config
    if config is None:
        yield Finding("timeouts", Level.UNKNOWN, "the brokers' settings may not be read by us")
        return
    most = _number(config, "transaction.max.timeout.ms")
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
    low, high = (_number(config, f"group.{end}.session.timeout.ms") for end in ("min", "max"))
    session = need.session_timeout_ms
    if session is not None and ((low is not None and session < low) or (high is not None and session > high)):
        yield Finding(
            "timeouts",
            Level.FAILED,
            f"session.timeout.ms={session} is not between the brokers' {low} and {high}",
            f"set session.timeout.ms within them (group.min.session.timeout.ms={low})",
            ConfigurationError,
        )
        return
    expiration = _number(config, "transactional.id.expiration.ms")
    if expiration is not None and expiration <= need.transaction_timeout_ms:
        yield Finding(
            "timeouts",
            Level.WARNING,
            f"transactional.id.expiration.ms={expiration} forgets an idle worker's transactional.id within its own "
            f"transaction.timeout.ms={need.transaction_timeout_ms}",
            "raise it on the brokers (Kafka's default is 7 days)",
        )
        return
    yield Finding("timeouts", Level.OK, f"transaction.timeout.ms={need.transaction_timeout_ms} of at most {most}")


def _place(need: Need, facts: Facts) -> Iterator[Finding]:
    """A group without members loses its offsets: a job by `--until-end` that runs less often is refused each time."""
    if need.group is None:
        return
    minutes = _number(facts.broker_config or {}, OFFSETS_KEPT)
    if minutes is None:
        yield Finding("place", Level.UNKNOWN, "for how long the brokers keep a group's offsets may not be read by us")
        return
    kept = f"{minutes / _DAY_MINUTES:g} days" if minutes >= _DAY_MINUTES else f"{minutes} minutes"
    sentence = f"the brokers keep the offsets of group {need.group} for {kept} while nobody is a member"
    if minutes >= _DAY_MINUTES:  # a worker may stand still for a night
        yield Finding("place", Level.OK, sentence)
        return
    yield Finding(
        "place",
        Level.WARNING,
        f"{sentence}; who comes back later must be told where to go on (`eos reset`)",
        f"raise {OFFSETS_KEPT} on the brokers (Kafka's default is 10080, 7 days)",
    )


def _durable(need: Need, facts: Facts) -> Iterator[Finding]:
    """Exactly-once needs a cluster that keeps what it acknowledged. A cluster of one makes no such promise."""
    level = Level.FAILED if need.strict else Level.WARNING
    if facts.brokers < 2:
        yield Finding(
            "durability",
            level if need.strict else Level.OK,
            "one broker: what it acknowledged is lost with its disk",
            "run three brokers where that matters",
        )
        return
    found = list(_durability(need, facts, level))
    yield from found
    if not found:
        yield Finding("durability", Level.OK, "outputs, offsets and transaction log outlive the loss of a broker")


# The brokers' settings that a cluster's first transaction, or its first group, makes these topics by: copies, and how
# many must be in sync. The offsets log has no setting of its own for the latter.
_MADE_BY = {
    TRANSACTION_LOG: ("transaction.state.log.replication.factor", "transaction.state.log.min.isr"),
    OFFSETS_LOG: ("offsets.topic.replication.factor", "min.insync.replicas"),
}


def _durability(need: Need, facts: Facts, level: Level) -> Iterator[Finding]:
    """What is wrong, and what we may not see: that is no reason to stop, unless it is to be certain."""
    for name in dict.fromkeys([*need.outputs, OFFSETS_LOG, TRANSACTION_LOG]):
        weaknesses, right = _examined(name, facts.topics[name], facts.broker_config)
        for what, change in weaknesses:
            sentence = f"topic {name} can lose acknowledged records: {what}"
            yield Finding("durability", level, sentence, change, ConfigurationError)
        if right:
            yield Finding(
                "durability",
                Level.FAILED if need.strict else Level.UNKNOWN,
                f"whether topic {name} can lose acknowledged records may not be seen by us",
                f"add an ACL that allows {right}",
                NotAuthorised,
            )


def _examined(name: str, topic: Topic, broker: Config | None) -> tuple[list[tuple[str, str]], str]:
    """A topic's weaknesses, and the right without which there may be more ("": all is seen)."""
    if topic.exists is None:
        return [], f"DESCRIBE and DESCRIBE_CONFIGS on topic {name}"
    if topic.exists:
        return list(_weaknesses(topic)), "" if topic.config is not None else f"DESCRIBE_CONFIGS on topic {name}"
    if name not in _MADE_BY:
        return [], ""  # an output: said by `_topics`, and made as it should be by --create-topics
    if broker is None:
        return [], "DESCRIBE_CONFIGS on the cluster"
    return list(_weaknesses_to_be(name, broker)), ""


def _weaknesses(topic: Topic) -> Iterator[tuple[str, str]]:
    if topic.replicas < SAFE_COPIES:
        yield f"it has {topic.replicas} cop{'y' if topic.replicas == 1 else 'ies'}", "give it 3 replicas"
    config = topic.config or {}
    least = _number(config, "min.insync.replicas")
    if least is not None and least < SAFE_IN_SYNC:
        yield f"min.insync.replicas={least}", "set min.insync.replicas=2"
    if config.get("unclean.leader.election.enable") == "true":
        yield "unclean.leader.election.enable=true", "set unclean.leader.election.enable=false"


def _weaknesses_to_be(name: str, broker: Config) -> Iterator[tuple[str, str]]:
    """Of a topic that the brokers will make by their settings."""
    for setting, safe in zip(_MADE_BY[name], (SAFE_COPIES, SAFE_IN_SYNC), strict=True):
        value = _number(broker, setting)
        if value is not None and value < safe:
            yield f"it will be made with {setting}={value}", f"set {setting}={safe} on the brokers"
    # The transaction log is made without, whatever the brokers say.
    if name == OFFSETS_LOG and broker.get("unclean.leader.election.enable") == "true":
        yield "unclean.leader.election.enable=true", "set unclean.leader.election.enable=false on the brokers"


def _number(config: Config, name: str) -> int | None:
    value = config.get(name)
    return None if value is None else int(value)


# In this order: what makes the later ones meaningless comes first, and the first failure gives the exit code.
CHECKS: tuple[Check, ...] = (_brokers, _authorised, _topics, _transaction_log, _timeouts, _place, _durable)


# ---- judging and asking ---------------------------------------------------------------------------------------


def judge(need: Need, facts: Facts) -> list[Finding]:
    """All findings, in the order of CHECKS."""
    return [finding for check in CHECKS for finding in check(need, facts)]


def need_of(settings: Settings, inputs: Iterable[str], outputs: Iterable[str]) -> Need:
    """What a worker with these settings (group.id and transactional.id are set) will need."""
    name = settings.get("transactional.id")
    return Need(
        tuple(inputs),
        tuple(sorted(outputs)),
        settings.get("group.id"),
        (str(name), f"{name}-alternate") if name else (),
        settings.transaction_timeout_ms,
        int(settings.consumer()["session.timeout.ms"]) if settings.classic_group else None,
        bool(settings["eos.strict"]),
    )


def look(settings: Settings, need: Need, timeout_s: float) -> Facts:
    """What `judge` needs. Raises when it cannot be asked: Unavailable, NotAuthorised, ConfigurationError."""
    check_clients(settings)
    return ask(settings, need.topics, need.group, need.transactional_ids, timeout_s)


def require(settings: Settings, need: Need, world: World = REAL) -> Facts:
    """Before the first record: raises the first failure, logs the others and the warnings. Creates missing topics
    first when eos.create.topics says so. Returns what the cluster said."""
    check_clients(settings, world)
    timeout_s = settings["eos.startup.timeout.ms"] / 1000
    asked = settings, need.topics, need.group, need.transactional_ids, timeout_s, world
    facts = ask(*asked)
    patience_s = NEW_TOPIC_S
    if settings["eos.create.topics"] and (missing := [t for t in need.topics if facts.topics[t].exists is False]):
        most = max((facts.topics[t].partitions for t in need.inputs), default=0)
        between = frozenset(need.inputs).intersection(need.outputs)
        create_topics(settings, dict.fromkeys(missing, most or -1), facts.brokers, between=between, world=world)
        facts, patience_s = ask(*asked), timeout_s
    deadline = world.now() + patience_s
    while any(facts.topics[name].exists is False for name in need.topics) and world.now() < deadline:
        world.sleep(0.1)
        facts = ask(*asked)
    raise_first(judge(need, facts))
    return facts


def patient(settings: Settings, call: Callable[[], T], world: World = REAL) -> T:
    """Return what a call before the start returns, which is tried again for eos.startup.timeout.ms while it raises
    Unavailable: a cluster that has just started has no coordinators yet."""
    deadline = world.now() + settings["eos.startup.timeout.ms"] / 1000
    while True:
        try:
            return call()
        except Unavailable as error:
            if world.now() >= deadline:
                raise
            log.debug("asked again", error=str(error))
            world.sleep(_AGAIN_S)


def raise_first(findings: Sequence[Finding]) -> None:
    failed = [f for f in findings if f.level is Level.FAILED]
    for finding in findings:
        if finding.level is Level.WARNING or finding in failed[1:]:
            log.warning(str(finding), check=finding.check)
    if failed:
        raise failed[0].error(str(failed[0]))
