"""Run Kafka's own Java clients from the jars of the local broker."""

from __future__ import annotations

import os
import subprocess

from eos.broker import DEFAULT_VERSION
from eos.broker.jars import kafka_jars
from eos.broker.java import find_java

CONSOLE_PRODUCER = "org.apache.kafka.tools.ConsoleProducer"
CONSOLE_CONSUMER = "org.apache.kafka.tools.consumer.ConsoleConsumer"
SHARE_CONSUMER = "org.apache.kafka.tools.consumer.ConsoleShareConsumer"
TRANSACTIONAL_COPIER = "org.apache.kafka.tools.TransactionalMessageCopier"


def start(main_class: str, *arguments: str) -> subprocess.Popen[str]:
    class_path = os.pathsep.join(map(str, kafka_jars(DEFAULT_VERSION)))
    options = ["-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    return subprocess.Popen(
        [str(find_java()), *options, "-cp", class_path, main_class, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(main_class: str, *arguments: str, input: str = "", timeout_s: float = 60.0) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error; on a timeout kill the client and raise TimeoutExpired."""
    process = start(main_class, *arguments)
    try:
        output, errors = process.communicate(input, timeout_s)
    finally:
        process.kill()
        process.wait()
    return process.returncode, output, errors


def run(main_class: str, *arguments: str, input: str = "", timeout_s: float = 60.0) -> str:
    """Return standard output; raise AssertionError with all output if the client fails, TimeoutExpired if it hangs."""
    code, output, errors = ended(main_class, *arguments, input=input, timeout_s=timeout_s)
    assert code == 0, f"{main_class} ended with {code}: {output[-500:]} {errors[-2000:]}"
    return output
