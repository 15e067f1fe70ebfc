"""Spark's Python workers: what modules brought is looked at once, and memory stays from batch to batch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from spark_connector.workers import SET_BY_THE_USER

COLLECTIONS = """
import gc
from spark_connector import task
from spark_connector.workers import begin_task

def looked_at():
    return len(gc.get_objects())

before = looked_at()
begin_task()
first, frozen = looked_at(), gc.get_freeze_count()
begin_task()
assert gc.get_freeze_count() <= frozen, "a task without new modules freezes nothing"
import http.server
with_new_modules = looked_at()
begin_task()
print(before, first, with_new_modules, looked_at())
"""


def test_a_workers_collections_look_at_what_tasks_made_and_not_at_modules() -> None:
    run = subprocess.run([sys.executable, "-c", COLLECTIONS], capture_output=True, text=True, check=True)
    before, first, with_new_modules, second = map(int, run.stdout.split())
    assert before > 10_000
    assert first < before / 10
    assert second < with_new_modules / 10


FAULTS = """
import resource
from spark_connector.workers import begin_task

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def batch():
    rows = [b"x" * 20_000_000, *(b"x" * 100_000 for _ in range(300))]

begin_task()
batch()
before = faults()
for _ in range(10):
    batch()
print(faults() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
@pytest.mark.parametrize(
    "users", [{}, {"MALLOC_TRIM_THRESHOLD_": "128000"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=9"}]
)
def test_a_batch_is_in_the_memory_of_the_one_before_unless_the_user_says_otherwise(users: dict[str, str]) -> None:
    """10 batches of 50 MB are 122,000 pages of 4 KB."""
    inherited = {name: value for name, value in os.environ.items() if name not in SET_BY_THE_USER}
    command = [sys.executable, "-c", FAULTS]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=inherited | users)
    assert int(run.stdout) > 60_000 if users else int(run.stdout) < 1_000
