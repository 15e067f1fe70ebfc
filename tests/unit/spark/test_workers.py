"""Garbage collection in Spark's Python workers: what modules brought is looked at once."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from spark_connector import task
from spark_connector.workers import spare_the_collector

def looked_at():
    return len(gc.get_objects())

before = looked_at()
spare_the_collector()
first, frozen = looked_at(), gc.get_freeze_count()
spare_the_collector()
assert gc.get_freeze_count() <= frozen, "a task without new modules freezes nothing"
import http.server
with_new_modules = looked_at()
spare_the_collector()
print(before, first, with_new_modules, looked_at())
"""


def test_a_workers_collections_look_at_what_tasks_made_and_not_at_modules() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    before, first, with_new_modules, second = map(int, run.stdout.split())
    assert before > 10_000
    assert first < before / 10
    assert second < with_new_modules / 10
