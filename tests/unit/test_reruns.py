"""Reruns of failed tests: only failures that a slow machine can cause are retried."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.suites.late import SECOND_TRY

ROOT = Path(__file__).parents[2]

# Each test fails the first time and would pass the second time.
TESTS = """
import subprocess
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException

from eos.errors import Action, CallFailed, Unavailable
from eos.testing.checker import Violated
from tests.support.reading import TooSlow, wait_until

SLOW = {
    "wait": lambda: wait_until("something", lambda: None, 0.0),
    "process": lambda: subprocess.run(["sleep", "9"], timeout=0.01),
    "timed-out": lambda: fail(KafkaException(KafkaError(KafkaError._TIMED_OUT))),
    "transport": lambda: fail(KafkaException(KafkaError(KafkaError._TRANSPORT))),
    "call": lambda: fail(CallFailed("commit", Action.RETRY, KafkaError(KafkaError._TIMED_OUT))),
    "unavailable": lambda: fail(Unavailable("no broker")),
}
WRONG = {
    "plain": lambda: same(1, 2),
    "told": lambda: same("eos: TooSlow: Unavailable", "KafkaException: _TIMED_OUT"),
    "checker": lambda: fail(Violated("lost")),
    "late-verdict": lambda: late_verdict(),
    "code": lambda: fail(KafkaException(KafkaError(KafkaError._FENCED))),
    "bug": lambda: fail(ValueError("TooSlow")),
}


def fail(error):
    raise error


def same(one, other):
    assert one == other, f"{one} is not {other}"


def late_verdict():
    try:
        raise TooSlow("first")
    except TooSlow:
        raise Violated("lost")


def once(directory, name, work):
    mark = Path(directory) / name
    if not mark.exists():
        mark.touch()
        work()


@pytest.mark.parametrize("name", SLOW)
def test_slow(name):
    once(DIRECTORY, name, SLOW[name])


@pytest.mark.timeout(0.2)
def test_slow_hang():
    once(DIRECTORY, "hang", lambda: __import__("time").sleep(30))


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    once(DIRECTORY, name, WRONG[name])
"""


def test_timed_out_test_is_rerun_but_a_failed_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "test_dummy.py").write_text(TESTS.replace("DIRECTORY,", f"{str(tmp_path)!r},"))
    command = [sys.executable, "-m", "pytest", "-q", "-rfR", "-p", "no:cacheprovider", "-c", os.devnull]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    ran = subprocess.run(
        [*command, *SECOND_TRY, "-n", "2", "."], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    failed = set(re.findall(r"^FAILED test_dummy\.py::(\S+)", ran.stdout, re.MULTILINE))
    tried_again = set(re.findall(r"^RERUN test_dummy\.py::(\S+)", ran.stdout, re.MULTILINE))
    wrong = {"plain", "told", "checker", "late-verdict", "code", "bug"}
    slow = {"wait", "process", "timed-out", "transport", "call", "unavailable"}
    assert failed == {f"test_wrong[{name}]" for name in wrong}, ran.stdout
    assert tried_again == {"test_slow_hang", *(f"test_slow[{name}]" for name in slow)}, ran.stdout
