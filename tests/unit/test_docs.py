"""What the documents say of the repository is so: the tests, files, settings, codes, examples they name are there."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import eos.testing
from benchmarks.shapes import SHAPES
from eos import errors
from eos.cli import COMMANDS
from eos.kafka.settings import OPTIONS
from tests.suites.table import SUITES
from tests.support.pages import blocks_of

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
HOWTO = ROOT / "docs" / "howto"
TESTS = ROOT / "tests"
TEST_FOLDERS = "(?:unit|broker|containers|shim|spark|state)"


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def code_blocks(text: str, language: str) -> list[str]:
    return [block for its, block in blocks_of(text) if its == language]


def anchors(text: str) -> set[str]:
    """Of the headings of a page, as GitHub and the site name them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


# ---- guarantees ----------------------------------------------------------------------------------------------


def rows_of_guarantees() -> list[list[str]]:
    lines = (ROOT / "docs" / "explanation" / "guarantees.md").read_text().splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]


def test_every_row_of_kip_98_is_among_the_guarantees() -> None:
    assert [row[0] for row in rows_of_guarantees() if re.fullmatch(r"K\d+", row[0])] == [f"K{n}" for n in range(1, 21)]


def test_every_test_that_a_guarantee_names_exists() -> None:
    """Behind a file the part of a test's name that it names, in backticks; rules of the checker look the same."""
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
def test_every_file_that_a_document_names_exists(document: Path) -> None:
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


def test_every_page_is_two_clicks_from_the_readme() -> None:
    def linked(page: Path) -> set[Path]:
        found = re.findall(r"\]\(([^)#:\s]+\.md)(?:#[^)]*)?\)", page.read_text())
        return {(page.parent / link).resolve() for link in found}

    first = linked(README)
    reached = first.union(*map(linked, first))
    assert {page.resolve() for page in (ROOT / "docs").rglob("*.md")} <= reached


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_every_setting_and_command_that_a_document_names_exists(document: Path) -> None:
    text = document.read_text()
    for name in re.findall(r"\b(eos\.[a-z]+(?:\.[a-z]+)*)=", text):
        assert name in OPTIONS, name
    for name in re.findall(r"`(eos\.[a-z]+(?:\.[a-z]+)*\.(?:ms|records|timeout))`", text):
        assert name in OPTIONS, name
    for command in re.findall(r"(?:`|^|\$ )eos ([a-z]+)\b", text, re.MULTILINE):
        assert command in COMMANDS or f"There is no `eos {command}`" in text, command


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_no_document_holds_a_place_for_what_was_to_come(document: Path) -> None:
    held = r"^[A-Z_]{4,}$|\b(?:TODO|TBD|FIXME|XXX)\b|lorem ipsum"
    assert re.findall(held, re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S), re.M) == []


def test_every_target_of_make_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets |= {f"test-{suite.name}" for suite in SUITES}
    named = {name for path in DOCUMENTS for name in re.findall(r"`make ([a-z-]+)", path.read_text())}
    assert len(named) > 10
    assert named <= targets


def test_the_exit_codes_that_are_documented_are_those_of_the_errors() -> None:
    text = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    codes = set(map(int, re.findall(r"^\| (\d+) \|", text, re.MULTILINE)))
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.EosError)]
    assert codes == {0, *(kind.exit_code for kind in kinds)}


# ---- examples ------------------------------------------------------------------------------------------------


def test_every_shape_of_function_that_is_documented_has_a_row_in_the_benchmark() -> None:
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


def test_every_python_example_compiles() -> None:
    blocks = [(path.name, block) for path in DOCUMENTS for block in code_blocks(path.read_text(), "python")]
    assert len(blocks) >= 8
    for name, block in blocks:
        compile(block, name, "exec")


def test_the_examples_of_pages_for_users_pass_mypy_strictly(tmp_path: Path) -> None:
    """The blocks of a page are one program, in their order."""
    for page in (README, *(HOWTO / f"{name}.md" for name in ("functions", "own-loop", "state", "spark"))):
        blocks = [block for block in code_blocks(page.read_text(), "python") if "\ndef test_" not in block]
        assert blocks
        (tmp_path / f"{page.stem.lower()}.py").write_text("\n".join(blocks))
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


def test_hello_world_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (hello,) = [block for block in code_blocks(README.read_text(), "python") if block.startswith("# hello.py\n")]
    assert 8 <= len(hello.splitlines()) <= 15
    (tmp_path / "hello.py").write_text(hello)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "hello", raising=False)
    app = importlib.import_module("hello").app
    monkeypatch.delitem(sys.modules, "hello")
    assert eos.testing.run(app, [("words", "to be")]).values("loud-words") == [b"TO BE"]
