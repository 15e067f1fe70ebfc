"""Reads and checks settings, and builds the configuration of each client from them.

Owns the names, the defaults and the refusals. Kafka's dotted names are passed verbatim to confluent-kafka; names
that begin with `eos.` are ours. A setting that contradicts exactly-once is refused with its reason (exit 78),
never silently overwritten. This module must never talk to Kafka.

Sources, weakest first: defaults < eos.toml < environment (KAFKA_BOOTSTRAP_SERVERS, EOS_…) < flags (-X name=value), or
values passed by code (`to_settings`).
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
from eos.kafka.client import librdkafka_names

# With a shorter backoff, the duration of a call does not show whether the call was retried.
MINIMUM_RETRY_BACKOFF_MS = 50
RETRY_BACKOFF_DEFAULTS = {"retry.backoff.ms": 100, "retry.backoff.max.ms": 1000}  # librdkafka's
# After a slow call the next transaction waits for the statistics. With 8 partitions, 100 ms costs 0.1 % more of a
# processor than 200 ms; with 500 partitions, 0.6 % more. 50 ms costs twice that.
STATISTICS_INTERVAL_MS = 100
_MISSPELLING_CUTOFF = 0.9  # similarity from which a variable counts as a misspelt variable of eos
# librdkafka accepts only these four protocols before an address. The pattern matches any other.
_URL_SCHEME = re.compile(r"\b(?!(?:plaintext|ssl|sasl_plaintext|sasl_ssl):)[a-z_]+://", re.IGNORECASE)
STRATEGY = "partition.assignment.strategy"
# Kafka's settings that we use as numbers ourselves, before a client could refuse an invalid one.
PARSED_HERE = ("max.poll.interval.ms", "session.timeout.ms", "topic.metadata.refresh.interval.ms")


@dataclass(frozen=True)
class Option:
    """Describes one setting of eos: its default, how its text is parsed, and its meaning (for `--help` and docs)."""

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
    "eos.transaction.interval.ms": Option(100, _at_least(1), "how long one transaction collects and handles records"),
    "eos.transaction.max.records": Option(200_000, _at_least(1), "maximum number of input records of one transaction"),
    # With fewer records of 100 B the calls cost more, and with more records the batch no longer fits in the processor's
    # cache (docs/engineering/measurements.md).
    "eos.batch.max.records": Option(
        1_000, _at_least(1), "maximum number of records passed to a batch function at once"
    ),
    "eos.async.max.records": Option(
        100, _at_least(1), "maximum number of records that an `async def` function handles at once"
    ),
    "eos.headers.pass": Option(
        "traceparent,tracestate",
        str,
        "headers that outputs copy from their input record, separated by commas; not in batch functions",
    ),
    "eos.lineage": Option(
        False,
        _boolean,
        "name each output's input in a header, and add counts to the offset metadata, for `eos verify`",
    ),
    "eos.otel.spans": Option(
        False,
        _boolean,
        "one OpenTelemetry span per transaction, sent to the exporter that the process configured (extra `otel`)",
    ),
    "eos.places.topic": Option(
        "__eos_places",
        str,
        "compacted topic that shows whether a group without committed offsets ran before (its offsets expired) or "
        "never ran",
    ),
    "eos.state.dir": Option(
        "~/.local/state/eos",
        str,
        "folder in which workers keep the state of functions, so that a restart reads only new changes; an empty "
        "value keeps state in memory",
    ),
    "eos.state.engine": Option(
        "lmdb",
        _one_of("lmdb", "rocksdb"),
        "storage engine of state in the folder: lmdb, or rocksdb for state larger than memory (`eos-kafka[rocksdb]`)",
    ),
    "eos.state.memory.bytes": Option(
        64 << 20, _at_least(1 << 20), "memory that rocksdb uses in each worker, for all of its partitions"
    ),
    "eos.state.cleanup.delay.ms": Option(
        86_400_000,
        _at_least(0),
        "how long the folder of a partition that moved to another machine is kept after its last use; a value of 0 "
        "keeps it forever",
    ),
    "eos.create.topics": Option(
        False,
        _boolean,
        "create missing topics at the start, and dead-letter topics for new topics that match a pattern",
    ),
    "eos.create.tables": Option(
        False, _boolean, "create missing tables, columns and unique keys of functions that write rows, at the start"
    ),
    "eos.strict": Option(
        False, _boolean, "refuse to start on a cluster that can lose acknowledged records, instead of warning"
    ),
    "eos.startup.timeout.ms": Option(25_000, _at_least(1_000), "how long to try to reach the cluster at the start"),
    "eos.database.timeout.ms": Option(
        300_000, _at_least(0), "how long a worker waits for a database that is away before it exits with 75"
    ),
    "eos.shutdown.timeout.ms": Option(
        30_000, _at_least(0), "how long a stop may take before the transaction is aborted"
    ),
    "eos.liveness.timeout.ms": Option(
        60_000, _at_least(1_000), "how long a function or a call may block a worker before /livez fails"
    ),
    "eos.spark.driver.bytes": Option(
        256_000,
        _at_least(0),
        "Spark's driver writes a batch itself if the batch before had fewer bytes than this; 0: always by tasks",
    ),
    "eos.spark.claims.port": Option(
        0, _at_least(0), "port of Spark's driver for requests of writing tasks, or one of the 16 ports after it; 0: any"
    ),
    "eos.call.timeout.ms": Option(
        5_000, _at_least(100), "timeout of one attempt of a transactional call; 5 s later the call counts as hung"
    ),
}

FUNCTION_OPTIONS = (
    "eos.headers.pass",
    "eos.otel.spans",
    "eos.state.dir",
    "eos.state.engine",
    "eos.state.memory.bytes",
    "eos.state.cleanup.delay.ms",
    "eos.database.timeout.ms",
)
"""Settings that only affect an App's functions, and have no effect in a user's loop over a session."""


@dataclass(frozen=True)
class Refusal:
    """Restricts a Kafka setting to the values that keep exactly-once, with the reason."""

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
        _only("false"), "offsets are committed inside the transaction; an automatic commit loses records"
    ),
    "enable.auto.offset.store": Refusal(_only("false"), "offsets are committed inside the transaction"),
    "enable.idempotence": Refusal(_only("true"), "a transaction needs the idempotent producer"),
    "acks": Refusal(_only("all", "-1"), "a record that only the leader has stored is lost with the leader"),
    "auto.offset.reset": Refusal(
        _only("earliest", "latest"),
        "it decides only where a partition without a committed offset begins",
    ),
    "enable.partition.eof": Refusal(_only("true", "false"), "eos sets it when it is needed"),
    "delivery.report.only.error": Refusal(_only("true"), "the session counts records itself"),
    "group.protocol": Refusal(_only("classic", "consumer"), "Kafka has no other group protocol"),
    STRATEGY: Refusal(_only("cooperative-sticky", "range", "roundrobin"), "only these strategies are tested"),
    "enable.gapless.guarantee": Refusal(_only("false"), "it makes errors fatal that an abort could resolve"),
}

RESERVED: dict[str, str] = {
    "max.in.flight": "the idempotent producer keeps order only with librdkafka's value",
    "max.in.flight.requests.per.connection": "the idempotent producer keeps order only with librdkafka's value",
    "retries": "a retry under the same sequence number is what makes the producer idempotent",
    "message.send.max.retries": "a retry under the same sequence number is what makes the producer idempotent",
    "on_delivery": "the session handles delivery errors itself",
    "dr_cb": "the session handles delivery errors itself",
    "dr_msg_cb": "the session handles delivery errors itself",
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
# Never shown in logs, errors or `eos config`.
SECRETS = frozenset(
    """
    sasl.password sasl.oauthbearer.config sasl.oauthbearer.client.secret
    sasl.oauthbearer.client.credentials.client.secret sasl.oauthbearer.assertion.private.key.passphrase
    sasl.oauthbearer.assertion.private.key.pem ssl.key.password ssl.key.pem ssl.keystore.password ssl_key
    """.split()  # noqa: SIM905
)
# confluent-kafka's own settings, which librdkafka does not list.
CALLBACKS = frozenset({"stats_cb", "error_cb", "throttle_cb", "oauth_cb", "logger"})

CONSUMER_DEFAULTS: dict[str, Any] = {
    # The pause in fetching while the prefetch queue is full. With librdkafka's default of 1000 a backlog takes 3.7
    # times as long.
    "fetch.queue.backoff.ms": 5,
    # Java's default. librdkafka's false delivers damaged values, and silently drops records of a damaged batch.
    "check.crcs": True,
}
PRODUCER_DEFAULTS: dict[str, Any] = {
    "transaction.timeout.ms": 10_000,
    # A call that took longer than this backoff may have been retried, so the session waits for the next statistics. On
    # a busy machine a healthy commit can take longer than librdkafka's default of 100 ms.
    "retry.backoff.ms": 250,
    # librdkafka's idempotent producer has one request per partition in flight and spins as soon as more are due
    # (confluentinc/librdkafka#4989). The end of a transaction does not wait for the delay, but sends the records held
    # back. With much more than 10 ms, these records have left the processor's cache by then
    # (docs/engineering/measurements.md).
    "linger.ms": 10,
    # Below message.timeout.ms, so that a missing topic is reported as such and not as a timeout.
    "topic.metadata.propagation.max.ms": 5_000,
    # Java's partitioner, so that a key selects the same partition as with other clients of the topic.
    "partitioner": "murmur2_random",
}
COMMON_DEFAULTS: dict[str, Any] = {
    "bootstrap.servers": "127.0.0.1:9092",
    # librdkafka's default of 10 s makes one lost connection look like a hung call.
    "reconnect.backoff.max.ms": 1_000,
    # A new client of librdkafka waits half of this time before its first connection, at least 11 ms (seen in its debug
    # log). Its default of 100 ms makes each start slower: a start has four clients, one after another.
    "reconnect.backoff.ms": 20,
}


class Settings:
    """Holds a checked, immutable set of settings; `values` has Kafka's and our dotted names.

    Raises ConfigurationError for an unknown name, an invalid value, or one that would break exactly-once.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, **more: Any) -> None:
        given = {ALIASES.get(name, name): value for name, value in {**(values or {}), **more}.items()}
        for name, value in given.items():
            _check(name, value)
            if name in REFUSALS and isinstance(value, str):
                # librdkafka ignores case and spaces too; values are compared verbatim from here on.
                given[name] = value.strip().lower()
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
        """Return an option of eos (typed), or a Kafka setting as configured, or eos's default. Raise KeyError for
        others."""
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
        """Return a copy with more settings, for example `with_values(**{"group.id": "g"})`."""
        return Settings({**self.values, **more})

    def without(self, *names: str) -> Settings:
        """Return a copy in which these settings have their defaults."""
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
        """Return the shortest backoff before a first retry; librdkafka caps it at retry.backoff.max.ms."""
        return min(_parse_int(name, self.get(name, default)) for name, default in RETRY_BACKOFF_DEFAULTS.items())

    @property
    def classic_group(self) -> bool:
        return str(self.get("group.protocol", "classic")) == "classic"

    def with_multi_topic_assignment(self) -> Settings:
        """Return a copy whose group assigns each member a part of every topic, unless the user chose a strategy.

        cooperative-sticky counts partitions only: one of two members may get all partitions of one topic (measured: the
        second one joins 3 s after the first). roundrobin distributes the partitions of all topics one by one, so
        neither the members' parts of a topic nor their totals differ by more than one. range gives each topic's first
        partitions to the first member: if topics have fewer partitions than members, the other members get nothing.
        """
        if not self.classic_group or STRATEGY in self.values:
            return self
        return self.with_values(**{STRATEGY: "roundrobin"})

    def _client(self, defaults: Mapping[str, Any], not_for: frozenset[str]) -> dict[str, Any]:
        values = {**COMMON_DEFAULTS, **defaults}
        values |= {k: v for k, v in self.values.items() if not k.startswith("eos.") and k not in not_for}
        return values

    def consumer(self) -> dict[str, Any]:
        """Return the configuration of a session's confluent-kafka consumer."""
        values = self._client(CONSUMER_DEFAULTS, librdkafka_names.PRODUCER_ONLY)
        values |= {
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            # The session decides where a partition begins. If a later offset is out of range, that must be an error and
            # not a reset.
            "auto.offset.reset": "error",
        }
        if self.classic_group:
            values.setdefault(STRATEGY, "cooperative-sticky")
            values.setdefault("session.timeout.ms", 10_000)
            # Static membership: a restart within the session timeout keeps its partitions without a rebalance, and a
            # newer instance can be distinguished from our own timeout. In the consumer protocol (KIP-848) the older
            # member wins instead and locks a restart out for 45 s, so members stay dynamic there. The name comes from
            # the transactional.id and not from the host, because two loops of one group on one host would fence each
            # other forever.
            values.setdefault("group.instance.id", instance_id_for(str(self.get("transactional.id") or self.instance)))
        return values

    def producer(self, transactional_id: str) -> dict[str, Any]:
        """Return the configuration of a transactional confluent-kafka producer."""
        values = self._client(PRODUCER_DEFAULTS, librdkafka_names.CONSUMER_ONLY)
        values.setdefault("message.timeout.ms", self.transaction_timeout_ms)
        return values | {"transactional.id": transactional_id, "enable.idempotence": True, "acks": "all"}

    def admin(self) -> dict[str, Any]:
        """Return the configuration of a confluent-kafka admin client."""
        return self.connection() | {name: self[name] for name in ("reconnect.backoff.ms", "reconnect.backoff.max.ms")}

    def connection(self) -> dict[str, Any]:
        """Return only the settings that an admin client needs to connect: addresses, TLS, SASL."""
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


def alternate_transactional_id(transactional_id: str) -> str:
    """Return the transactional.id of a replacement producer on brokers before 4.0."""
    return f"{transactional_id}-alternate"


def instance_id_for(transactional_id: str) -> str:
    """Return the group.instance.id of the member with this transactional.id.

    It is the transactional.id itself if Kafka accepts that as a name (Topic.validate), otherwise a name with its
    hash."""
    if re.fullmatch(r"[A-Za-z0-9._-]{1,249}", transactional_id) and transactional_id.strip("."):
        return transactional_id
    digest = hashlib.sha256(transactional_id.encode()).hexdigest()[:32]
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', transactional_id)[:200]}-{digest}"


def load(
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Return a command's settings: from eos.toml in the working directory (if any), the environment, then flags."""
    values: dict[str, Any] = {}
    for _, given in read_sources(flags, environment, file):
        values |= given
    return Settings(values)


def to_settings(given: Settings | Mapping[str, Any]) -> Settings:
    """Return Settings unchanged, and load a mapping as the source that overrides all others (see `load`)."""
    return given if isinstance(given, Settings) else load(given)


def read_sources(
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> list[tuple[str, dict[str, Any]]]:
    """Return each source's name and settings, the weakest first, with Kafka's aliases resolved."""
    path = file or Path("eos.toml")
    found: list[tuple[str, dict[str, Any]]] = []
    if file is not None or path.exists():
        found.append((str(path), _from_toml(path)))
    found.append(("environment", _from_environment(os.environ if environment is None else environment)))
    found.append(("command line", dict(flags or {})))
    return [(origin, {ALIASES.get(name, name): value for name, value in values.items()}) for origin, values in found]


def parse_flag(text: str) -> tuple[str, str]:
    """Return name and value of `-X name=value`. Raise ConfigurationError if there is no equals sign."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        # Shows only the part that can be a name: the rest may be a password.
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
    """Return the table with dotted names, because TOML parses an unquoted a.b = 1 as a table. Join lists by commas."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= _flatten(value, f"{name}.")
        else:
            flat[name] = ",".join(map(str, value)) if isinstance(value, list) else value
    return flat


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return settings from KAFKA_BOOTSTRAP_SERVERS and EOS_…, such as EOS_TRANSACTION_INTERVAL_MS."""
    values: dict[str, Any] = {}
    if servers := environment.get("KAFKA_BOOTSTRAP_SERVERS"):
        values["bootstrap.servers"] = servers
    variables = {name.upper().replace(".", "_"): name for name in OPTIONS}
    for variable, value in environment.items():
        if variable in variables:
            values[variables[variable]] = value
        elif variable.startswith("EOS_") and (
            meant := difflib.get_close_matches(variable, variables, 1, _MISSPELLING_CUTOFF)
        ):
            # Other programs may have variables with this prefix, but a misspelt variable of eos must not be ignored.
            raise ConfigurationError(f"{variable} is not a setting; did you mean {meant[0]}?")
    return values


def _check(name: str, value: Any) -> None:
    if name.startswith("eos."):
        if name not in OPTIONS:
            raise ConfigurationError(f"{name} is not a setting{_suggest(name, OPTIONS, cutoff=0.0)}")
        return
    if name in RESERVED:
        raise ConfigurationError(f"{name} cannot be set: {RESERVED[name]}")
    known = librdkafka_names.CONSUMER_ONLY | librdkafka_names.PRODUCER_ONLY | librdkafka_names.COMMON | CALLBACKS
    if name not in known:
        raise ConfigurationError(f"{name} is not a Kafka client setting{_suggest(name, known)}")
    if name == "bootstrap.servers" and not str(value).strip(" ,"):
        raise ConfigurationError("bootstrap.servers is empty: expected HOST:PORT[,HOST:PORT...]")
    if name == "bootstrap.servers" and (web := _URL_SCHEME.search(str(value))):
        raise ConfigurationError(f"bootstrap.servers={value}: expected HOST:PORT[,HOST:PORT...], without {web[0]}")
    refusal = REFUSALS.get(name)
    if refusal and not _split_values(name, value) <= refusal.allowed:
        allowed = " or ".join(sorted(refusal.allowed))
        raise ConfigurationError(f"{name}={value} would break exactly-once (allowed: {allowed}): {refusal.reason}")


def _split_values(name: str, value: Any) -> frozenset[str]:
    """Return the set of values that a setting has: several for STRATEGY, otherwise one."""
    text = str(value).strip().lower()
    if name != STRATEGY:
        return frozenset([text])
    return frozenset(part.strip() for part in text.split(","))


def _check_timeouts(settings: Settings) -> None:
    """Raise ConfigurationError for timeouts that are out of range or contradict each other."""

    def number(name: str) -> int:
        return _parse_int(name, settings.values[name])

    for name in PARSED_HERE:
        if name in settings.values:
            number(name)
    timeout_ms = _parse_int("transaction.timeout.ms", settings["transaction.timeout.ms"])
    if timeout_ms < 1_000:
        raise ConfigurationError(f"transaction.timeout.ms={timeout_ms} is below 1000, the client's minimum: raise it")
    if "message.timeout.ms" in settings.values and not 0 < number("message.timeout.ms") <= timeout_ms:
        raise ConfigurationError(
            f"message.timeout.ms={number('message.timeout.ms')} must be between 1 and transaction.timeout.ms="
            f"{timeout_ms}: a record must not be sent after the broker ended its transaction"
        )
    # eos/session/producer/retry_evidence.py recognises a retried call by these pauses.
    for name in RETRY_BACKOFF_DEFAULTS:
        if name in settings.values and number(name) < MINIMUM_RETRY_BACKOFF_MS:
            raise ConfigurationError(
                f"{name}={number(name)} is below {MINIMUM_RETRY_BACKOFF_MS}: with so short a pause, the duration of "
                "a commit does not show whether the client retried it; raise it"
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


def _parse_int(name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name}={value} is not a number") from error


def _suggest(name: str, known: Any, cutoff: float = 0.75) -> str:
    """Return "; did you mean NAME?" for the most similar known name, or "" below the cutoff (0: always a name)."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


def _reason(error: Exception) -> str:
    text = str(error)
    return text if text.startswith("must") else "is not a number"
