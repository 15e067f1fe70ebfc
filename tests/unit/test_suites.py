"""The test suites: which changes select deep tests, and which tests run in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.suites import __main__ as runner
from tests.suites.changes import LANDED, since_the_last_landing
from tests.suites.marks import unit_of
from tests.suites.table import DEEP, EVERY, STATEFUL, SUITES, Suite, deep_for, joined

ROOT = Path(__file__).parents[2]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository of one commit with a file `a`."""
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    commit(tmp_path)
    return tmp_path


def git(where: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    return subprocess.run(["git", *identity, *arguments], cwd=where, check=True, capture_output=True, text=True).stdout


def commit(where: Path) -> str:
    git(where, "add", "-A")
    git(where, "commit", "-qm", "a step")
    return git(where, "rev-parse", "HEAD").strip()


@pytest.fixture
def suites(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Return a function that runs Python programs in place of the suites and returns the exit code."""

    def run(**programs: str) -> int:
        made = [Suite(name, 0, commands=((sys.executable, "-c", code),)) for name, code in programs.items()]
        monkeypatch.setattr(runner, "SUITES", tuple(made))
        return runner.main(["test"])

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(runner, "_prepare", lambda chosen: None)
    return run


def test_all_suites_run_and_the_table_names_failed_suites(
    suites: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ran = [tmp_path / "1st", tmp_path / "2nd"]
    first, second = (f"import pathlib; print('said'); pathlib.Path({str(path)!r}).touch()" for path in ran)
    assert suites(first=f"{first}; exit(3)", second=second) == 1
    assert all(path.exists() for path in ran)
    output = capfd.readouterr().out
    assert output.count("said") == 1, "only the output of the failed suite is shown"
    assert re.findall(r"^(\w+) failed$", output, re.MULTILINE) == ["first"]


@pytest.mark.usefixtures("suites")
def test_failed_tests_are_listed_with_their_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The list comes after the table, because only the end of a long output may be kept."""
    (tmp_path / "test_it.py").write_text("def test_sum():\n    assert sum([1, 1]) == 3, 'no [sum]'\n")
    monkeypatch.setattr(runner, "TALLIES", tmp_path)
    monkeypatch.setattr(runner, "SUITES", (Suite("mine", 0, paths=(str(tmp_path / "test_it.py"),)),))
    assert runner.main(["test"]) == 1
    output = capfd.readouterr().out
    assert re.search(r"mine failed\nmine: \S*test_it.py::test_sum: AssertionError: no \[sum\]", output)


@pytest.mark.usefixtures("suites")
def test_deep_tests_are_left_out_when_the_time_of_ci_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    test = "import pytest\n@pytest.mark.deep\ndef test_deep(): assert 0\ndef test_other(): pass\n"
    (tmp_path / "test_it.py").write_text(test)
    monkeypatch.setattr(runner, "TALLIES", tmp_path)
    monkeypatch.setattr(runner, "SUITES", (Suite("mine", 0, paths=(str(tmp_path / "test_it.py"),)),))
    monkeypatch.setattr(runner, "since_the_last_landing", lambda: (None, "everything"))
    monkeypatch.setattr(runner, "CI_DEEP_S", -1)
    assert runner.main(["ci"]) == 0
    assert "mine: 1 left out: the time for deep tests was over" in capfd.readouterr().out
    monkeypatch.setattr(runner, "CI_DEEP_S", 600)
    assert runner.main(["ci"]) == 1


@pytest.mark.parametrize(("arguments", "said"), [(["nope"], "no mode nope"), (["test", "nope"], "no suite nope")])
def test_error_for_unknown_mode_or_suite_lists_the_valid_names(
    arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert runner.main(arguments) == 64
    assert f"there is {said}: " in capfd.readouterr().out


def test_suite_over_its_budget_does_not_fail(suites: Callable[..., int]) -> None:
    assert suites(slow="pass") == 0


@pytest.mark.parametrize(
    ("deep", "names"),
    [
        ((), ["unit", "broker, state, shim", "containers", "spark"]),
        (("broker", "shim", "spark"), ["unit", "broker, shim", "state", "containers", "spark"]),
        (("state", "containers"), ["unit", "broker, shim", "state", "containers", "spark"]),
        (("broker", "state", "shim"), ["unit", "broker, shim", "state", "containers", "spark"]),
    ],
)
def test_suites_that_share_brokers_run_together_if_equally_deep(deep: tuple[str, ...], names: list[str]) -> None:
    suites = [suite for suite in SUITES if not suite.commands]
    depths = {suite.name: "deep" if suite.name in deep else "test" for suite in suites}
    made = list(joined(suites, depths))
    assert [suite.name for suite, _ in made] == names
    assert sum(suite.budget_s for suite, _ in made) == sum(suite.budget_s for suite in suites)
    assert {path for suite, _ in made for path in suite.paths} == {path for suite in suites for path in suite.paths}
    assert all(depths[name] == depth for suite, depth in made for name in suite.name.split(", "))
    assert {suite.name for suite, depth in made if suite.stateful} <= {"state"}


@pytest.mark.parametrize(
    ("changed", "selected"),
    [
        (["docs/howto/shim.md", "README.md", "tests/unit/test_cli.py"], set()),
        (["eos/shim/chain.py"], {"shim"}),
        (["eos/session/session.py"], {"broker", "containers", "spark", "state"}),
        (["spark_connector/sink.py", "docs/howto/spark.md"], {"spark"}),
        (["tests/broker/test_topic.py", "tests/shim/test_trace.py"], {"broker", "shim"}),
        (["tests/support/reading.py"], EVERY),
        (["tests/suites/table.py"], EVERY),
        (["a/new/folder"], EVERY),
    ],
)
def test_change_selects_deep_tests_of_the_affected_suites(changed: list[str], selected: set[str]) -> None:
    assert set(deep_for(changed)) == selected


def test_paths_in_the_tables_exist() -> None:
    named = [path.partition("::")[0] for path in DEEP]
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert [path for suite in SUITES for path in suite.paths if not (ROOT / path).exists()] == []


SHOW = """
def pytest_collection_finish(session):
    for item in session.items:
        print("collected", item.name)
"""


def collect(tmp_path: Path, folder: str, code: str, *arguments: str, **environment: str) -> list[str]:
    """Return the names of the tests in `code` that pytest would run in this folder of tests, in order."""
    tests = tmp_path / "tests"
    (tests / folder).mkdir(parents=True)
    (tests / folder / "test_it.py").write_text(code)
    (tmp_path / "show.py").write_text(SHOW)
    plugins = ["-p", "no:cacheprovider", "-p", "show", "-p", "tests.suites.marks", "-c", os.devnull]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *plugins, f"--rootdir={tmp_path}"]
    path = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(
        [*command, *arguments, str(tests)],
        cwd=tmp_path,
        env=os.environ | path | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return [line.split()[1] for line in done.stdout.splitlines() if line.startswith("collected ")]


MARKED = """
import pytest

@pytest.mark.deep
def test_deep(): pass

@pytest.mark.deep_for("one*")
@pytest.mark.parametrize("which", ["one", "two"])
def test_one(which): pass

@pytest.mark.takes(9)
def test_longest(): pass

def test_plain(): pass
"""


def test_deep_marks_apply_to_tests_and_parameters(tmp_path: Path) -> None:
    assert collect(tmp_path, "shim", MARKED, "-m", "deep") == ["test_deep", "test_one[one]"]


def test_longest_tests_begin_first_and_deep_tests_last(tmp_path: Path) -> None:
    first = ["test_longest", "test_one[two]", "test_plain"]
    assert collect(tmp_path, "shim", MARKED) == [*first, "test_deep", "test_one[one]"]


def test_stateful_run_makes_broker_tests_deep(tmp_path: Path) -> None:
    assert len(collect(tmp_path, "broker", MARKED, "-m", "deep", **{STATEFUL: "1"})) == 5


def test_test_folders_belong_to_a_suite() -> None:
    folders = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    paths = [path for suite in SUITES for path in suite.paths]
    assert [folder for folder in folders if not any(f"{folder}/".startswith(f"{path}/") for path in paths)] == []


def test_changes_are_relative_to_the_landed_commit(repository: Path) -> None:
    landed = git(repository, "rev-parse", "HEAD").strip()
    (repository / ".ci").mkdir()
    (repository / LANDED).write_text(landed)
    (repository / "b").write_text("2")
    commit(repository)
    changed, why = since_the_last_landing(repository)
    assert (changed, landed[:9] in why) == ([LANDED, "b"], True)


@pytest.mark.parametrize("landed", ["", "0" * 40], ids=["no base", "a base that is not in the history"])
def test_everything_runs_without_a_base_commit(landed: str, repository: Path) -> None:
    (repository / ".ci").mkdir()
    (repository / LANDED).write_text(landed)
    changed, why = since_the_last_landing(repository)
    assert changed is None
    assert "everything" in why


def test_tests_that_share_module_fixtures_stay_together() -> None:
    assert unit_of("tests/broker/test_security.py::test_a[x]") == "tests/broker/test_security.py"
    assert unit_of("tests/broker/test_topic.py::test_a[x]") == "tests/broker/test_topic.py::test_a[x]"
    assert unit_of("tests/unit/test_cli.py::test_a") == "tests/unit/test_cli.py"
    older = unit_of("tests/broker/test_restart.py::test_a[kafka392]")
    assert older == unit_of("tests/broker/test_topic.py::test_b[3.9.2]")
