"""Run one Kafka node: its directory, its storage format, its JVM, and the check that it answers.

The module owns the files of a node's directory, the command line of its JVM, and how the JVM ends with this process. It
must never know about other nodes' processes, and never decide to restart one.
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
    AUTHORIZER_SETTINGS,
    HOST,
    UNLISTED_PREFIXES,
    NodePorts,
    logging_options,
    render,
    server_properties,
)
from eos.broker.queries import fetch_metadata
from eos.errors import ConfigurationError, Unavailable

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
_FORMAT_TIMEOUT_S = 90.0
_POLL_S = 0.05
JVM_OPTIONS = "KAFKA_JVM_PERFORMANCE_OPTS"
META = "meta.properties"

# These ports are below the range that Linux (32768-) and macOS (49152-) use for outgoing connections. Otherwise a
# client's socket could take the port of a node that is down for a while, even the socket of a client that reconnects to
# it.
PORT_RANGE = (15000, 32000)


class Node:
    """Manage node `index` in `directory`: server.properties, logging, server.log, stdout.log and data/."""

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
        """Start Kafka's StorageTool unless the storage is formatted. `end_format` waits for the tool.

        A copy of its result is used instead if there is one (eos/broker/archive.py).
        """
        if self._formatted.exists():
            return None
        if (storage := storage_copy_path(self.java, self.jars)).exists():
            self._copy_formatted_storage(storage, cluster_id)
            return None
        # Use only the C1 compiler: the tool runs for 1.5 s, which is too short for C2 to pay off.
        command = self._java_command(["-Xmx128m", "-XX:TieredStopAtLevel=1"], "kafka.tools.StorageTool")
        command += ["format", "--ignore-formatted", "-t", cluster_id, "-c", str(self.properties_path)]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.directory,  # a JVM that crashes writes its report here
        )

    def _copy_formatted_storage(self, storage: Path, cluster_id: str) -> None:
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
        # This file marks the end of formatting. Kafka's meta.properties exists before the tool has finished.
        self._formatted.touch()

    def launch(self, heap: str, die_with_parent: bool) -> None:
        """Start the JVM in a separate session, so that Ctrl-C in the terminal reaches this process and not Kafka."""
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
            self._watcher = _kill_with_parent(self.process.pid)

    def _java_command(self, options: list[str], main_class: str) -> list[str]:
        _, logging = logging_options(self.version, self.directory)
        class_path = os.pathsep.join(map(str, self.jars))
        path = class_archive_path(self.java, self.jars)
        shared = [f"-XX:SharedArchiveFile={path}"] if path.exists() else []
        return [str(self.java), *shared, *options, *logging, "-Djava.awt.headless=true", "-cp", class_path, main_class]

    @property
    def is_reachable(self) -> bool:
        """Return whether the node is running and not paused."""
        return self.is_running() and not self.paused

    def is_running(self) -> bool:
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
        """Send SIGSTOP and return when it has taken effect."""
        if self.paused:
            return
        self.signal(signal.SIGSTOP)
        assert self.process is not None
        # The process may still answer for a moment after the signal was sent.
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self.process.returncode = os.waitstatus_to_exitcode(status)
            raise Unavailable(f"Kafka node {self.index} ended instead of pausing: {self.failure_reason()}")
        self.paused = True

    def resume(self) -> None:
        self.signal(signal.SIGCONT)
        self.paused = False

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait for the JVM to end. Return False if it does not within `timeout_s`."""
        if self.process is not None:
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return False
        self._end_watcher()
        return True

    def _end_watcher(self) -> None:
        if self._watcher is not None:
            # Kill the watcher before its pipe closes. The end of the pipe makes the watcher kill the pid of the node,
            # which another process may have by now.
            self._watcher.kill()
            self._watcher.wait()
            if self._watcher.stdin is not None:
                self._watcher.stdin.close()
            self._watcher = None

    def kill(self) -> None:
        """Send SIGKILL if the node is running, and wait for its end."""
        if self.is_running():
            self.signal(signal.SIGKILL)
        self.wait_ended(STOP_TIMEOUT_S)

    def failure_reason(self) -> str:
        """Return why the node ended: the first ERROR of its log since the launch, or the last line the JVM printed.

        Later errors are ignored, because they come from the shutdown after a failed start. Reports about slow events
        are ignored too.
        """
        lines = _lines(self.log_path, self._log_start)
        for number, line in enumerate(lines):
            if (" ERROR " in line or " FATAL " in line) and " EventPerformanceMonitor: " not in line:
                # The next line contains the exception's message.
                after = lines[number + 1] if number + 1 < len(lines) else ""
                cause = f": {after.strip()}" if re.match(r"[\w.]+(Exception|Error)\b", after) else ""
                return f"{line.strip()}{cause}"[:600]
        return _last_statement(_lines(self.stdout_path))


def unknown_settings(java: Path, jars: Sequence[Path], names: Iterable[str]) -> list[str]:
    """Return the names that are not in Kafka's own list of broker settings. Raises Unavailable.

    A broker accepts any name, because a plug-in may read it. A local broker has no plug-ins.
    """
    command = [str(java), "-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", os.pathsep.join(map(str, jars))]
    command.append("kafka.server.KafkaConfig")  # prints the documentation of all settings
    listed = subprocess.run(command, capture_output=True, text=True, timeout=_FORMAT_TIMEOUT_S, check=False)
    known = {*re.findall(r'id="brokerconfigs_([^"]+)"', listed.stdout), *AUTHORIZER_SETTINGS}
    if len(known) == len(AUTHORIZER_SETTINGS):
        raise Unavailable(f"Kafka did not list its settings: {_last_statement(listed.stderr.splitlines())}")
    return sorted(name for name in names if name not in known and not name.startswith(UNLISTED_PREFIXES))


def jvm_options() -> list[str]:
    """Return the options of a broker's JVM: KAFKA_JVM_PERFORMANCE_OPTS, as in Kafka's own scripts, or defaults."""
    return shlex.split(os.environ.get(JVM_OPTIONS) or "-Xms256m -XX:+UseSerialGC")


def class_archive_path(java: Path, jars: Sequence[Path]) -> Path:
    """Return the path of the class archive for this Java and these jars. A JVM rejects an archive of another Java or of
    other jars."""
    release = java.resolve().parent.parent / "release"
    of_java = release.read_bytes() if release.exists() else bytes(java.resolve())
    key = hashlib.sha256(b"\0".join([of_java, *map(bytes, jars)])).hexdigest()[:16]
    return cache_directory() / f"classes-{key}.jsa"


def storage_copy_path(java: Path, jars: Sequence[Path]) -> Path:
    """Return the path of the copied storage for these jars. Only meta.properties differs by cluster and node."""
    return class_archive_path(java, jars).with_suffix(".storage")


def random_id() -> str:
    """Return a Uuid in Kafka's format, without a leading "-", which StorageTool would read as an option."""
    while (made := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return made


def _lines(path: Path, start: int = 0) -> list[str]:
    return path.read_bytes()[start:].decode(errors="replace").splitlines() if path.exists() else []


def _last_statement(lines: list[str]) -> str:
    """Return the last line that is not a stack frame, cut off after 400 characters."""
    found = [line.strip() for line in lines if line.strip() and not re.match(r"\s+(at |\.\.\. )", line)]
    return found[-1][:400] if found else "no output"


def _kill_with_parent(pid: int) -> subprocess.Popen[bytes]:
    """Start a shell that kills `pid` after this process has ended in any way, when its pipe reports end of file.

    PR_SET_PDEATHSIG is not an alternative: it fires when the *thread* that started the JVM ends, so a broker that a
    test's helper thread restarted would end with that thread. It also needs a preexec function and works only on Linux.
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
        # The JVM sets this option too. Without it, a killed node's connections in TIME_WAIT would make its port look
        # used.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def require_free(ports: Iterable[int]) -> None:
    for port in ports:
        if not is_free(port):
            raise Unavailable(f"port {port} on {HOST} is in use by another process")


def free_ports(count: int, taken: Iterable[int] = ()) -> list[int]:
    """Return `count` distinct unused ports below the range of outgoing connections."""
    avoid, chosen = set(taken), list[int]()
    for _ in range(10_000):
        if len(chosen) == count:
            return chosen
        port = random.randrange(*PORT_RANGE)
        if port not in avoid and is_free(port):
            avoid.add(port)
            chosen.append(port)
    raise Unavailable(f"{count} free ports were not found on {HOST}")


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
    """Wait until each of `nodes` answers and names all of `expected` as brokers.

    Raises Unavailable at once if a JVM has ended, or at the deadline.
    """
    deadline = time.monotonic() + timeout_s
    waiting = list(nodes)
    while waiting:
        for node in list(waiting):
            if not node.is_running():
                raise Unavailable(
                    f"Kafka {node.version} node {node.index} stopped while starting: {node.failure_reason()} "
                    f"(log: {node.log_path})"
                )
            if _answers(node.ports.client, expected):
                waiting.remove(node)
        if waiting and time.monotonic() > deadline:
            late = waiting[0]
            raise Unavailable(
                f"Kafka {late.version} node {late.index} did not answer within {timeout_s:.0f} s: "
                f"{late.failure_reason()} (log: {late.log_path})"
            )
        time.sleep(_POLL_S)


def _answers(port: int, expected: set[int]) -> bool:
    try:
        return expected <= fetch_metadata(f"{HOST}:{port}", timeout_s=2).nodes
    except OSError:
        return False


def stop_all(nodes: Sequence[Node], timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Send SIGTERM to all nodes at once, and SIGKILL at the deadline.

    One after the other, the last nodes would have no quorum left for a clean shutdown.
    """
    deadline = time.monotonic() + timeout_s
    for node in nodes:
        if node.is_running():
            node.resume()
            node.signal(signal.SIGTERM)
    for node in nodes:
        if not node.wait_ended(max(0.0, deadline - time.monotonic())):
            node.kill()
