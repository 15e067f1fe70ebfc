"""Run `eos shim` as a separate process, as users do, and read its JSON log lines."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import psutil
from confluent_kafka import Consumer

from tests.support import forked
from tests.support.reading import wait_until

END_TIMEOUT_S = 20.0
_LAUNCHED: WeakSet[subprocess.Popen[str]] = WeakSet()


class RunningShim:
    """Own a shim; `events` holds the events logged so far, `output` everything on standard output."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []
        self.output: list[str] = []
        self._threads = [
            threading.Thread(target=self._read_events, daemon=True),
            threading.Thread(target=self._read_output, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def bootstrap_servers(self) -> str:
        """Return the address of the first local port, through which clients find the other brokers."""
        return str(self.named("listening")[0]["address"])

    @property
    def addresses(self) -> list[str]:
        return [str(event["address"]) for event in self.named("listening")]

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in list(self.events) if event.get("event") == name]

    def closed_for_cause(self) -> list[dict[str, Any]]:
        """Return the connections that it closed, except those of clients that sent only their first request within
        30 s."""
        return [
            event
            for event in self.named("connection closed")
            if "did not complete its login" not in str(event["reason"])
        ]

    def connections(self) -> list[tuple[int, int]]:
        """Return (local port, remote port) of its TCP connections, including half-closed ones, which use a
        descriptor."""
        found = psutil.Process(self.process.pid).net_connections("tcp")
        return [(c.laddr.port, c.raddr.port) for c in found if c.raddr]

    def stop(self) -> int:
        """Send SIGTERM, and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(END_TIMEOUT_S)
        finally:
            self.process.kill()

    def _read_events(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                self.events.append(json.loads(line))
            except ValueError:
                self.events.append({"event": "unreadable", "line": line.rstrip()})

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line.rstrip("\n"))


def start(upstream: str, *options: str, brokers: int = 1) -> RunningShim:
    """Start a shim on free ports that listens for this many brokers."""
    arguments = ["shim", "--upstream", upstream, "--log-format", "json", *options]
    if "--listen" not in options:
        arguments += ["--listen", "127.0.0.1:0"]
    shim = RunningShim(launch(*arguments))
    try:
        eventually(lambda: len(shim.addresses) >= brokers or shim.process.poll() is not None)
        assert shim.process.poll() is None, f"the shim ended: {shim.events}"
    except BaseException:
        shim.process.kill()
        shim.process.wait()
        raise
    return shim


def launch(*arguments: str) -> subprocess.Popen[str]:
    process = forked.Popen[str](
        ["eos", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _LAUNCHED.add(process)
    return process


def refused(code: int, sentence: str, *arguments: str) -> str:
    """Start a shim that must exit with this code and sentence, without a traceback, and return its output."""
    process = launch("shim", *arguments)
    try:
        _, output = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, f"{arguments}: {process.returncode}, {output}"
    assert sentence in output, f"{arguments}: {output}"
    assert "Traceback" not in output, output
    return output


def end_all() -> None:
    """Stop every shim that a failed test left running."""
    for process in _LAUNCHED:
        process.kill()
        process.wait()


@contextmanager
def running(upstream: str, *options: str, brokers: int = 1) -> Iterator[RunningShim]:
    """Start a shim; at the end it must drain, exit with 0, and have logged no internal error."""
    shim = start(upstream, *options, brokers=brokers)
    try:
        yield shim
    except BaseException:
        shim.process.kill()
        shim.process.wait()
        print(f"the shim said: {shim.events}", file=sys.stderr)
        raise
    assert shim.stop() == 0
    strange = [event for event in shim.named("unreadable") if not event["line"].startswith("eos: faults: ")]
    assert not strange, strange


def eventually(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Return the first true value of `condition`; raise TooSlow after the timeout."""
    return wait_until("the condition of the test", condition, timeout_s)


def read(consumer: Consumer, count: int) -> list[str]:
    """Return the next `count` values of the consumer's subscription."""
    values: list[str] = []

    def poll() -> bool:
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            values.append(message.value().decode())
        return len(values) >= count

    eventually(poll, 60)
    return values


def read_group(servers: str, group: str, *topics: str, count: int, **settings: Any) -> list[str]:
    """Return the first `count` values of the topics, read by a new member of a new group."""
    common = {"bootstrap.servers": servers, "group.id": group, "auto.offset.reset": "earliest"}
    consumer = Consumer(common | settings)
    consumer.subscribe(list(topics))
    try:
        return read(consumer, count)
    finally:
        consumer.close()
