"""Settings: where they come from, which are refused, and what each client is given.

Owns the names, the defaults and the refusals. Kafka's dotted names pass verbatim to confluent-kafka; names
that begin with `eos.` are ours. A setting that contradicts exactly-once is refused with its reason (exit 78),
never silently overwritten. This module must never talk to Kafka.

Sources, weakest first: defaults < eos.toml < environment (KAFKA_BOOTSTRAP_SERVERS, EOS_…) < flags (-X name=value), or
what code gives by name (`settings_of`).
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import socket
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eos.errors import ConfigurationError
from eos.kafka.client import names as names

MINIMUM_RETRY_BACKOFF_MS = 50  # below it a call that was retried cannot be told from a healthy one by its time
RETRY_BACKOFF_DEFAULTS = {"retry.backoff.ms": 100, "retry.backoff.max.ms": 1000}  # librdkafka's
# The next transaction waits for the statistics behind a slow call. 100 costs 0.1 % of a processor more than 200 with 8
# partitions and 0.6 % with 500; 50 twice that.
STATISTICS_INTERVAL_MS = 100
_MISSPELT = 0.9  # so much like a variable of ours that it was meant to be it
# librdkafka takes a protocol before an address, but only one of these.
_WEB = re.compile(r"\b(?!(?:plaintext|ssl|sasl_plaintext|sasl_ssl):)[a-z_]+://", re.IGNORECASE)
# Kafka's settings whose numbers we reckon with ourselves, before a client could refuse what is none.
STRATEGY = "partition.assignment.strategy"
READ_HERE = ("max.poll.interval.ms", "session.timeout.ms", "topic.metadata.refresh.interval.ms")


@dataclass(frozen=True)
class Option:
    """One setting of ours: its default, how its text is read, and what it does (for `eos run --help` and docs)."""

    default: Any
    read: Callable[[Any], Any]
    meaning: str


def _one_of(*choices: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if str(value) not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return str(value)

    return read


def _at_least(minimum: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        number = int(value)
        if number < minimum:
            raise ValueError(f"must be at least {minimum}")
        return number

    return read


def _boolean(value: Any) -> bool:
    text = str(value).lower()
    if text not in ("true", "false"):
        raise ValueError("must be true or false")
    return text == "true"


OPTIONS: dict[str, Option] = {
    "eos.instance": Option(
        "", str, "suffix of the transactional.id; must be stable across restarts (default: host name)"
    ),
    "eos.input.topics": Option("", str, "source topics of a TransactSession, separated by commas"),
    "eos.transaction.interval.ms": Option(100, _at_least(1), "how long one transaction gathers and handles records"),
    "eos.transaction.max.records": Option(200_000, _at_least(1), "most input records of one transaction"),
    # A batch that lies in the processor's cache: 5,000 of 1 KB cost a tenth more (docs/engineering/measurements.md).
    "eos.batch.max.records": Option(250, _at_least(1), "most records handed to a batch function at once"),
    "eos.async.max.records": Option(100, _at_least(1), "most records on which an `async def` function runs at once"),
    "eos.headers.pass": Option(
        "traceparent,tracestate",
        str,
        "headers that outputs get from their input, separated by commas; not those of batch functions",
    ),
    "eos.lineage": Option(
        False, _boolean, "outputs name their input in a header, committed offsets count them, for `eos verify`"
    ),
    "eos.otel.spans": Option(
        False, _boolean, "a span of OpenTelemetry per transaction, to what the process has configured (extra `otel`)"
    ),
    "eos.places.topic": Option(
        "__eos_places",
        str,
        "compacted topic that tells a group whose offsets the brokers forgot from one that never ran",
    ),
    "eos.state.dir": Option(
        "~/.local/state/eos",
        str,
        "folder that workers keep the state of functions in, so that a restart reads what is new only; set to nothing: "
        "in memory",
    ),
    "eos.state.engine": Option(
        "lmdb",
        _one_of("lmdb", "rocksdb"),
        "what keeps state in its folder: lmdb, or rocksdb for more than memory holds (`eos-kafka[rocksdb]`)",
    ),
    "eos.state.memory.bytes": Option(
        64 << 20, _at_least(1 << 20), "memory that rocksdb takes in each worker, for all of its partitions"
    ),
    "eos.state.cleanup.delay.ms": Option(
        86_400_000,
        _at_least(0),
        "how long the folder of a partition that moved to another machine is kept after its last use; a value of 0 "
        "keeps it forever",
    ),
    "eos.create.topics": Option(
        False, _boolean, "create topics that are missing at the start, and dead letters' of a pattern's new topics"
    ),
    "eos.strict": Option(
        False, _boolean, "refuse to start on a cluster that can lose acknowledged records, instead of warning of it"
    ),
    "eos.startup.timeout.ms": Option(25_000, _at_least(1_000), "how long to try to reach the cluster at the start"),
    "eos.shutdown.timeout.ms": Option(
        30_000, _at_least(0), "how long a stop may take before the transaction is aborted"
    ),
    "eos.liveness.timeout.ms": Option(
        60_000, _at_least(1_000), "how long a worker may stand still, in a function or a call, until /livez says so"
    ),
    "eos.spark.driver.bytes": Option(
        256_000,
        _at_least(0),
        "Spark's driver writes a batch of up to so many packed bytes in each of its tasks; 0: tasks always",
    ),
    "eos.spark.claims.port": Option(
        0, _at_least(0), "port of Spark's driver on which writing tasks ask it, or one of the 16 behind it; 0: any"
    ),
    "eos.call.timeout.ms": Option(
        5_000, _at_least(100), "one attempt of a transactional call; a call 5 s past it counts as hung"
    ),
}

OF_FUNCTIONS = (
    "eos.headers.pass",
    "eos.otel.spans",
    "eos.state.dir",
    "eos.state.engine",
    "eos.state.memory.bytes",
    "eos.state.cleanup.delay.ms",
)
"""What an App's functions do: a loop of one's own would ask for it and get nothing."""


@dataclass(frozen=True)
class Refusal:
    """A setting of Kafka's that has only some values under which exactly-once holds."""

    allowed: frozenset[str]
    reason: str


def _only(*values: str) -> frozenset[str]:
    return frozenset(values)


REFUSALS: dict[str, Refusal] = {
    "isolation.level": Refusal(
        _only("read_committed"),
        "a reader of uncommitted records would copy aborted ones into committed output",
    ),
    "enable.auto.commit": Refusal(
        _only("false"), "offsets are committed inside the transaction; a second committer loses records"
    ),
    "enable.auto.offset.store": Refusal(_only("false"), "offsets are committed inside the transaction"),
    "enable.idempotence": Refusal(_only("true"), "a transaction needs the idempotent producer"),
    "acks": Refusal(_only("all", "-1"), "a record that only the leader has is lost with the leader"),
    "auto.offset.reset": Refusal(
        _only("earliest", "latest"),
        "it says where a partition without a committed offset begins, nothing else",
    ),
    "enable.partition.eof": Refusal(_only("true", "false"), "it is set where it is needed"),
    "delivery.report.only.error": Refusal(_only("true"), "the session counts records itself"),
    "group.protocol": Refusal(_only("classic", "consumer"), "these are the group protocols there are"),
    STRATEGY: Refusal(_only("cooperative-sticky", "range", "roundrobin"), "these are the strategies that are tested"),
    "enable.gapless.guarantee": Refusal(_only("false"), "it ends the producer where an abort suffices"),
}

NOT_FOR_USERS: dict[str, str] = {
    "max.in.flight": "the idempotent producer keeps order only as librdkafka sets it",
    "max.in.flight.requests.per.connection": "the idempotent producer keeps order only as librdkafka sets it",
    "retries": "a retry under the same sequence number is what makes the producer idempotent",
    "message.send.max.retries": "a retry under the same sequence number is what makes the producer idempotent",
    "on_delivery": "the session latches delivery errors itself",
    "dr_cb": "the session latches delivery errors itself",
    "dr_msg_cb": "the session latches delivery errors itself",
    "on_commit": "the consumer never commits; the transaction does",
    "offset_commit_cb": "the consumer never commits; the transaction does",
}

ALIASES = {
    "request.required.acks": "acks",
    "auto.commit.enable": "enable.auto.commit",
    "metadata.broker.list": "bootstrap.servers",
    "sasl.mechanisms": "sasl.mechanism",
    "queue.buffering.max.ms": "linger.ms",
    "delivery.timeout.ms": "message.timeout.ms",
    "compression.codec": "compression.type",
}
# Never shown: not in a log, not in an error, not by `eos config`.
SECRETS = frozenset(
    """
    sasl.password sasl.oauthbearer.config sasl.oauthbearer.client.secret
    sasl.oauthbearer.client.credentials.client.secret sasl.oauthbearer.assertion.private.key.passphrase
    sasl.oauthbearer.assertion.private.key.pem ssl.key.password ssl.key.pem ssl.keystore.password ssl_key
    """.split()  # noqa: SIM905
)
# Python names of confluent-kafka that are not in librdkafka's own list.
CALLBACKS = frozenset({"stats_cb", "error_cb", "throttle_cb", "oauth_cb", "logger"})

CONSUMER_DEFAULTS: dict[str, Any] = {
    # A full prefetch queue stops fetching for this long; librdkafka's 1000 costs 3.7x on a backlog.
    "fetch.queue.backoff.ms": 5,
    # Java's default. librdkafka's false hands damaged values on, and drops records of a damaged batch without a word.
    "check.crcs": True,
}
PRODUCER_DEFAULTS: dict[str, Any] = {
    "transaction.timeout.ms": 10_000,
    # A call that took longer than this may have been retried, and then the next statistics are waited for; librdkafka's
    # 100 is within what a busy machine takes for a healthy commit.
    "retry.backoff.ms": 250,
    # librdkafka's idempotent producer has one request per partition on its way and spins as soon as more is due
    # (confluentinc/librdkafka#4989). A transaction's end does not wait for it, but sends what it held back: much more
    # than this, and that has left the processor's cache (docs/engineering/measurements.md).
    "linger.ms": 10,
    # Below message.timeout.ms, so that a topic that does not exist is called that and not a timeout.
    "topic.metadata.propagation.max.ms": 5_000,
    # Java's partitioner, so that a key lands where other clients of the topic put it.
    "partitioner": "murmur2_random",
}
COMMON_DEFAULTS: dict[str, Any] = {
    "bootstrap.servers": "127.0.0.1:9092",
    # librdkafka's 10 s makes one lost connection look like a hung call.
    "reconnect.backoff.max.ms": 1_000,
}


class Settings:
    """A checked set of settings, immutable; `values` has Kafka's and our dotted names.

    Raises ConfigurationError for an unknown name, an unreadable value, or one that would break exactly-once.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, **more: Any) -> None:
        given = {ALIASES.get(name, name): value for name, value in {**(values or {}), **more}.items()}
        for name, value in given.items():
            _check(name, value)
            if name in REFUSALS and isinstance(value, str):
                given[name] = value.strip().lower()  # as librdkafka reads them; compared as they are from here on
        self.values: dict[str, Any] = given
        self._options = {name: self._option(name) for name in OPTIONS}
        _check_timeouts(self)

    def _option(self, name: str) -> Any:
        option = OPTIONS[name]
        if name not in self.values:
            return option.default
        try:
            return option.read(self.values[name])
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{name}={self.values[name]} {_reason(error)}") from error

    def __getitem__(self, name: str) -> Any:
        """An option of ours (typed), or a Kafka setting as given or by our default; KeyError where there is none."""
        if name in self._options:
            return self._options[name]
        for source in (self.values, PRODUCER_DEFAULTS, CONSUMER_DEFAULTS, COMMON_DEFAULTS):
            if name in source:
                return source[name]
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def with_values(self, **more: Any) -> Settings:
        """A copy with more settings; dots are written as they are: with_values(**{"group.id": "g"})."""
        return Settings({**self.values, **more})

    def without(self, *names: str) -> Settings:
        """A copy in which these have their defaults."""
        return Settings({name: value for name, value in self.values.items() if name not in names})

    @property
    def instance(self) -> str:
        return self._options["eos.instance"] or socket.gethostname()

    @property
    def passed_headers(self) -> frozenset[str]:
        return frozenset(name.strip() for name in self["eos.headers.pass"].split(",")) - {""}

    @property
    def bootstrap_servers(self) -> str:
        return str(self["bootstrap.servers"])

    @property
    def transaction_timeout_ms(self) -> int:
        return int(self["transaction.timeout.ms"])

    @property
    def retry_backoff_ms(self) -> int:
        """The shortest backoff before a first retry: librdkafka caps retry.backoff.ms by retry.backoff.max.ms."""
        return min(_number(name, self.get(name, default)) for name, default in RETRY_BACKOFF_DEFAULTS.items())

    @property
    def classic_group(self) -> bool:
        return str(self.get("group.protocol", "classic")) == "classic"

    def for_several_topics(self) -> Settings:
        """A copy whose group gives each member a part of every topic, unless the user chose a strategy.

        cooperative-sticky counts partitions only: of two members one may get all partitions of one topic (measured: the
        second one joins 3 s after the first). roundrobin deals the partitions of all topics one by one, so neither
        the members' parts of a topic nor their totals differ by more than one. range gives each topic's first
        partitions to the first member: of topics with fewer partitions than members the others get nothing.
        """
        if not self.classic_group or STRATEGY in self.values:
            return self
        return self.with_values(**{STRATEGY: "roundrobin"})

    def _client(self, defaults: Mapping[str, Any], not_for: frozenset[str]) -> dict[str, Any]:
        values = {**COMMON_DEFAULTS, **defaults}
        values |= {k: v for k, v in self.values.items() if not k.startswith("eos.") and k not in not_for}
        return values

    def consumer(self) -> dict[str, Any]:
        """Configuration of the confluent-kafka consumer of one session."""
        values = self._client(CONSUMER_DEFAULTS, names.PRODUCER_ONLY)
        values |= {
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            # Where a partition begins is resolved by the session; all else out of range is an error, never a reset.
            "auto.offset.reset": "error",
        }
        if self.classic_group:
            values.setdefault(STRATEGY, "cooperative-sticky")
            values.setdefault("session.timeout.ms", 10_000)
            # A restart within the session timeout gets its partitions back without a rebalance, and a newer
            # instance is told apart from an own timeout. In the consumer protocol (KIP-848) the older member
            # wins instead and a restart is locked out for 45 s: there members stay dynamic. By the transactional.id
            # and not by the host: two loops of one group on one host would push each other out for ever.
            values.setdefault("group.instance.id", member_of(str(self.get("transactional.id") or self.instance)))
        return values

    def producer(self, transactional_id: str) -> dict[str, Any]:
        """Configuration of a transactional confluent-kafka producer."""
        values = self._client(PRODUCER_DEFAULTS, names.CONSUMER_ONLY)
        values.setdefault("message.timeout.ms", self.transaction_timeout_ms)
        return values | {"transactional.id": transactional_id, "enable.idempotence": True, "acks": "all"}

    def admin(self) -> dict[str, Any]:
        """Configuration of a confluent-kafka admin client."""
        return self.connection() | {"reconnect.backoff.max.ms": self["reconnect.backoff.max.ms"]}

    def connection(self) -> dict[str, Any]:
        """Only what an admin client needs to connect: addresses, TLS, SASL."""
        keep = (
            "bootstrap.servers",
            "client.id",
            "security.protocol",
            "ssl.",
            "sasl.",
            "enable.ssl.",
            "enable.sasl.",
            "https.",
            "oauth_cb",
            "socket.",
            "broker.address.",
        )
        return COMMON_DEFAULTS | {k: v for k, v in self.values.items() if k.startswith(keep)}


def alternate_of(transactional_id: str) -> str:
    """The transactional.id under which a producer is replaced on brokers before 4.0."""
    return f"{transactional_id}-alternate"


def member_of(transactional_id: str) -> str:
    """The group.instance.id of who has this transactional.id: the same text where Kafka takes it (as a topic's name:
    Topic.validate), else one as different from others' as this one is."""
    if re.fullmatch(r"[A-Za-z0-9._-]{1,249}", transactional_id) and transactional_id.strip("."):
        return transactional_id
    digest = hashlib.sha256(transactional_id.encode()).hexdigest()[:32]
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', transactional_id)[:200]}-{digest}"


def load(
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Settings of a command: eos.toml in the working directory (if there), then the environment, then flags."""
    values: dict[str, Any] = {}
    for _, given in sources(flags, environment, file):
        values |= given
    return Settings(values)


def settings_of(given: Settings | Mapping[str, Any]) -> Settings:
    """What a program's own code gives: Settings as they are, names and values as the strongest source of `load`."""
    return given if isinstance(given, Settings) else load(given)


def sources(
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> list[tuple[str, dict[str, Any]]]:
    """What each source gives, the weakest first, with its name as a user knows it; Kafka's aliases resolved."""
    path = file or Path("eos.toml")
    found: list[tuple[str, dict[str, Any]]] = []
    if file is not None or path.exists():
        found.append((str(path), _from_toml(path)))
    found.append(("environment", _from_environment(os.environ if environment is None else environment)))
    found.append(("command line", dict(flags or {})))
    return [(origin, {ALIASES.get(name, name): value for name, value in values.items()}) for origin, values in found]


def parse_flag(text: str) -> tuple[str, str]:
    """`name=value` of -X; raises ConfigurationError when there is no equals sign."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        # As much of it as can be a name: the rest may be a password.
        shown = re.split(r"[^\w.]", text.strip(), maxsplit=1)[0]
        raise ConfigurationError(f"-X {shown}: expected name=value, for example -X linger.ms=20")
    return name.strip(), value.strip()


def _from_toml(path: Path) -> dict[str, Any]:
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    return _flatten(tables, "")


def _flatten(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """TOML reads an unquoted a.b = 1 as a table; both spellings mean the dotted name. A list is Kafka's comma list."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= _flatten(value, f"{name}.")
        else:
            flat[name] = ",".join(map(str, value)) if isinstance(value, list) else value
    return flat


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """KAFKA_BOOTSTRAP_SERVERS, and EOS_TRANSACTION_INTERVAL_MS for eos.transaction.interval.ms."""
    values: dict[str, Any] = {}
    if servers := environment.get("KAFKA_BOOTSTRAP_SERVERS"):
        values["bootstrap.servers"] = servers
    variables = {name.upper().replace(".", "_"): name for name in OPTIONS}
    for variable, value in environment.items():
        if variable in variables:
            values[variables[variable]] = value
        elif variable.startswith("EOS_") and (meant := difflib.get_close_matches(variable, variables, 1, _MISSPELT)):
            # Others may have variables that begin so; one that is all but ours would go unheard.
            raise ConfigurationError(f"{variable} is not a setting; did you mean {meant[0]}?")
    return values


def _check(name: str, value: Any) -> None:
    if name.startswith("eos."):
        if name not in OPTIONS:
            raise ConfigurationError(f"{name} is not a setting{_suggest(name, OPTIONS, cutoff=0.0)}")
        return
    if name in NOT_FOR_USERS:
        raise ConfigurationError(f"{name} cannot be set: {NOT_FOR_USERS[name]}")
    known = names.CONSUMER_ONLY | names.PRODUCER_ONLY | names.COMMON | CALLBACKS
    if name not in known:
        raise ConfigurationError(f"{name} is not a setting of Kafka's clients{_suggest(name, known)}")
    if name == "bootstrap.servers" and not str(value).strip(" ,"):
        raise ConfigurationError("bootstrap.servers is empty: expected HOST:PORT[,HOST:PORT...]")
    if name == "bootstrap.servers" and (web := _WEB.search(str(value))):
        raise ConfigurationError(f"bootstrap.servers={value}: expected HOST:PORT[,HOST:PORT...], without {web[0]}")
    refusal = REFUSALS.get(name)
    if refusal and not _values(name, value) <= refusal.allowed:
        allowed = " or ".join(sorted(refusal.allowed))
        raise ConfigurationError(f"{name}={value} would break exactly-once (allowed: {allowed}): {refusal.reason}")


def _values(name: str, value: Any) -> frozenset[str]:
    """The value, or the values of the one name among the refusals that takes a list."""
    text = str(value).strip().lower()
    if name != STRATEGY:
        return frozenset([text])
    return frozenset(part.strip() for part in text.split(","))


def _check_timeouts(settings: Settings) -> None:
    """Settings that are wrong only together."""

    def number(name: str) -> int:
        return _number(name, settings.values[name])

    for name in READ_HERE:
        if name in settings.values:
            number(name)
    timeout_ms = _number("transaction.timeout.ms", settings["transaction.timeout.ms"])
    if timeout_ms < 1_000:
        raise ConfigurationError(f"transaction.timeout.ms={timeout_ms} is below 1000, the least Kafka's client takes")
    if "message.timeout.ms" in settings.values and not 0 < number("message.timeout.ms") <= timeout_ms:
        raise ConfigurationError(
            f"message.timeout.ms={number('message.timeout.ms')} must be between 1 and transaction.timeout.ms="
            f"{timeout_ms}: a record must not be sent after the broker ended its transaction"
        )
    # The signs of a possible retry (eos/session/producer/retry_evidence.py).
    for name in RETRY_BACKOFF_DEFAULTS:
        if name in settings.values and number(name) < MINIMUM_RETRY_BACKOFF_MS:
            raise ConfigurationError(
                f"{name}={number(name)} is below {MINIMUM_RETRY_BACKOFF_MS}: a retried commit could not be told from a "
                "fast one; raise it"
            )
    if "statistics.interval.ms" in settings.values and not 0 < number("statistics.interval.ms") <= 1_000:
        raise ConfigurationError(
            f"statistics.interval.ms={number('statistics.interval.ms')} must be between 1 and 1000: the statistics "
            "show whether a request may have been sent twice"
        )
    if settings["eos.transaction.interval.ms"] > timeout_ms // 2:
        raise ConfigurationError(
            f"eos.transaction.interval.ms={settings['eos.transaction.interval.ms']} must be at most half of "
            f"transaction.timeout.ms={timeout_ms}"
        )
    if not settings.classic_group and "group.instance.id" in settings.values:
        raise ConfigurationError(
            "group.instance.id cannot be used with group.protocol=consumer: after a kill the broker locks "
            "the restarted member out for its whole session timeout"
        )


def _number(name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name}={value} is not a number") from error


def _suggest(name: str, known: Any, cutoff: float = 0.75) -> str:
    """`cutoff` 0 names the nearest however far it is: of a few names of ours one is nearly always a help."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


def _reason(error: Exception) -> str:
    text = str(error)
    return text if text.startswith("must") else "is not a number"
