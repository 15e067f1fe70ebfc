"""Spark's Python workers: garbage collections skip objects of modules, and memory is reused between batches."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

COLLECTIONS = """
import gc
from spark_connector import task
from spark_connector.workers import begin_task

def tracked_objects():
    return len(gc.get_objects())

before = tracked_objects()
begin_task()
first, frozen = tracked_objects(), gc.get_freeze_count()
begin_task()
assert gc.get_freeze_count() <= frozen, "a task without new modules freezes nothing"
import http.server
with_new_modules = tracked_objects()
begin_task()
print(before, first, with_new_modules, tracked_objects())
"""


def test_garbage_collections_skip_objects_of_modules() -> None:
    run = subprocess.run([sys.executable, "-c", COLLECTIONS], capture_output=True, text=True, check=True)
    before, first, with_new_modules, second = map(int, run.stdout.split())
    assert before > 10_000
    assert first < before / 10
    assert second < with_new_modules / 10


FAULTS = """
import resource
from spark_connector.workers import begin_task

def one():
    return b"x" * 20_000_000

def many():
    return [one(), *(b"x" * 100_000 for _ in range(300))]

BEGIN
for batch in (one, many):
    batch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        batch()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
_NOTHING_SET = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}


def page_faults(begin: str, variables: dict[str, str]) -> tuple[int, int]:
    """Return the page faults of 10 batches of one large value, and of 10 of many small ones, after a first batch."""
    command = [sys.executable, "-c", FAULTS.replace("BEGIN", begin)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=_NOTHING_SET | variables)
    one, many = map(int, run.stdout.split())
    return one, many


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's malloc")
@pytest.mark.parametrize(
    ("variables", "kept"),
    [
        ({}, True),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, True),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=128000"}, False),
        ({"MALLOC_TRIM_THRESHOLD_": "128000"}, False),
        ({"MALLOC_MMAP_THRESHOLD_": "128000"}, False),
    ],
)
def test_batch_reuses_memory_unless_the_user_configures_it(variables: dict[str, str], kept: bool) -> None:
    (_, without), (one, with_ours) = page_faults("", variables), page_faults("begin_task()", variables)
    if without < 1_000:
        pytest.skip(f"this kernel gives all of it at once: {without} page faults")
    assert with_ours < without / 10 if kept else with_ours > without / 2
    if kept:
        assert one < 1_000, "glibc itself reuses the memory of one value"
