"""A program that uses eos and kafka-python gets the whole package, although eos imports only its admin client."""

from __future__ import annotations

import subprocess
import sys

import pytest

EOS = "import sys, eos.kafka.client.cluster; assert 'kafka.consumer' not in sys.modules"
WHOLE = (
    "import importlib, kafka, kafka.consumer, kafka.producer, kafka.structs\n"
    "missing = [name for name in kafka.__all__ if not hasattr(kafka, name)]\n"
    "assert (len(kafka.__all__) > 10, missing) == (True, [])\n"
    "assert kafka.KafkaConsumer is kafka.consumer.KafkaConsumer\n"
    "assert kafka.KafkaProducer is kafka.producer.KafkaProducer\n"
    "assert kafka.TopicPartition is kafka.structs.TopicPartition is importlib.import_module('kafka').TopicPartition\n"
    "assert kafka.__version__ and kafka.__file__ and kafka.__spec__.name == 'kafka'\n"
)


def run_program(*lines: str) -> None:
    """Run the lines in a new process, in which nothing is imported yet."""
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    "use",
    [
        "import kafka; kafka.KafkaProducer",
        "from kafka import KafkaConsumer, TopicPartition",
        "from kafka import *; KafkaAdminClient, TopicPartition",
        "from kafka import errors, consumer; consumer.KafkaConsumer",
        "import kafka; kafka.producer.KafkaProducer",
        "import kafka.consumer",
        "import kafka, unittest.mock\n"
        "with unittest.mock.patch('kafka.KafkaProducer') as fake: assert kafka.KafkaProducer is fake",
    ],
)
def test_program_finds_whole_package_after_eos(use: str) -> None:
    run_program(EOS, use, WHOLE)


def test_package_imported_before_eos_stays_the_same() -> None:
    run_program(
        "import kafka; before = kafka",
        "import eos.kafka.client.cluster, sys",
        "assert sys.modules['kafka'] is before",
        WHOLE,
    )


def test_threads_find_whole_package_at_once() -> None:
    run_program(
        EOS,
        "import kafka, threading",
        "found, start = [], threading.Barrier(8)",
        "def use(): start.wait(); found.append((kafka.KafkaConsumer, kafka.KafkaProducer))",
        "threads = [threading.Thread(target=use) for _ in range(8)]",
        "[thread.start() for thread in threads]",
        "[thread.join() for thread in threads]",
        "assert (len(found), len(set(found))) == (8, 1)",
        WHOLE,
    )


def test_unknown_name_is_an_error_as_usual() -> None:
    run_program(
        EOS,
        "import kafka",
        "assert not hasattr(kafka, 'nope')",
        "try:\n    from kafka import nope\nexcept ImportError as error:\n    assert 'cannot import name' in str(error)",
        "else:\n    raise AssertionError",
        WHOLE,
    )
