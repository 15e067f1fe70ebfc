"""Documents agree with the repository: the tests, files, settings, codes and examples that they name exist."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

import eos.testing
from benchmarks.shapes import SHAPES
from docs import commands
from eos import errors
from eos.cli import COMMANDS
from eos.kafka.client.librdkafka_names import COMMON, CONSUMER_ONLY, PRODUCER_ONLY
from eos.kafka.client.settings import OPTIONS
from eos.testing.clusters import Cluster
from eos.testing.pytest_plugin import StartCluster
from eos.testing.sweeping import sweep
from tests.suites.table import SUITES
from tests.support.migrations import OURS, THEIRS, WITH_TIME
from tests.support.pages import files_of

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
AT_ROOT = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT", "tests/README")]
DOCUMENTS = [*AT_ROOT, *sorted((ROOT / "docs").rglob("*.md"))]
HOWTO = ROOT / "docs" / "howto"
TESTS = ROOT / "tests"
TEST_FOLDERS = "(?:unit|broker|containers|shim|spark|state)"


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site name them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


# ---- guarantees ----------------------------------------------------------------------------------------------


def rows_of_guarantees() -> list[list[str]]:
    lines = (ROOT / "docs" / "explanation" / "guarantees.md").read_text().splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]


def test_guarantees_have_every_row_of_kip_98() -> None:
    assert [row[0] for row in rows_of_guarantees() if re.fullmatch(r"K\d+", row[0])] == [f"K{n}" for n in range(1, 21)]


def test_tests_named_by_guarantees_exist() -> None:
    """After a file come parts of test names in backticks; rules of the checker are written the same way."""
    checker = (ROOT / "eos" / "testing" / "checker.py").read_text()
    named = 0
    for row in rows_of_guarantees():
        file = ""
        for path, test in re.findall(rf"\b({TEST_FOLDERS}/[\w/]+(?:\.py)?)|`(…?\w+…?)`", row[-1]):
            if path:
                file = path
                assert (TESTS / path).exists(), f"{row[0]}: tests/{path}"
                named += 1
            elif file.endswith(".py") and ("…" in test or test.count("_") > 1) and test not in checker:
                found = re.findall(r"^def test_(\w+)", (TESTS / file).read_text(), re.MULTILINE)
                assert any(test.strip("…") in name for name in found), f"{row[0]}: {test} in {file}"
                named += 1
    assert named > 60, named


# ---- names in all documents ----------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_files_named_by_a_document_exist(document: Path) -> None:
    text = document.read_text()
    for link, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]+))?\)", text):
        target = document.parent / link if link else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), f"{link}#{anchor}"
    for path in re.findall(
        r"\b(?:eos|spark_connector|tests|examples|benchmarks|compose|docs)/[\w/.-]*\w\.(?:py|md|sh)\b", text
    ):
        assert (ROOT / path).exists(), path
    for path in re.findall(rf"(?<![\w/])({TEST_FOLDERS}/[\w/]*test_\w+\.py)", text):
        assert (TESTS / path).exists(), path


def test_pages_are_at_most_two_clicks_from_the_readme() -> None:
    def linked(page: Path) -> set[Path]:
        found = re.findall(r"\]\(([^)#:\s]+\.md)(?:#[^)]*)?\)", page.read_text())
        return {(page.parent / link).resolve() for link in found}

    first = linked(README)
    reached = first.union(*map(linked, first))
    assert {page.resolve() for page in (ROOT / "docs").rglob("*.md")} <= reached


# Documents about the code, and dotted names in them that are not names of this project.
OF_CODE = [
    ROOT / "docs" / "DESIGN.md",
    HOWTO.parent / "explanation" / "guarantees.md",
    *(ROOT / "docs").glob("engineering/*.md"),
]
FOREIGN = {
    "offsets.retention.minutes",
    "spark.sql.execution.arrow.maxBytesPerBatch",
    *OPTIONS,
    *COMMON,
    *CONSUMER_ONLY,
    *PRODUCER_ONLY,
}


def defined_in(tree: ast.AST) -> set[str]:
    """Return every name that a module or a class defines, those of attributes too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


@functools.cache
def sources() -> dict[Path, str]:
    folders = (ROOT / name for name in ("eos", "spark_connector", "tests", "benchmarks"))
    return {file: file.read_text() for folder in folders for file in folder.rglob("*.py")}


def members_of(owner: str) -> set[str]:
    """Return the names in every package, module and class of that name."""
    found = set(eos.__all__) if owner == "eos" else set()
    for file, text in sources().items():
        if file.parent.name == owner:
            found.add(file.stem)
        if file.stem == owner:
            found |= defined_in(ast.parse(text))
        elif f"class {owner}" in text:
            classes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
            found = found.union(*(defined_in(node) for node in classes if node.name == owner))
    return found


def test_dotted_names_in_documents_about_the_code_exist() -> None:
    unknown, checked = [], 0
    files = {file.name for file in (ROOT / "eos").rglob("*.*")}
    for document in OF_CODE:
        for name in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)+)(?:\(\))?`", document.read_text()):
            *_, owner, member = name.split(".")
            checked += 1
            if name not in FOREIGN and name not in files and member not in members_of(owner):
                unknown.append(f"{document.name}: {name}")
    assert unknown == []
    assert checked > 20, checked


def test_names_that_documents_cite_with_a_file_are_defined_there() -> None:
    """For example "eos/state/notes.py `require_offset_note`" and "`decide` in spark_connector/marker.py"."""
    path, quoted = r"((?:eos|spark_connector|tests)/[\w/]+\.py)", r"((?:(?:,? )?`\w+`)+)"
    unknown, checked = [], 0
    for document in OF_CODE:
        text = document.read_text()
        after = re.findall(rf"{path} {quoted}", text)
        before = [(file, named) for named, file in re.findall(rf"{quoted} in {path}", text)]
        for file, named in after + before:
            for name in re.findall(r"\w+", named):
                checked += 1
                if name not in defined_in(ast.parse(sources()[ROOT / file])):
                    unknown.append(f"{document.name}: {name} in {file}")
    assert unknown == []
    assert checked > 30, checked


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_settings_and_commands_named_by_a_document_exist(document: Path) -> None:
    text = document.read_text()
    for name in re.findall(r"\b(eos\.[a-z]+(?:\.[a-z]+)*)=", text):
        assert name in OPTIONS, name
    for name in re.findall(r"`(eos\.[a-z]+(?:\.[a-z]+)*\.(?:ms|records|timeout))`", text):
        assert name in OPTIONS, name
    for command in re.findall(r"(?:`|^|\$ )eos ([a-z]+)\b", text, re.MULTILINE):
        assert command in COMMANDS or f"There is no `eos {command}`" in text, command


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_document_has_no_placeholder(document: Path) -> None:
    held = r"^[A-Z_]{4,}$|\b(?:TODO|TBD|FIXME|XXX)\b|lorem ipsum"
    assert re.findall(held, re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S), re.M) == []


def test_make_targets_named_by_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets |= {f"test-{suite.name}" for suite in SUITES}
    named = {name for path in DOCUMENTS for name in re.findall(r"`make ([a-z-]+)", path.read_text())}
    assert len(named) > 10
    assert named <= targets


def test_commands_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "reference" / "commands.md").read_text() == commands.page(), "run: make reference"


def test_documented_exit_codes_are_those_of_the_errors() -> None:
    text = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    codes = set(map(int, re.findall(r"^\| (\d+) \|", text, re.MULTILINE)))
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.EosError)]
    assert codes == {0, *(kind.exit_code for kind in kinds)}


# ---- examples ------------------------------------------------------------------------------------------------


def test_documented_shapes_have_a_benchmark_row() -> None:
    text = (HOWTO / "functions.md").read_text()
    results = re.findall(
        r"^\| ([^|]+) \| ", text[text.index("| result |") : text.index("The input's headers")], re.MULTILINE
    )
    (annotations,) = re.findall(r"The annotation chooses the decoder: (.*?) \(JSON\)", text, re.DOTALL)
    given = re.sub(r"\([^)]*\)", "", annotations)
    named = re.findall(r"`[^`]+`|dataclass", given)
    assert (len(results), len(named)) == (5, 6)
    shown = {word for shape in SHAPES.values() for word in shape.shows}
    assert shown >= {*results[1:], *named, "`@app.process_batch`", "`record.out(value)`"}


# The test that runs a page's file. "here" means a test below.
RUN_BY: dict[str, dict[str, str]] = {
    "README.md": {"hello.py": "here"},
    "docs/howto/functions.md": {"shop.py": "here", "test_shop.py": "broker/test_pages.py"},
    "docs/howto/state.md": {
        **dict.fromkeys(("counter.py", "shop.py", "towns.py", "renamed.py"), "here"),
        "test_counter.py": "broker/test_pages.py",
    },
    "docs/howto/time.md": {
        **dict.fromkeys(
            ("carts.py", "stations.py", "sales.py", "visits.py", "days.py", "payments.py"), "unit/test_time_page.py"
        ),
        **dict.fromkeys(("test_carts.py", "test_sales.py"), "broker/test_pages.py"),
    },
    "docs/howto/databases.md": dict.fromkeys(
        ("orders.py", "payments.py", "shop.py", "lake.py"), "database/test_page.py"
    ),
    "docs/howto/outbox.md": dict.fromkeys(("outbox.py", "orders.py"), "database/test_outbox.py"),
    "docs/howto/clusters.md": {"models.py": "here"},
    "docs/howto/joins.md": {"named.py": "here", "test_named.py": "broker/test_pages.py"},
    "docs/howto/own-loop.md": dict.fromkeys(
        ("hello_loop.py", "hello_again.py", "test_hello_loop.py", "nightly_load.py"), "broker/test_pages.py"
    ),
    "docs/howto/shim.md": {"sweep_flights.py": "here"},
    "docs/howto/test-clusters.md": {"test_my_service.py": "here"},
    "docs/howto/spark.md": {"totals.py": "spark/test_pages.py"},
    "docs/tutorial/worker.md": {"transfers.py": "here", "check.py": "broker/test_tutorials.py"},
    "docs/tutorial/state.md": {"balances.py": "here"},
    "docs/tutorial/spark.md": {
        "fees.py": "here",
        **dict.fromkeys(("totals.py", "newest.py"), "spark/test_tutorial.py"),
    },
    **{
        f"docs/howto/migrate/{page}.md": {
            **({OURS: "unit/test_migration_pages.py"} if page in THEIRS else {}),
            **{name: "broker/test_migrations.py" for name in (THEIRS.get(page, ""),) if name.endswith(".py")},
            **{name: "unit/test_migration_pages.py" for name in WITH_TIME.get(page, ()) if name.endswith(".py")},
        }
        for page in {**THEIRS, **WITH_TIME}
    },
}
# The input of each App of these files: values by topic. All records have the key "key".
GIVEN: dict[str, dict[str, list[Any]]] = {
    "README.md hello.py": {"words": ["to be"]},
    "docs/howto/functions.md shop.py": {
        "items": [{"cents": 1, "quantity": 2}],
        "orders": [{"cents": 1, "quantity": 2}],
        "returns": [{"cents": 1, "quantity": 2}],
        "visits": [{"cents": 1, "quantity": 2}],
    },
    "docs/howto/clusters.md models.py": {"orders": [{"cents": 1, "quantity": 2}]},
    "docs/howto/state.md counter.py": {"words": ["to"]},
    "docs/howto/state.md shop.py": {"clicks": ["home"] * 5, "sales": ["3", "4"], "logins": ["failed"] * 3},
    "docs/howto/state.md towns.py": {"sales": [{"town": "Bern", "cents": 5}]},
    "docs/howto/state.md renamed.py": {"orders": [5]},
    "docs/howto/joins.md named.py": {"people": [{"id": "a", "name": "Ann"}], "orders": [{"number": 1, "person": "a"}]},
    "docs/tutorial/worker.md transfers.py": {"transfers": [{"from": "alice", "to": "bob", "cents": 5}]},
    "docs/tutorial/state.md balances.py": {"bookings": [5]},
    "docs/tutorial/spark.md fees.py": {"transfers": [{"cents": 500}]},
}


def test_python_blocks_of_documents_are_run_by_a_test() -> None:
    found = {str(page.relative_to(ROOT)): set(files_of(page)) for page in DOCUMENTS}
    assert {page: files for page, files in found.items() if files} == {page: {*RUN_BY[page]} for page in RUN_BY}
    elsewhere = {test for files in RUN_BY.values() for test in files.values()} - {"here"}
    assert [test for test in elsewhere if not (TESTS / test).exists()] == []
    here = {f"{page} {file}" for page, files in RUN_BY.items() for file, test in files.items() if test == "here"}
    assert here == {*GIVEN, *DOUBLED}


@pytest.mark.parametrize("named", GIVEN)
def test_functions_of_a_page_handle_their_records(named: str, caplog: pytest.LogCaptureFixture) -> None:
    page, _, file = named.partition(" ")
    program = vars(_module(page, file, {}))
    (app,) = [value for value in program.values() if isinstance(value, eos.App)]
    topics = GIVEN[named]
    assert topics.keys() == set(app.topics) - app.chained
    ran = eos.testing.run(app, [(topic, value, "key") for topic, values in topics.items() for value in values])
    assert (ran.dead_letters, ran.skipped, caplog.messages) == (0, 0, [])
    silent = {topic for route in app.functions for topic in route.destinations}.difference(
        sent.topic for sent in ran.sent
    )
    assert silent == set()


def _module(page: str, file: str, names: dict[str, Any]) -> types.ModuleType:
    """Run a file of a page as an import does, with these names in it."""
    module = types.ModuleType(file.removesuffix(".py"))
    vars(module).update(names)
    exec(compile(files_of(ROOT / page)[file], f"{page} {file}", "exec"), vars(module))
    return module


# ---- examples too large to run: their calls must fit the signatures -------------------------------------------------


def _sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    swept = create_autospec(sweep)
    monkeypatch.setattr(eos.testing, "sweep", swept, raising=False)
    _module("docs/howto/shim.md", "sweep_flights.py", {"bootstrap_servers": "127.0.0.1:9092", "values": [b"1"]})
    swept.assert_called_once()


def _breaks_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = create_autospec(Cluster, instance=True)
    cluster.bootstrap_servers = "127.0.0.1:9092"
    start = create_autospec(StartCluster.__call__, return_value=cluster)
    tests = vars(_module("docs/howto/test-clusters.md", "test_my_service.py", {}))
    tests["test_my_service_survives_the_leader"](cluster)
    tests["test_on_the_old_version"](functools.partial(start, None))
    cluster.kill.assert_called_once_with(cluster.leader_of.return_value)
    start.assert_called_once()


DOUBLED = {
    "docs/howto/shim.md sweep_flights.py": _sweeps,
    "docs/howto/test-clusters.md test_my_service.py": _breaks_clusters,
}


@pytest.mark.parametrize("named", DOUBLED)
def test_calls_of_large_examples_fit_the_signatures(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    DOUBLED[named](monkeypatch)


def test_examples_of_user_pages_pass_strict_mypy(tmp_path: Path) -> None:
    checked_pages = ("functions", "own-loop", "state", "time", "joins", "spark")
    for page in (README, *(HOWTO / f"{name}.md" for name in checked_pages)):
        files = {name: text for name, text in files_of(page).items() if not name.startswith("test_")}
        assert files
        for name, text in files.items():
            (tmp_path / f"{page.stem.lower().replace('-', '_')}_{name}").write_text(text)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(ROOT / "build" / "mypy"), "."],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_hello_world_is_short() -> None:
    assert 8 <= len(files_of(README)["hello.py"].splitlines()) <= 15
