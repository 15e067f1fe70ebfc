"""Define the configuration of a local Kafka node: server.properties and its logging, as data and text.

The module owns every broker setting of a local cluster that differs from Kafka's defaults, with the reason. It must
never touch a file, a socket or a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eos.broker.jars import parse_version

HOST = "127.0.0.1"


@dataclass(frozen=True)
class NodePorts:
    """Hold the ports of one node. Clients of the listener `proxied` get the port `advertised_proxied` instead."""

    client: int
    controller: int
    proxied: int | None = None
    advertised_proxied: int | None = None

    def all(self) -> list[int]:
        return [port for port in (self.client, self.controller, self.proxied) if port is not None]


def server_properties(
    index: int, ports: Sequence[NodePorts], log_dir: Path, version: str, overrides: Mapping[str, object]
) -> dict[str, str]:
    """Return all properties of node `index`, which is also its node.id, in a cluster of `len(ports)` combined nodes."""
    properties = _layout(index, ports, log_dir) | _replication(len(ports)) | _small_and_fast()
    if parse_version(version)[0] >= 4:
        properties |= {"share.coordinator.state.topic.num.partitions": 4}
    return {name: str(value) for name, value in (properties | dict(overrides)).items()}


def _layout(index: int, ports: Sequence[NodePorts], log_dir: Path) -> dict[str, object]:
    return {
        "process.roles": "broker,controller",
        "node.id": index,
        "controller.quorum.voters": ",".join(f"{i}@{HOST}:{p.controller}" for i, p in enumerate(ports)),
        "log.dirs": log_dir,
        **_listeners(ports[index]),
    }


def _listeners(ports: NodePorts) -> dict[str, object]:
    listen = {"PLAINTEXT": ports.client, "CONTROLLER": ports.controller}
    advertise = {"PLAINTEXT": ports.client}
    if ports.proxied is not None and ports.advertised_proxied is not None:
        # The listener advertises the proxy's port, so all connections of a client that bootstraps at the proxy go
        # through it, and the proxy need not rewrite responses.
        listen["PROXIED"], advertise["PROXIED"] = ports.proxied, ports.advertised_proxied
    return {
        "listeners": ",".join(f"{name}://{HOST}:{port}" for name, port in listen.items()),
        "advertised.listeners": ",".join(f"{name}://{HOST}:{port}" for name, port in advertise.items()),
        "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in listen),
        "inter.broker.listener.name": "PLAINTEXT",
        "controller.listener.names": "CONTROLLER",
    }


DERIVED_SETTINGS = _layout(0, [NodePorts(0, 0)], Path()).keys()
"""Settings that follow from the nodes, ports and directories and cannot be overridden."""

AUTHORIZER_SETTINGS = ("super.users", "allow.everyone.if.no.acl.found")
"""Settings of Kafka's StandardAuthorizer, which are not in the brokers' list."""
UNLISTED_PREFIXES = ("listener.name.", "unstable.")
"""Prefixes of settings that are not in the list: those of one listener, and Kafka's unstable ones."""


def _replication(nodes: int) -> dict[str, object]:
    copies, in_sync = (1, 1) if nodes == 1 else (3, 2)
    internal = ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic")
    settings: dict[str, object] = {f"{topic}.replication.factor": copies for topic in internal}
    settings |= {
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.min.isr": in_sync,
        "default.replication.factor": copies,
        "min.insync.replicas": in_sync,
    }
    # The session timeout decides how soon the cluster notices a killed node. It also decides how long the controller
    # rejects a node that is restarted at once, because it waits for the old session to time out. On a single node only
    # the second effect matters. The heartbeat interval must be at most half of the session timeout.
    session_ms, heartbeat_ms = (3000, 500) if nodes == 1 else (6000, 1000)
    settings |= {"broker.session.timeout.ms": session_ms, "broker.heartbeat.interval.ms": heartbeat_ms}
    return settings


def _small_and_fast() -> dict[str, object]:
    return {
        # A misspelt topic must be an error, not a new topic with one partition.
        "auto.create.topics.enable": "false",
        "offsets.topic.num.partitions": 8,
        "transaction.state.log.num.partitions": 8,
        # The first rebalance of a group need not wait for further members.
        "group.initial.rebalance.delay.ms": 0,
        # Allow clients to notice a dead member within about a second, with either group protocol.
        "group.min.session.timeout.ms": 500,
        "group.consumer.min.session.timeout.ms": 2000,
        "group.consumer.min.heartbeat.interval.ms": 500,
        # Abort a transaction within half a second after its timeout, instead of ten seconds.
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": 500,
        # Three JVMs may share two cores, so each gets few threads, and less than 128 MB of heap for the log cleaner's
        # map.
        "num.network.threads": 2,
        "num.io.threads": 4,
        "background.threads": 4,
        "log.cleaner.dedupe.buffer.size": 16 * 1024 * 1024,
    }


def render(properties: Mapping[str, str]) -> str:
    """Format a Java properties file in ASCII, with backslashes and all other characters escaped."""
    return "".join(f"{name}={_escape(value)}\n" for name, value in properties.items())


def _escape(value: str) -> str:
    utf16 = value.replace("\\", "\\\\").encode("utf-16-be")
    units = (int.from_bytes(utf16[i : i + 2]) for i in range(0, len(utf16), 2))
    return "".join(chr(unit) if 0x20 <= unit < 0x7F else f"\\u{unit:04x}" for unit in units)


def logging_options(version: str, directory: Path) -> tuple[dict[str, str], list[str]]:
    """Return the logging configuration (file name -> text) of this version, and the JVM options that name it."""
    if parse_version(version)[0] < 4:
        name, content = "log4j.properties", _LOG4J_1
        option = f"-Dlog4j.configuration={(directory / name).as_uri()}"
    else:
        name, content = "log4j2.properties", _LOG4J_2
        option = f"-Dlog4j2.configurationFile={(directory / name).as_uri()}"
    return {name: content}, [option, f"-Deos.log={directory / 'server.log'}"]


# Loggers with a line at INFO for every topic, snapshot or reconnect to a killed node.
_NOISY = (
    "kafka.log",
    "kafka.coordinator.group.GroupMetadataManager",
    "org.apache.kafka.storage.internals.log",
    "org.apache.kafka.coordinator.common.runtime",
    "org.apache.kafka.common.config.AbstractConfig",
    "org.apache.kafka.image",
    "org.apache.kafka.server.config.KafkaConfig",
    "kafka.server.KafkaConfig",
    "kafka.utils.Log4jControllerRegistration",
    "org.apache.zookeeper",
    "state.change.logger",
)

# This logger has a line at WARN for each attempt to reach a killed node.
_VERY_NOISY = "org.apache.kafka.clients.NetworkClient"
_LEVELS = dict.fromkeys(_NOISY, "WARN") | {_VERY_NOISY: "ERROR"}

_PATTERN = "%d %-5p [%t] %c{1}: %m%n"

# This is log4j's properties format, because YAML would need a parser that log4j does not contain.
_LOG4J_2 = f"""\
status = warn
appender.file.type = File
appender.file.name = file
appender.file.fileName = ${{sys:eos.log}}
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = {_PATTERN}
rootLogger.level = info
rootLogger.appenderRef.file.ref = file
""" + "".join(
    f"logger.n{number}.name = {name}\nlogger.n{number}.level = {level}\n"
    for number, (name, level) in enumerate(_LEVELS.items())
)

_LOG4J_1 = f"""\
log4j.rootLogger=INFO, file
log4j.appender.file=org.apache.log4j.FileAppender
log4j.appender.file.File=${{eos.log}}
log4j.appender.file.layout=org.apache.log4j.PatternLayout
log4j.appender.file.layout.ConversionPattern={_PATTERN}
""" + "".join(f"log4j.logger.{name}={level}\n" for name, level in _LEVELS.items())
