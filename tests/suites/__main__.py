"""Run the suites: `python -m tests.suites check|test|deep|all|ci [SUITE ...]`. A failed suite does not stop the
others.

A table at the end shows the number of tests, the duration and the budget of each suite. Exit code 1 if one failed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from eos.broker import DEFAULT_VERSION, archive
from eos.broker.jars import cache_directory
from eos.errors import Unavailable
from tests.suites import late, machine
from tests.suites.changes import since_the_last_landing
from tests.suites.table import QUICK, STATEFUL, SUITES, Suite, deep_for, joined
from tests.support import spark_classes

BROKER_VERSIONS = (DEFAULT_VERSION, "3.9.2")
TALLIES = Path(__file__).parents[2] / "build" / "suites"
MEMORY = Path("/dev/shm")
MEMORY_NEEDED_BYTES = 8 << 30
COLUMNS = ("tests", "left out", "late", "failed", "seconds", "budget")
# Deep tests compute more than they wait. With more processes they would slow each other down until they time out.
DEEP_PROCESSES = 5 * (os.cpu_count() or 1) // 2
LONG_S = 3_600  # the timeout of a test in runs with the repetitions
CI_DEEP_S = 45 * 60  # after which CI, which is ended after 90 minutes, starts no deep test any more
DEPTHS = {"check": "not long and not deep", "test": "not long and not deep", "deep": "not long", "all": ""}

console = Console(highlight=False, soft_wrap=True)


@dataclass
class Result:
    """Hold the result of one suite. `failed`, `late`: test -> reason. `left_out`: reason -> number of tests.

    `said`: the output of commands, shown if one failed.
    """

    suite: Suite
    depth: str
    ok: bool
    seconds: float
    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    late: dict[str, str] = field(default_factory=dict)
    output: str = ""
    left_out: dict[str, int] = field(default_factory=dict)


def main(arguments: list[str]) -> int:
    mode, *wanted = arguments
    if mode not in (*DEPTHS, "ci"):
        console.print(f"there is no mode {mode}: {', '.join((*DEPTHS, 'ci'))}")
        return 64
    if unknown := set(wanted) - {suite.name for suite in SUITES}:
        console.print(f"there is no suite {', '.join(unknown)}: {', '.join(suite.name for suite in SUITES)}")
        return 64
    chosen = [s for s in SUITES if (s.name in wanted if wanted else mode != "check" or s.name in QUICK)]
    depths = _depths(mode, chosen)
    for line in machine.lacks():
        console.print(f"[yellow]not here: {line}")
    with _directory():
        _prepare(chosen)
        began = time.monotonic()
        # A thread per command: commands need one core and none of the tests' resources.
        with ThreadPoolExecutor() as executor:
            commands = [executor.submit(_run_commands, suite, depths[suite.name]) for suite in chosen if suite.commands]
            runs = list(joined((s for s in chosen if not s.commands), depths))
            tests = list(_run_all(runs, time.time() + CI_DEEP_S if mode == "ci" else math.inf))
    results = [*(command.result() for command in commands), *tests]
    _show(results, time.monotonic() - began)
    return 0 if all(result.ok for result in results) else 1


def _depths(mode: str, chosen: list[Suite]) -> dict[str, str]:
    """Return the depth of each suite; in CI the changed files decide."""
    if mode != "ci":
        return {suite.name: mode for suite in chosen}
    changed, why = since_the_last_landing()
    console.print(f"ci: {why}")
    asked = {suite.name: [why] for suite in chosen} if changed is None else deep_for(changed)
    for suite in chosen:
        paths = asked.get(suite.name)
        more = f" and {len(paths) - 3} more" if paths and len(paths) > 3 else ""
        output = (
            f"with deep tests: {', '.join(paths[:3])}{more}" if paths else "without deep tests: no change asks for them"
        )
        console.print(f"ci: {suite.name} {output}")
    return {suite.name: "deep" if suite.name in asked else "test" for suite in chosen}


@contextmanager
def _directory() -> Iterator[None]:
    """Create the directory for the brokers' data, in memory if there is enough; keep it if a test kept something in
    it."""
    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_NEEDED_BYTES
    made = Path(tempfile.mkdtemp(prefix="eos-tests-", dir=MEMORY if roomy else None))
    made.chmod(0o755)  # some tests run as another user
    os.environ["TMPDIR"] = str(made)
    try:
        yield
    finally:
        for path in made.glob("pytest-of-*"):
            shutil.rmtree(path, ignore_errors=True)
        if not any(made.iterdir()):
            made.rmdir()


def _prepare(chosen: list[Suite]) -> None:
    """Create the class archives of brokers and Spark, once per machine: a start then costs half or less."""
    names = {suite.name for suite in chosen}
    makes: list[Callable[[], object]] = []
    if names - set(QUICK):
        makes += [partial(archive.create, version) for version in BROKER_VERSIONS]
    if "spark" in names:
        makes.append(spark_classes.make)
    if makes and not any(cache_directory().glob("classes-*.jsa")):
        console.print("the first run on this machine fetches brokers and makes archives of their classes: two minutes")
    for make in makes:
        try:
            make()
        except Unavailable as error:
            console.print(f"[yellow]no archive of classes: {error}")


def _run_commands(suite: Suite, depth: str) -> Result:
    start = time.monotonic()
    ran = [subprocess.run(command, check=False, capture_output=True, text=True) for command in suite.commands]
    output = "".join(done.stdout + done.stderr for done in ran)
    return Result(suite, depth, not any(done.returncode for done in ran), time.monotonic() - start, output=output)


def _run_all(runs: Sequence[tuple[Suite, str]], deep_until: float) -> Iterator[Result]:
    """Run the suites one after another. Each has a share of the time left until `deep_until` for its deep tests."""
    weights = [len(suite.name.split(", ")) for suite, _ in runs]  # joined suites have a share each
    for at, (suite, depth) in enumerate(runs):
        now = time.time()
        yield _run_tests(suite, depth, now + (deep_until - now) * weights[at] / sum(weights[at:]))


def _run_tests(suite: Suite, depth: str, deep_until: float) -> Result:
    console.rule(f"{suite.name}")
    start = time.monotonic()
    TALLIES.mkdir(parents=True, exist_ok=True)
    tally = TALLIES / f"{suite.name}.json"
    tally.unlink(missing_ok=True)
    environment = os.environ | {STATEFUL: "1"} if suite.stateful else None
    code = subprocess.run(_pytest(suite, depth, tally, deep_until), check=False, env=environment).returncode
    counted = json.loads(tally.read_text()) if tally.exists() else {}
    counted.pop("took_s", None)
    return Result(suite, depth, code == 0, time.monotonic() - start, **counted)


def _pytest(suite: Suite, depth: str, tally: Path, deep_until: float) -> list[str]:
    timeout_s = LONG_S if depth == "all" else suite.timeout_s
    command = [sys.executable, "-m", "pytest", "-q", "--durations=5", f"--timeout={timeout_s}", *late.SECOND_TRY]
    command += ["-p", "tests.suites.tally", f"--tally={tally}", "-m", DEPTHS[depth]]
    command += ["-p", "tests.suites.limit", f"--deep-until={deep_until}"]
    processes = suite.processes if depth in ("check", "test") else min(suite.processes, DEEP_PROCESSES)
    return [*command, "-n", str(processes), *suite.paths]


def _show(results: list[Result], seconds_in_all: float) -> None:
    table = Table("suite", *(Column(name, justify="right") for name in COLUMNS))
    for r in results:
        is_over_budget = r.seconds > r.suite.budget_s and r.depth in ("check", "test")
        counts = [
            str(n or "") for n in (r.passed + len(r.failed), sum(r.left_out.values()), len(r.late), len(r.failed))
        ]
        name = f"{r.suite.name} ({r.depth})" if r.depth in ("deep", "all") else r.suite.name
        seconds = [f"{r.seconds:.0f}", str(r.suite.budget_s)]
        table.add_row(name, *counts, *seconds, style="red" if is_over_budget or not r.ok else None)
    table.add_section()
    total = [sum(r.passed + len(r.failed) for r in results), "", "", ""]
    budget_s = sum(r.suite.budget_s for r in results if not r.suite.commands)
    table.add_row("all", *map(str, total), f"{seconds_in_all:.0f}", str(budget_s))
    console.print(table)
    for r in results:
        for reason, count in r.left_out.items():
            console.print(f"{r.suite.name}: {count} left out: {escape(reason)}")
        for test, why in r.late.items():
            console.print(f"[yellow]{r.suite.name}: late, and run again: {escape(test)}: {escape(why)}")
        if not r.ok:
            console.print(f"[red]{r.suite.name} failed")
            console.print(r.output, markup=False, end="")
        for test, why in r.failed.items():
            console.print(f"[red]{r.suite.name}: {escape(test)}: {escape(why)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["test"]))
