"""Adds pages for `make docs`: README.md as the first page, CONTRIBUTING.md, examples and the Python API.

A hook of mkdocs (mkdocs.yml). Pages are written for the repository, where a link leads to a file. Here it leads to a
page, or to the repository for a file without a page.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import eos
from eos import errors

ROOT = Path(__file__).parents[1]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
AT_ROOT = {"README.md": "index.md"} | {name: name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")}

# Sections of the Python reference with their names. For the names in MEMBERS only the listed members, else all.
MEMBERS = {
    "App": ["process", "process_batch", "on_timer", "on_close", "on_merge", "on_start", "on_stop"],
    "TransactSession": ["stop", "stopping_on_signals", "pause", "lag", "topics", "assignment", "taken", "committed"],
    "Transaction": ["records", "send", "dead_letter", "commit", "abort"],
    "plain.Transactions": ["begin"],
    "plain.PlainTransaction": ["send"],
    "Settings": ["get", "with_values", "without"],
}
PYTHON = {
    "Functions and their records": ["App", "Record", "Out", "run"],
    "Records that fail": ["stop", "skip", "dlq", "retry"],
    "State": ["State", "MapState", "ListState"],
    "Time": ["Timers", "Timer", "Window", "tumbling", "hopping", "sessions"],
    "Your own loop": ["TransactSession", "Transaction", "Settings"],
    "Transactions without input": ["transaction", "plain.Transactions", "plain.PlainTransaction", "plain.Delivery"],
    "Errors": [name for name in eos.__all__ if isinstance(getattr(errors, name, None), type)],
    "Tests": ["testing.run", "testing.advance", "testing.Ran", "testing.Sent", "testing.Session", "testing.sweep"],
    "Spark": [
        f"spark_connector.{name}"
        for name in ("spark_session", "read_committed", "exactly_once_sink", "exactly_once_write")
    ],
}


def on_files(files: Files, config: Any) -> Files:
    pages = {page: (ROOT / name).read_text() for name, page in AT_ROOT.items()}
    pages["LICENSE.md"] = f"# Licence\n\n```text\n{(ROOT / 'LICENSE').read_text()}```\n"
    for example in (ROOT / "examples").glob("*.py"):
        pages[f"examples/{example.stem}.md"] = f"# {example.name}\n\n```python\n{example.read_text()}```\n"
    pages["reference/python.md"] = _python()
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return the page with its links rewritten for the site."""
    here = page.file.src_uri
    written_at = next((name for name, there in AT_ROOT.items() if there == here), f"docs/{here}")

    def lead(found: re.Match[str]) -> str:
        path, hash_, anchor = found[1].partition("#")
        if not path or re.match(r"\w+:", path):
            return found[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(written_at), path))
        there = _page_of(file)
        target = files.get_file_from_path(there)
        if target is None or target.inclusion.is_excluded():
            return f"]({REPOSITORY}/blob/main/{file}{hash_}{anchor})"
        return f"]({posixpath.relpath(there, posixpath.dirname(here) or '.')}{hash_}{anchor})"

    return re.sub(r"\]\(([^)\s]+)\)", lead, markdown)


def _page_of(file: str) -> str:
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    if file.startswith("examples/"):
        return file.removesuffix(".py") + ".md"
    return AT_ROOT.get(file, f"{file}.md")


def _python() -> str:
    text = "# Python\n"
    for title, names in PYTHON.items():
        text += f"\n## {title}\n"
        for name in names:
            text += f"\n::: {name if name.startswith('spark_connector') else f'eos.{name}'}\n"
            if name in MEMBERS:
                text += f"    options:\n      members: [{', '.join(MEMBERS[name])}]\n"
    return text
