"""One Kafka node: a directory, a format, a JVM, and the question whether it answers yet.

Owns the files of a node's directory, the command line of its JVM and how that JVM's life is tied to ours. It must
never know about other nodes' processes, and never decide to restart one.
"""

from __future__ import annotations

import base64
import hashlib
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from eos.broker.jars import cache_directory
from eos.broker.properties import (
    HOST,
    OF_AUTHORIZER,
    UNLISTED,
    NodePorts,
    logging_options,
    render,
    server_properties,
)
from eos.broker.questions import metadata
from eos.errors import ConfigurationError, Unavailable

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
_FORMAT_TIMEOUT_S = 90.0
_POLL_S = 0.05
JVM_OPTIONS = "KAFKA_JVM_PERFORMANCE_OPTS"
META = "meta.properties"

# Below the range that Linux (32768-) and macOS (49152-) take for outgoing connections: a node that is down for a
# while would otherwise find its port taken by some client's socket, even by a client trying to reconnect to it.
PORT_RANGE = (15000, 32000)


class Node:
    """Node `index` of a cluster, in `directory`: server.properties, logging, server.log, stdout.log and data/."""

    def __init__(self, index: int, directory: Path, version: str, java: Path, jars: Sequence[Path]) -> None:
        self.index, self.directory, self.version = index, directory, version
        self.java, self.jars = java, jars
        self.log_path = directory / "server.log"
        self.stdout_path = directory / "stdout.log"
        self.properties_path = directory / "server.properties"
        self._formatted = directory / "formatted"
        self.process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self.ports = NodePorts(0, 0)
        self.paused = False
        self._log_start = 0

    def configure(self, ports: Sequence[NodePorts], overrides: Mapping[str, object]) -> None:
        self.ports = ports[self.index]
        if "," in str(self.directory):
            raise ConfigurationError(f"Kafka cannot keep data in {self.directory}: its name has a comma")
        self.directory.mkdir(parents=True, exist_ok=True)
        properties = server_properties(self.index, ports, self.directory / "data", self.version, overrides)
        self.properties_path.write_text(render(properties))
        files, _ = logging_options(self.version, self.directory)
        for name, content in files.items():
            (self.directory / name).write_text(content)

    def begin_format(self, cluster_id: str) -> subprocess.Popen[bytes] | None:
        """Starts Kafka's own StorageTool unless the storage is formatted, or there is a copy of what it writes
        (eos/broker/archive.py); `end_format` waits for it."""
        if self._formatted.exists():
            return None
        if (storage := storage_of(self.java, self.jars)).exists():
            self._copy_format(storage, cluster_id)
            return None
        # C1 only: the tool lives for a second and a half and never earns what C2 costs.
        command = self._java_command(["-Xmx128m", "-XX:TieredStopAtLevel=1"], "kafka.tools.StorageTool")
        command += ["format", "--ignore-formatted", "-t", cluster_id, "-c", str(self.properties_path)]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.directory,  # where a JVM that crashes leaves its report
        )

    def _copy_format(self, storage: Path, cluster_id: str) -> None:
        meta = self.directory / "data" / META
        shutil.copytree(storage, meta.parent, dirs_exist_ok=True)
        text = meta.read_text()
        for name, value in {"cluster.id": cluster_id, "node.id": self.index, "directory.id": random_id()}.items():
            text, times = re.subn(rf"(?m)^{re.escape(name)}=.*$", f"{name}={value}", text)
            assert times == 1, f"{name} is {times} times in {storage / META}"
        meta.write_text(text)
        self._formatted.touch()

    def end_format(self, tool: subprocess.Popen[bytes] | None) -> None:
        if tool is None:
            return
        try:
            output, _ = tool.communicate(timeout=_FORMAT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            tool.kill()
            output, _ = tool.communicate()
        if tool.returncode != 0:
            raise Unavailable(
                f"the storage of Kafka node {self.index} in {self.directory} could not be formatted: "
                f"{_last_statement(output.decode(errors='replace').splitlines())}"
            )
        # Our own mark, not Kafka's meta.properties: that one is there before the tool is done.
        self._formatted.touch()

    def launch(self, heap: str, die_with_parent: bool) -> None:
        """Starts the JVM in a session of its own, so that a Ctrl-C in the terminal is ours to handle, not Kafka's."""
        require_free(self.ports.all())
        self.paused = False
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        options = [f"-Xmx{heap}", *jvm_options(), "-XX:+ExitOnOutOfMemoryError"]
        command = [*self._java_command(options, "kafka.Kafka"), str(self.properties_path)]
        with self.stdout_path.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.directory,
                start_new_session=True,
            )
        if die_with_parent:
            self._watcher = _watch(self.process.pid)

    def _java_command(self, options: list[str], main_class: str) -> list[str]:
        _, logging = logging_options(self.version, self.directory)
        class_path = os.pathsep.join(map(str, self.jars))
        path = archive_of(self.java, self.jars)
        shared = [f"-XX:SharedArchiveFile={path}"] if path.exists() else []
        return [str(self.java), *shared, *options, *logging, "-Djava.awt.headless=true", "-cp", class_path, main_class]

    @property
    def reachable(self) -> bool:
        """It runs, and is not paused."""
        return self.running() and not self.paused

    def running(self) -> bool:
        if self.process is None:
            return False
        if self.process.poll() is None:
            return True
        self._end_watcher()
        return False

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None, f"Kafka node {self.index} was never started"
        self.process.send_signal(number)

    def pause(self) -> None:
        """SIGSTOP; returns when it took effect."""
        if self.paused:
            return
        self.signal(signal.SIGSTOP)
        assert self.process is not None
        # A signal sent is not yet a process stopped: until then it would still answer.
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self.process.returncode = os.waitstatus_to_exitcode(status)
            raise Unavailable(f"Kafka node {self.index} ended instead of pausing: {self.last_words()}")
        self.paused = True

    def resume(self) -> None:
        self.signal(signal.SIGCONT)
        self.paused = False

    def reap(self, timeout_s: float) -> bool:
        """Waits for the JVM to end; False if it did not within `timeout_s`."""
        if self.process is not None:
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return False
        self._end_watcher()
        return True

    def _end_watcher(self) -> None:
        if self._watcher is not None:
            # Killed before its pipe closes: the pid it watches may belong to somebody else by now.
            self._watcher.kill()
            self._watcher.wait()
            if self._watcher.stdin is not None:
                self._watcher.stdin.close()
            self._watcher = None

    def end_now(self) -> None:
        """SIGKILL and reap, whatever state it is in."""
        if self.running():
            self.signal(signal.SIGKILL)
        self.reap(STOP_TIMEOUT_S)

    def last_words(self) -> str:
        """Why it ended: the first ERROR of its log since the launch, else the last thing the JVM printed.

        The first, because a failed start goes on to report what failed while it shut down. That it was slow is no
        reason.
        """
        lines = _lines(self.log_path, self._log_start)
        for number, line in enumerate(lines):
            if (" ERROR " in line or " FATAL " in line) and " EventPerformanceMonitor: " not in line:
                # The exception's own message is on the line after.
                after = lines[number + 1] if number + 1 < len(lines) else ""
                cause = f": {after.strip()}" if re.match(r"[\w.]+(Exception|Error)\b", after) else ""
                return f"{line.strip()}{cause}"[:600]
        return _last_statement(_lines(self.stdout_path))


def unknown_settings(java: Path, jars: Sequence[Path], names: Iterable[str]) -> list[str]:
    """Return the names that are no setting of a broker, by Kafka's own list. Raises Unavailable.

    A broker takes every name without a word, because a plug-in may read it; a local one has none."""
    command = [str(java), "-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", os.pathsep.join(map(str, jars))]
    command.append("kafka.server.KafkaConfig")  # prints the documentation of all settings
    listed = subprocess.run(command, capture_output=True, text=True, timeout=_FORMAT_TIMEOUT_S, check=False)
    known = {*re.findall(r'id="brokerconfigs_([^"]+)"', listed.stdout), *OF_AUTHORIZER}
    if len(known) == len(OF_AUTHORIZER):
        raise Unavailable(f"Kafka does not list its settings: {_last_statement(listed.stderr.splitlines())}")
    return sorted(name for name in names if name not in known and not name.startswith(UNLISTED))


def jvm_options() -> list[str]:
    """Of a broker's JVM: those of KAFKA_JVM_PERFORMANCE_OPTS, as Kafka's own scripts read it, else ours."""
    return shlex.split(os.environ.get(JVM_OPTIONS) or "-Xms256m -XX:+UseSerialGC")


def archive_of(java: Path, jars: Sequence[Path]) -> Path:
    """Where the archive of classes of this Java and these jars is, if there is one; the JVM itself would refuse it for
    others."""
    release = java.resolve().parent.parent / "release"
    of_java = release.read_bytes() if release.exists() else bytes(java.resolve())
    key = hashlib.sha256(b"\0".join([of_java, *map(bytes, jars)])).hexdigest()[:16]
    return cache_directory() / f"classes-{key}.jsa"


def storage_of(java: Path, jars: Sequence[Path]) -> Path:
    """Where what StorageTool writes for these jars is kept, if it is: it differs by cluster and node in meta.properties
    alone."""
    return archive_of(java, jars).with_suffix(".storage")


def random_id() -> str:
    """A Uuid as Kafka writes them; never with "-" in front, which StorageTool would read as an option."""
    while (made := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return made


def _lines(path: Path, start: int = 0) -> list[str]:
    return path.read_bytes()[start:].decode(errors="replace").splitlines() if path.exists() else []


def _last_statement(lines: list[str]) -> str:
    """The last line that is no stack frame, cut to the length of a sentence."""
    said = [line.strip() for line in lines if line.strip() and not re.match(r"\s+(at |\.\.\. )", line)]
    return said[-1][:400] if said else "it wrote nothing"


def _watch(pid: int) -> subprocess.Popen[bytes]:
    """A shell that kills `pid` when this process is gone, however it went: its pipe then reports end of file.

    Not PR_SET_PDEATHSIG: that one fires when the *thread* that started the JVM ends, so a broker restarted from a
    helper thread of a test would die with the thread; it needs a preexec function; and it is Linux only.
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; kill -9 "$0"', str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the JVM does: connections of a node that was just killed, in TIME_WAIT, are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def require_free(ports: Iterable[int]) -> None:
    for port in ports:
        if not is_free(port):
            raise Unavailable(f"port {port} on {HOST} is taken by another process")


def free_ports(count: int, taken: Iterable[int] = ()) -> list[int]:
    """`count` distinct ports nobody listens on, below the range of outgoing connections."""
    avoid, chosen = set(taken), list[int]()
    for _ in range(10_000):
        if len(chosen) == count:
            return chosen
        port = random.randrange(*PORT_RANGE)
        if port not in avoid and is_free(port):
            avoid.add(port)
            chosen.append(port)
    raise Unavailable(f"no {count} free ports on {HOST}")


def format_all(nodes: Sequence[Node], cluster_id: str) -> None:
    tools = [node.begin_format(cluster_id) for node in nodes]
    try:
        for node, tool in zip(nodes, tools, strict=True):
            node.end_format(tool)
    finally:
        for tool in tools:
            if tool is not None and tool.poll() is None:
                tool.kill()
                tool.wait()


def wait_until_ready(nodes: Iterable[Node], expected: set[int], timeout_s: float = START_TIMEOUT_S) -> None:
    """Until each of `nodes` itself answers and names all of `expected` as brokers.

    Raises Unavailable at once when a JVM has ended, else at the deadline.
    """
    deadline = time.monotonic() + timeout_s
    waiting = list(nodes)
    while waiting:
        for node in list(waiting):
            if not node.running():
                raise Unavailable(
                    f"Kafka {node.version} node {node.index} stopped while starting: {node.last_words()} "
                    f"(log: {node.log_path})"
                )
            if _answers(node.ports.client, expected):
                waiting.remove(node)
        if waiting and time.monotonic() > deadline:
            late = waiting[0]
            raise Unavailable(
                f"Kafka {late.version} node {late.index} does not answer after {timeout_s:.0f} s: "
                f"{late.last_words()} (log: {late.log_path})"
            )
        time.sleep(_POLL_S)


def _answers(port: int, expected: set[int]) -> bool:
    try:
        return expected <= metadata(f"{HOST}:{port}", timeout_s=2).nodes
    except OSError:
        return False


def stop_all(nodes: Sequence[Node], timeout_s: float = STOP_TIMEOUT_S) -> None:
    """SIGTERM to all of them at once, SIGKILL at the deadline.

    At once, because the last nodes of a cluster have no quorum left to leave in good order.
    """
    deadline = time.monotonic() + timeout_s
    for node in nodes:
        if node.running():
            node.resume()
            node.signal(signal.SIGTERM)
    for node in nodes:
        if not node.reap(max(0.0, deadline - time.monotonic())):
            node.end_now()
