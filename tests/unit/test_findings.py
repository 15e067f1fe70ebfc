"""docs/findings.md and its scripts agree: there is exactly one short script for each finding."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "findings.md"
SCRIPTS = sorted((ROOT / "docs" / "findings").glob("*.py"))
LONGEST = 60
ASKED = ("**Seen with.**", "**What it does.**", "**Reproducer.**", "**Cause.**", "**What eos does.**")


def findings() -> dict[str, str]:
    """Return the text of each finding by its title."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def named(text: str) -> list[str]:
    return re.findall(r"^\$ python docs/findings/(\w+\.py)", text, re.MULTILINE)


@pytest.mark.parametrize("title", findings())
def test_finding_is_complete_and_names_an_existing_script(title: str) -> None:
    text = findings()[title]
    assert [part for part in ASKED if part not in text] == []
    (script,) = set(named(text))
    assert (PAGE.parent / "findings" / script).exists()
    assert "\nSEEN: " in text, "the script's output"


def test_every_script_is_named_by_one_finding() -> None:
    names = [script for text in findings().values() for script in set(named(text))]
    assert len(names) >= 5
    assert sorted(names) == [script.name for script in SCRIPTS]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_finding_script_is_short_and_reports_the_fault(script: Path) -> None:
    text = script.read_text()
    compile(text, script.name, "exec")
    assert len(text.splitlines()) <= LONGEST
    assert '"SEEN: ' in text or 'f"SEEN: ' in text
    assert '"not seen: ' in text
    assert text.rstrip().splitlines()[-1].startswith("sys.exit(0 if ")
