"""The parts of the local broker that need no Kafka: rendered files, refused settings and error messages."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import requests

from eos.broker import archive, jars, java, node
from eos.broker.detached import DetachedKafka, NodeState, State, _wait_for_ports, command_line
from eos.broker.jars import coordinates, kafka_jars
from eos.broker.local import LocalKafka, choose_ports, persistent_cluster_id
from eos.broker.node import Node, free_ports, is_free, require_free
from eos.broker.properties import NodePorts, logging_options, render, server_properties
from eos.errors import ConfigurationError, Unavailable
from eos.testing.clusters import NotSupported
from eos.testing.clusters.jvm import JvmCluster

ONE = [NodePorts(9092, 19092)]
THREE = [NodePorts(9092 + i, 19092 + i) for i in range(3)]
LOG_DIR = Path("/data")


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


# the JVM


def test_jvm_options_come_from_kafkas_environment_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KAFKA_JVM_PERFORMANCE_OPTS", "-XX:+UseSerialGC '-Dname=two words'")
    assert node.jvm_options() == ["-XX:+UseSerialGC", "-Dname=two words"]
    monkeypatch.setenv("KAFKA_JVM_PERFORMANCE_OPTS", "")
    assert node.jvm_options() == ["-Xms256m", "-XX:+UseSerialGC"]


def test_class_archive_is_used_only_for_its_java_and_jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    java, other = tmp_path / "17" / "bin" / "java", tmp_path / "21" / "bin" / "java"

    def archive_options(java: Path, *jars: str) -> list[str]:
        command = Node(0, tmp_path, "4.3.1", java, [*map(Path, jars)])._java_command([], "kafka.Kafka")
        return [option for option in command if "SharedArchiveFile" in option]

    made = node.class_archive_path(java, [Path("a.jar"), Path("b.jar")])
    assert archive_options(java, "a.jar", "b.jar") == []
    made.parent.mkdir(parents=True)
    made.touch()
    assert archive_options(java, "a.jar", "b.jar") == [f"-XX:SharedArchiveFile={made}"]
    assert archive_options(java, "a.jar") == archive_options(other, "a.jar", "b.jar") == []


@pytest.mark.parametrize("whole", [True, False])
def test_incomplete_class_archive_is_deleted(whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A JVM with a damaged archive crashes, and with it every start of a broker."""
    java = tmp_path / "java"
    java.write_text(f"#!/bin/sh\nexit {0 if whole else 134}\n")
    java.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(archive, "find_java", lambda: java)
    monkeypatch.setattr(archive, "kafka_jars", lambda version: [Path("a.jar")])
    monkeypatch.setattr(archive, "_write_archive", lambda version, part: part.touch())
    monkeypatch.setattr(archive, "_format", lambda *_: None)
    path = node.class_archive_path(java, [Path("a.jar")])
    path.parent.mkdir(parents=True)
    if whole:
        assert archive.create("4.3.1") == path
    else:
        with pytest.raises(Unavailable, match="is incomplete"):
            archive.create("4.3.1")
    assert path.exists() is whole
    assert not path.with_suffix(".part").exists()


def test_copied_storage_has_its_own_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    storage = node.storage_copy_path(tmp_path / "java", [])
    storage.mkdir(parents=True)
    (storage / "bootstrap.checkpoint").write_bytes(b"features")
    (storage / node.META).write_text("#\nnode.id=0\ndirectory.id=once\nversion=1\ncluster.id=another\n")

    def told(index: int) -> dict[str, str]:
        made = Node(index, tmp_path / str(index), "4.4.0", tmp_path / "java", [])
        assert made.begin_format("ours") is None, "no tool is started"
        assert (made.directory / "data" / "bootstrap.checkpoint").read_bytes() == b"features"
        lines = (made.directory / "data" / node.META).read_text().splitlines()
        return dict(line.split("=") for line in lines if "=" in line)

    first, second = told(1), told(2)
    assert first.keys() == {"node.id", "directory.id", "version", "cluster.id"}
    assert (first["node.id"], second["node.id"], first["cluster.id"]) == ("1", "2", "ours")
    assert len({"once", first["directory.id"], second["directory.id"]}) == 3


def test_failure_reason_is_the_first_error(tmp_path: Path) -> None:
    slow = "ERROR [quorum-controller-0-event-handler] EventPerformanceMonitor: Exceptionally slow controller event"
    ended = Node(0, tmp_path, "4.4.0", tmp_path / "java", [])
    ended.log_path.write_text(
        f"1 INFO  [main] a\n2 {slow}\n3 ERROR [main] KafkaServer: no\njava.lang.Error: why\n4 FATAL b\n"
    )
    assert ended.failure_reason() == "3 ERROR [main] KafkaServer: no: java.lang.Error: why"
    ended.log_path.write_text(f"2 {slow}\n")
    ended.stdout_path.write_text("killed\n")
    assert ended.failure_reason() == "killed"


@pytest.mark.parametrize("before", [None, "-Xms1g"])
def test_archive_creation_restores_jvm_options(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(node.JVM_OPTIONS, raising=False)
    if before:
        monkeypatch.setenv(node.JVM_OPTIONS, before)
    with pytest.raises(ZeroDivisionError), archive._jvm_options("-XX:ArchiveClassesAtExit=here"):
        assert node.jvm_options() == ["-XX:ArchiveClassesAtExit=here"]
        _ = 1 // 0
    assert os.environ.get(node.JVM_OPTIONS) == before


# server.properties


def test_single_node_has_one_voter_and_one_replica() -> None:
    properties = server_properties(0, ONE, LOG_DIR, "4.3.1", {})
    assert properties["process.roles"] == "broker,controller"
    assert properties["controller.quorum.voters"] == "0@127.0.0.1:19092"
    assert properties["listeners"] == "PLAINTEXT://127.0.0.1:9092,CONTROLLER://127.0.0.1:19092"
    assert properties["advertised.listeners"] == "PLAINTEXT://127.0.0.1:9092"
    for name in ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic"):
        assert properties[f"{name}.replication.factor"] == "1"
    assert properties["transaction.state.log.min.isr"] == "1"


def test_three_nodes_have_three_voters_and_two_in_sync() -> None:
    rendered = [server_properties(i, THREE, LOG_DIR, "4.3.1", {}) for i in range(3)]
    assert {p["controller.quorum.voters"] for p in rendered} == {
        "0@127.0.0.1:19092,1@127.0.0.1:19093,2@127.0.0.1:19094"
    }
    assert [p["node.id"] for p in rendered] == ["0", "1", "2"]
    assert {(p["default.replication.factor"], p["min.insync.replicas"]) for p in rendered} == {("3", "2")}
    assert {p["transaction.state.log.min.isr"] for p in rendered} == {"2"}


@pytest.mark.parametrize("ports", [ONE, THREE])
def test_heartbeat_is_at_most_half_of_the_session(ports: list[NodePorts]) -> None:
    properties = server_properties(0, ports, LOG_DIR, "4.3.1", {})
    assert 2 * int(properties["broker.heartbeat.interval.ms"]) <= int(properties["broker.session.timeout.ms"]) <= 6000


def test_proxied_listener_advertises_the_proxy() -> None:
    ports = [NodePorts(9092, 19092, proxied=29092, advertised_proxied=39092)]
    properties = server_properties(0, ports, LOG_DIR, "4.3.1", {})
    assert "PROXIED://127.0.0.1:29092" in properties["listeners"].split(",")
    assert properties["advertised.listeners"] == "PLAINTEXT://127.0.0.1:9092,PROXIED://127.0.0.1:39092"
    assert "PROXIED:PLAINTEXT" in properties["listener.security.protocol.map"].split(",")


def test_given_property_overrides_the_default() -> None:
    properties = server_properties(0, ONE, LOG_DIR, "4.3.1", {"offsets.topic.num.partitions": 3, "x": "y"})
    assert (properties["offsets.topic.num.partitions"], properties["x"]) == ("3", "y")


def test_properties_file_escapes_special_characters() -> None:
    assert render({"log.dirs": "/ü\\a\n𝄞"}) == "log.dirs=/\\u00fc\\\\a\\u000a\\ud834\\udd1e\n"


def test_each_major_version_has_its_logging_configuration() -> None:
    for version, name, option in [
        ("3.9.2", "log4j.properties", "-Dlog4j.configuration=file:///data/log4j.properties"),
        ("4.3.1", "log4j2.properties", "-Dlog4j2.configurationFile=file:///data/log4j2.properties"),
    ]:
        files, options = logging_options(version, LOG_DIR)
        assert list(files) == [name]
        assert options == [option, "-Deos.log=/data/server.log"]


@pytest.mark.parametrize("version", ["3.9.2", "4.3.1"])
def test_refused_connections_are_not_logged(version: str) -> None:
    files, _ = logging_options(version, LOG_DIR)
    (text,) = files.values()
    name = re.escape("org.apache.kafka.clients.NetworkClient")
    one_line = rf"^log4j\.logger\.{name}=ERROR$"
    two_lines = rf"^(logger\.\w+)\.name = {name}\n\1\.level = ERROR$"
    assert re.search(f"{one_line}|{two_lines}", text, re.MULTILINE), text


# Jars


def test_coordinates_have_clients_and_one_logging_binding() -> None:
    for version in jars.KNOWN_VERSIONS:
        found = coordinates(version)
        assert f"org.apache.kafka:kafka-clients:{version}" in found
        bindings = [text for text in found if "slf4j" in text]
        assert len(bindings) == 1
        assert ("reload4j" in bindings[0]) == version.startswith("3.")


@pytest.mark.parametrize("version", ["", "4", "4.3", "4.3.x", "latest", "2.8.1"])
def test_unsupported_version_is_a_configuration_error(version: str) -> None:
    with pytest.raises(ConfigurationError, match=r"not a Kafka version|not supported here"):
        coordinates(version)


@pytest.fixture
def no_jars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without resolved packages."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("M2_REPO", str(tmp_path / "m2"))
    return tmp_path


def test_error_for_missing_jgo_names_the_package(no_jars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jgo.maven", None)
    with pytest.raises(Unavailable, match=r"needs jgo: pip install 'eos-kafka\[embedded\]'"):
        kafka_jars("4.3.1")


def test_missing_network_is_reported_and_not_recorded(no_jars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_ports(1)[0]}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Unavailable, match=r"jars of Kafka 4\.3\.1 .* cannot be downloaded without a network"):
        kafka_jars("4.3.1")
    assert not list(jars.cache_directory().glob("*.json"))


def test_rejected_certificate_is_not_a_missing_network(no_jars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise requests.exceptions.SSLError("CERTIFICATE_VERIFY_FAILED")

    monkeypatch.setattr(requests.Session, "request", refused)
    with pytest.raises(
        Unavailable, match=r"certificate was rejected \(CERTIFICATE_VERIFY_FAILED\): .*REQUESTS_CA_BUNDLE"
    ):
        kafka_jars("4.3.1")


def test_jar_list_is_valid_while_all_jars_are_complete(tmp_path: Path) -> None:
    jar, record = tmp_path / "a.jar", tmp_path / "4.3.1.json"
    jar.write_bytes(b"whole")
    jars._write_record(record, ["a"], [jar])
    assert jars._read_record(record, ["a"]) == [jar]
    assert jars._read_record(record, ["b"]) is None
    jar.write_bytes(b"cut")
    assert jars._read_record(record, ["a"]) is None
    jar.unlink()
    assert jars._read_record(record, ["a"]) is None


def test_incomplete_jar_is_downloaded_again(tmp_path: Path) -> None:
    import zipfile

    class Artifact:
        fetched = 0
        path = tmp_path / "a.jar"

        def resolve(self) -> Path:
            if not self.path.exists():
                Artifact.fetched += 1
                with zipfile.ZipFile(self.path, "w") as archive:
                    archive.writestr("A.class", b"")
            return self.path

    Artifact.path.write_bytes(b"PK\x03\x04 and then the line went dead")
    assert zipfile.is_zipfile(jars._download_jar(Artifact()))  # type: ignore[arg-type]
    assert Artifact.fetched == 1


# Java


def fake_java(home: Path, version: str) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    program.chmod(0o755)
    return program


def test_java_home_comes_before_path_and_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, on_path, packaged = (fake_java(tmp_path / name, "21.0.1") for name in ("home", "path", "package"))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setattr(java, "_packaged_java", lambda: packaged)
    assert java.find_java() == home
    monkeypatch.delenv("JAVA_HOME")
    assert java.find_java() == on_path
    monkeypatch.setenv("PATH", "")
    assert java.find_java() == packaged


def test_old_java_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path / "old", "11.0.2")
    packaged = fake_java(tmp_path / "new", "25.0.2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(java, "_packaged_java", lambda: packaged)
    assert java.find_java() == packaged


def test_error_for_missing_java_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path, "1.8.0")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(java, "_packaged_java", lambda: None)
    with pytest.raises(Unavailable, match=r"Java 17 or later.*JAVA_HOME is Java 8\).*pip install") as raised:
        java.find_java()
    assert "\n" not in str(raised.value)


# Ports, processes and the data directory


def test_error_names_the_used_port(listening: int) -> None:
    assert not is_free(listening)
    with pytest.raises(Unavailable, match=f"port {listening} on 127.0.0.1 is in use"):
        require_free([listening])


def test_free_ports_are_distinct_and_in_range() -> None:
    ports = [port for node in choose_ports(3, None) for port in node.all()]
    assert len(set(ports)) == len(ports) == 6
    assert max(ports) < 32768


def test_client_ports_follow_the_given_one() -> None:
    assert [node.client for node in choose_ports(3, 9092)] == [9092, 9093, 9094]


@pytest.mark.parametrize("nodes", [0, 2, 4])
def test_only_one_or_three_nodes_are_accepted(nodes: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"1 or 3 nodes, not {nodes}"):
        LocalKafka(nodes=nodes)
    with pytest.raises(ConfigurationError, match=f"1 or 3 nodes, not {nodes}"):
        DetachedKafka(tmp_path).start(nodes=nodes)


def test_cluster_id_is_created_once_without_leading_dash(tmp_path: Path) -> None:
    ids = {persistent_cluster_id(tmp_path / str(i)) for i in range(200)}
    assert len(ids) == 200
    assert not [each for each in ids if each.startswith("-") or len(each) != 22]
    assert persistent_cluster_id(tmp_path / "0") in ids


def data_of(directory: Path, version: str, nodes: int, pid: int | None = None) -> DetachedKafka:
    state = State(version, [NodeState(port, port + 100, pid) for port in free_ports(nodes)])
    (directory / "broker.json").write_bytes(msgspec.json.encode(state))
    return DetachedKafka(directory)


def test_data_of_other_version_or_node_count_is_refused(tmp_path: Path) -> None:
    kafka = data_of(tmp_path, "4.3.1", nodes=3)
    with pytest.raises(ConfigurationError, match="belongs to 3 nodes, not 1"):
        kafka.start(nodes=1)
    with pytest.raises(ConfigurationError, match=r"written by Kafka 4\.3\.1, which 4\.2\.1 cannot"):
        kafka.start(version="4.2.1")
    assert not (tmp_path / "node-0").exists()


def test_broker_settings_are_stored_with_the_data(tmp_path: Path) -> None:
    kafka = DetachedKafka(tmp_path)
    new = kafka._next_state(None, False, None, None, None, {"a": "1", "b": "2"})
    assert new.config == {"a": "1", "b": "2"}
    assert kafka._next_state(new, False, None, None, None, {}).config == new.config
    assert kafka._next_state(new, False, None, None, None, {"b": "3"}).config == {"a": "1", "b": "3"}
    assert kafka._next_state(new, True, None, None, None, {"b": "2"}) is new
    with pytest.raises(ConfigurationError, match=r", with a=1, with b=2: stop it first with `eos broker stop`"):
        kafka._next_state(new, True, None, None, None, {"b": "3"})
    with pytest.raises(ConfigurationError, match=r"^log\.dirs cannot be set: --nodes, --port and --data determine it"):
        kafka.start(config={"log.dirs": "/x"})
    assert data_of(tmp_path, "4.3.1", nodes=1).state() is not None, "a file of an earlier version has no state"


def test_reused_pid_is_neither_up_nor_signalled(tmp_path: Path) -> None:
    # The other program even has our file in its command line, as an editor would.
    program = "import sys; sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "node-0" / "server.properties")], stdin=subprocess.PIPE
    )
    try:
        kafka = data_of(tmp_path, "4.3.1", nodes=1, pid=other.pid)
        assert [node.is_up for node in kafka.status()] == [False]
        assert kafka.stop() == []
        assert other.poll() is None
    finally:
        other.kill()
        other.communicate()


def test_command_line_of_a_missing_process_is_empty() -> None:
    assert "python" in command_line(os.getpid()) or "pytest" in command_line(os.getpid())
    assert command_line(2**22 + 1) == ""


# What local JVMs cannot do


def test_local_jvms_cannot_be_partitioned() -> None:
    cluster = JvmCluster(1)
    with pytest.raises(NotSupported, match=r"^local JVMs .* a network cut needs the container backend$"):
        cluster.partition(0)
    assert cluster.reachable() == [0]


def test_start_waits_for_port_of_a_killed_node() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        threading.Timer(0.2, held.close).start()
        _wait_for_ports([NodeState(port, 0, pid=1)])
        assert is_free(port)
